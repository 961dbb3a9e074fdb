"""POST /v1/chat/completions: messages in, an answer out, as OpenAI has it.

Joins the parts: schema.py checks, template.py renders, the supervisor generates, answer.py takes the text apart. Fields
that OpenAI does not have follow llama-server (`timings`, `reasoning_content`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from hydra.api.answer import AnswerParser, Delta
from hydra.api.answers import Prepared, open_streams, respond
from hydra.api.schema import ChatRequest, NamedTool, parse
from hydra.api.state import HeadState, head_of, merged
from hydra.api.template import Rendered
from hydra.errors import RequestError
from hydra.head.streams import Chunk, Finish


@dataclass
class _Chat(Prepared):
    request: ChatRequest = field(kw_only=True)
    parsers: list[AnswerParser] = field(kw_only=True)
    model: str = field(kw_only=True)
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}", kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    def finish_reason(self, index: int, finish: Finish) -> str:
        if finish.reason == "length":
            return "length"
        return "tool_calls" if self.parsers[index].calls else "stop"

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "hydra",
            "choices": choices,
        }


async def chat_completions(request: Request) -> ASGIApp:
    parsed = parse(ChatRequest, await request.body())
    return await respond(request, parsed.stream, _prepare(head_of(request), parsed), _events, _whole)


async def _prepare(head: HeadState, request: ChatRequest) -> _Chat:
    await head.model_known(request.max_wait_s)
    rendered, parser_options, constraint = _prompt(head, request)
    tokens = await head.tokenize(rendered.text, request.max_wait_s)
    requests = []
    for index in range(request.n):
        params = request.sampling(index)
        if rendered.stops:
            params["stop"] = [*(params.get("stop") or ()), *rendered.stops]
        if constraint is not None:
            params["json_schema"] = constraint
        control = head.template.marks.control
        if control:
            params["preserved_tokens"] = list(control)
        requests.append((tokens, params))
    streams = open_streams(head.supervisor, requests, request.max_wait_s)
    parsers = [AnswerParser(head.template.marks, **parser_options) for _ in streams]
    return _Chat(head.supervisor, streams, request=request, parsers=parsers, model=head.model_name)


def _prompt(head: HeadState, request: ChatRequest) -> tuple[Rendered, dict[str, Any], dict[str, Any] | None]:
    """The prompt, how to read the answer, and the JSON schema that the answer is held to, if any.

    Raises: RequestError for what contradicts itself.
    """
    template = head.template
    choice = request.tool_choice
    tools = [] if choice == "none" else [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    constraint = request.constraint()
    forced = bool(tools) and (choice == "required" or isinstance(choice, NamedTool))
    if constraint is not None and tools:
        raise RequestError(
            "response_format and tools cannot be used together.", 'Leave out one of them, or send tool_choice: "none".'
        )
    if request.grammar and (constraint is not None or forced):
        raise RequestError("grammar cannot be used together with response_format or a forced tool.", "Leave one out.")
    options = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    held = constraint is not None or forced
    if held or (tools and template.marks.tools == "generic"):
        options["enable_thinking"] = False
    rendered = template.render(request.messages, tools, add_generation_prompt=request.add_generation_prompt, **options)
    if held:
        rendered = template.close_reasoning(rendered)
    if forced:
        constraint = _call_schema(tools, choice.function.name if isinstance(choice, NamedTool) else None)
        if template.marks.tools == "hermes":
            rendered = Rendered(rendered.text + "<tool_call>\n", False, rendered.stops)
    elif tools and template.marks.tools == "generic":
        constraint = _generic_schema(tools)
    reading = {
        "tools": tools,
        "reasoning": request.reasoning_format != "none",
        "reasoning_open": rendered.reasoning_open,
        "forced": forced,
    }
    return rendered, reading, constraint


def _call_schema(tools: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The schema of one call, of the named function or of any."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
        }
        for tool in tools
        if name is None or tool["function"]["name"] == name
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _generic_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """A call or an answer, for models whose template has no form of calls of its own (template.TOOLS_PROMPT)."""
    call = {"type": "object", "properties": {"tool_call": _call_schema(tools, None)}, "required": ["tool_call"]}
    answer = {"type": "object", "properties": {"response": {"type": "string"}}, "required": ["response"]}
    return {"anyOf": [call, answer]}


async def _events(chat: _Chat) -> AsyncGenerator[dict[str, Any], None]:
    kind = "chat.completion.chunk"
    probs: dict[int, list[dict[str, Any]]] = {index: [] for index in range(len(chat.streams))}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if probs[index]:
            choice["logprobs"] = {"content": probs[index], "refusal": None}
            probs[index] = []
        return chat.envelope(kind, [choice])

    for index in range(len(chat.streams)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for index, item in merged(chat.streams):
        parser = chat.parsers[index]
        if isinstance(item, Chunk):
            probs[index] += [_logprob(entry) for entry in item.logprobs or ()]
            for delta in parser.feed(item.text):
                timings = {"timings": chat.timings()} if chat.request.timings_per_token and index == 0 else {}
                yield {**chunk(index, _delta(delta)), **timings}
            continue
        chat.note_finish(index, item)
        for delta in parser.finish():
            yield chunk(index, _delta(delta))
        last = chunk(index, {}, chat.finish_reason(index, item))
        if index == 0:
            last["timings"] = chat.timings()
        yield last
    if chat.request.include_usage:
        yield {**chat.envelope(kind, []), "usage": chat.usage()}


async def _whole(chat: _Chat) -> dict[str, Any]:
    parts: list[list[Delta]] = [[] for _ in chat.streams]
    probs: list[list[dict[str, Any]]] = [[] for _ in chat.streams]
    reasons = [""] * len(chat.streams)
    async for index, item in merged(chat.streams):
        if isinstance(item, Chunk):
            parts[index] += chat.parsers[index].feed(item.text)
            probs[index] += [_logprob(entry) for entry in item.logprobs or ()]
        else:
            parts[index] += chat.parsers[index].finish()
            chat.note_finish(index, item)
            reasons[index] = chat.finish_reason(index, item)
    choices = []
    for index, deltas in enumerate(parts):
        message = _message(deltas)
        logprobs = {"content": probs[index], "refusal": None} if chat.request.logprobs else None
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reasons[index]})
    return {**chat.envelope("chat.completion", choices), "usage": chat.usage(), "timings": chat.timings()}


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls = [_call(delta) for delta in deltas if delta.kind == "call"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    return {"tool_calls": [{"index": delta.index, **_call(delta)}]}


def _call(delta: Delta) -> dict[str, Any]:
    return {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """The engine's entry for one token as OpenAI's."""

    def one(token: dict[str, Any]) -> dict[str, Any]:
        return {"token": token.get("text", ""), "logprob": token["logprob"], "bytes": token.get("bytes")}

    return {**one(entry), "top_logprobs": [one(token) for token in entry.get("top") or ()]}
