"""Chat over templates of other forms: Qwen3.5's (reasoning begun by the prompt, XML calls), Gemma's (none, and its
own)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api_support import Head, running_head
from tests.fake_engine import say
from tests.test_api_template import GEMMA2, GEMMA4, QWEN35

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


def with_template(tmp_path: Path, source: str) -> Any:
    file = tmp_path / "template.jinja"
    file.write_text(source)
    return running_head(tmp_path, env={"FAKE_ENGINE_TEMPLATE": str(file)})


def ask(head: Head, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    answer = httpx.post(f"{head.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def streamed(head: Head, text: str, **more: Any) -> tuple[str, str, list[Any], str]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **more}
    content, reasoning, calls, reason = "", "", [], ""
    with httpx.stream("POST", f"{head.url}/v1/chat/completions", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                delta = choice["delta"]
                content += delta.get("content", "")
                reasoning += delta.get("reasoning_content", "")
                calls += [call["function"] for call in delta.get("tool_calls", ())]
                reason = choice["finish_reason"] or reason
    return content, reasoning, calls, reason


def test_qwen35(tmp_path: Path) -> None:
    with with_template(tmp_path, QWEN35) as head:
        assert streamed(head, say("Hm.\n</think>\n\nYes.")) == ("Yes.", "Hm.", [], "stop")
        plain = ask(head, say("Yes."), chat_template_kwargs={"enable_thinking": False})["message"]
        assert plain == {"role": "assistant", "content": "Yes."}
        call = (
            "Let me.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
        )
        assert streamed(head, say(call), tools=[TOOL]) == (
            "",
            "Let me.",
            [{"name": "f", "arguments": '{"n": 3}'}],
            "tool_calls",
        )
        # What is held to a schema cannot think first: its reasoning is closed before it begins.
        held = ask(
            head,
            "q",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
            },
        )["message"]
        assert held == {"role": "assistant", "content": '{"a": true}'}
        forced = ask(head, "q", tools=[TOOL], tool_choice="required")
        assert forced["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 7}'}


def test_gemma4(tmp_path: Path) -> None:
    with with_template(tmp_path, GEMMA4) as head:
        text = say("<|channel>thought\nHm.<channel|>So:<|tool_call>call:f{n:3}<tool_call|>")
        assert streamed(head, text, tools=[TOOL], chat_template_kwargs={"enable_thinking": True}) == (
            "So:",
            "Hm.",
            [{"name": "f", "arguments": '{"n": 3}'}],
            "tool_calls",
        )


def test_gemma_without_a_form_of_its_own(tmp_path: Path) -> None:
    with with_template(tmp_path, GEMMA2) as head:
        assert httpx.get(f"{head.url}/props", timeout=10).json()["tool_format"] == "generic"
        assert streamed(head, say('{"tool_call": {"name": "f", "arguments": {"n": 3}}}'), tools=[TOOL]) == (
            "",
            "",
            [{"name": "f", "arguments": '{"n": 3}'}],
            "tool_calls",
        )
        assert ask(head, say('{"response": "No need."}'), tools=[TOOL])["message"]["content"] == "No need."
        assert (
            ask(head, say("<think>not a mark here</think>"))["message"]["content"] == "<think>not a mark here</think>"
        )


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    with with_template(tmp_path, GEMMA2) as head:
        body = {"messages": [{"role": "assistant", "content": "first"}]}
        answer = httpx.post(f"{head.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 400 and "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages.__class__.__mro__[1] }}"])
def test_a_template_that_cannot_be_used(tmp_path: Path, source: str) -> None:
    with with_template(tmp_path, source) as head:
        body = {"messages": [{"role": "user", "content": "q"}]}
        answer = httpx.post(f"{head.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code in (400, 500) and "chat template" in answer.json()["error"]["message"]
        assert httpx.post(f"{head.url}/v1/completions", json={"prompt": say("works")}, timeout=30).status_code == 200
