"""The API as the `openai` package sees it: a client that nobody here wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.api_support import Head, running_head
from tests.fake_engine import say

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running_head(tmp_path_factory.mktemp("head")) as running:
        yield running


@pytest.fixture
def client(head: Head) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["fake"]
    assert client.models.retrieve("anything").id == "fake"


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="fake", messages=ask(say("Hallo, Wörld!")))
    choice = done.choices[0]
    assert choice.message.content == "Hallo, Wörld!" and choice.finish_reason == "stop"
    assert choice.message.tool_calls is None and choice.logprobs is None
    assert done.usage is not None and done.object == "chat.completion" and done.id.startswith("chatcmpl-")
    assert done.usage.completion_tokens == len("Hallo, Wörld!".encode())
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="x", messages=ask("q"), max_tokens=50, temperature=0)
    stream = client.chat.completions.create(
        model="x",
        messages=ask("q"),
        max_completion_tokens=50,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usages = "", [], []
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content and len(text.encode()) == 50
    assert [reason for reason in reasons if reason] == ["length"] == [whole.choices[0].finish_reason]
    assert [usage for usage in usages if usage] == [whole.usage]


def test_without_include_usage_there_is_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="x", messages=ask(say("hi")), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_timings_per_token(client: openai.OpenAI) -> None:
    asked: Any = {"model": "x", "messages": ask(say("several words of an answer")), "stream": True}
    *chunks, last = client.chat.completions.create(**asked, extra_body={"timings_per_token": True})
    counts = [chunk.timings["predicted_n"] for chunk in chunks if chunk.choices[0].delta.content]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] <= last.timings["predicted_n"]
    without = client.chat.completions.create(**asked)
    assert sum(hasattr(chunk, "timings") for chunk in without) == 1, "not asked for: at the end alone"


def test_seed_and_n(client: openai.OpenAI) -> None:
    def three(seed: int) -> list[str | None]:
        done = client.chat.completions.create(
            model="x", messages=ask("q"), n=3, seed=seed, temperature=1, max_tokens=20
        )
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert done.usage is not None and done.usage.completion_tokens == 60
        return [choice.message.content for choice in done.choices]

    first = three(7)
    assert three(7) == first and len(set(first)) == 3 and three(100) != first


def test_n_streams_side_by_side(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {0: "", 1: ""}
    ends = []
    for chunk in client.chat.completions.create(model="x", messages=ask("q"), n=2, seed=1, max_tokens=15, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1] and all(len(text.encode()) == 15 for text in texts.values())


@pytest.mark.parametrize("stop", ["END", ["zzz", "END"]])
def test_stop(client: openai.OpenAI, stop: Any) -> None:
    done = client.chat.completions.create(model="x", messages=ask(say("one EN two END three")), stop=stop)
    assert done.choices[0].message.content == "one EN two " and done.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="x", messages=ask(say("ab")), logprobs=True, top_logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b"]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2] and logprobs.content[0].logprob == -0.1
    found = []
    for chunk in client.chat.completions.create(model="x", messages=ask(say("ab")), logprobs=True, stream=True):
        for choice in chunk.choices:
            found += [entry.token for entry in (choice.logprobs.content or [] if choice.logprobs else [])]
    assert found == ["a", "b"]


def test_reasoning_is_split_off(client: openai.OpenAI) -> None:
    text = say("<think>\nLet me see.\n</think>\n\nForty-two.")
    message = client.chat.completions.create(model="x", messages=ask(text)).choices[0].message
    assert message.content == "Forty-two." and message.model_extra == {"reasoning_content": "Let me see."}
    content = reasoning = ""
    for chunk in client.chat.completions.create(model="x", messages=ask(text), stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
    assert (content, reasoning) == ("Forty-two.", "Let me see.")
    raw = client.chat.completions.create(model="x", messages=ask(text), extra_body={"reasoning_format": "none"})
    assert raw.choices[0].message.content == "<think>\nLet me see.\n</think>\n\nForty-two."


def test_tools(client: openai.OpenAI) -> None:
    text = say(
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn", "days": 2}}\n</tool_call>'
    )
    done = client.chat.completions.create(model="x", messages=ask(text), tools=[WEATHER])
    message, reason = done.choices[0].message, done.choices[0].finish_reason
    assert reason == "tool_calls" and message.content == "Let me look." and message.tool_calls is not None
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls
        if call.type == "function"
    ]
    assert calls == [("weather", {"place": "Köln"}), ("weather", {"place": "Bonn", "days": 2})]
    assert len({call.id for call in message.tool_calls}) == 2
    seen: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(model="x", messages=ask(text), tools=[WEATHER], stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                seen.setdefault(call.index, []).append((call.function.name or "") + (call.function.arguments or ""))
    assert [json.loads("".join(seen[i]).removeprefix("weather")) for i in (0, 1)] == [
        arguments for _, arguments in calls
    ]
    follow = [
        *ask("q"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
        *ask(say("Take a coat.")),
    ]
    assert (
        client.chat.completions.create(model="x", messages=follow, tools=[WEATHER]).choices[0].message.content
        == "Take a coat."
    )


def test_tool_choice(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        picked: Any = choice
        done = client.chat.completions.create(model="x", messages=ask("q"), tools=[WEATHER], tool_choice=picked)
        calls = done.choices[0].message.tool_calls
        assert calls is not None and calls[0].type == "function" and done.choices[0].finish_reason == "tool_calls"
        assert calls[0].function.name == "weather" and json.loads(calls[0].function.arguments) == {
            "place": "text",
            "days": 7,
        }
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    none = client.chat.completions.create(model="x", messages=ask(say(text)), tools=[WEATHER], tool_choice="none")
    assert none.choices[0].message.content == text and none.choices[0].finish_reason == "stop"


class Point(pydantic.BaseModel):
    x: int
    label: str


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="x", messages=ask("q"), response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=7, label="text")
    done = client.chat.completions.create(model="x", messages=ask("q"), response_format={"type": "json_object"})
    assert json.loads(done.choices[0].message.content or "") == {}
    with client.chat.completions.stream(model="x", messages=ask("q"), response_format=Point) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Point(x=7, label="text")


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model="x", prompt=[say("one"), say("two")], max_tokens=10, echo=True)
    assert [choice.text for choice in done.choices] == [say("one") + "one", say("two") + "two"]
    prompt: Any = list(say("from tokens").encode())
    assert client.completions.create(model="x", prompt=prompt).choices[0].text == "from tokens"
    probs = client.completions.create(model="x", prompt=say("ab"), logprobs=2).choices[0].logprobs
    assert probs is not None and probs.tokens == ["a", "b"] and probs.text_offset == [0, 1]
    text = "".join(
        chunk.choices[0].text for chunk in client.completions.create(model="x", prompt=say("stream"), stream=True)
    )
    assert text == "stream"


def test_embeddings(client: openai.OpenAI) -> None:
    both = client.embeddings.create(model="x", input=["one", "two"])  # base64, as this client asks by default
    floats = client.embeddings.create(model="x", input="two", encoding_format="float")
    assert both.data[1].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert sum(x * x for x in floats.data[0].embedding) == pytest.approx(1.0)
    assert (
        both.usage.prompt_tokens == 6
        and len(client.embeddings.create(model="x", input="a", dimensions=3).data[0].embedding) == 3
    )


def test_many_at_once_async(head: Head) -> None:
    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=f"{head.url}/v1", api_key="none", timeout=30, max_retries=0) as client:

            async def one(number: int) -> None:
                stream = await client.chat.completions.create(
                    model="x", messages=ask(say(f"answer {number}")), stream=True
                )
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                assert text == f"answer {number}"

            await asyncio.gather(*(one(number) for number in range(20)))

    asyncio.run(test())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, None),
        ({"messages": []}, "messages"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, None),
        ({"tool_choice": "required"}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, None),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, change: dict[str, Any], param: str | None) -> None:
    body: dict[str, Any] = {"model": "x", "messages": ask("q"), **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.type == "invalid_request_error" and caught.value.param == param and caught.value.message
