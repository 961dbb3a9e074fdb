"""Takes a model's answer apart as it comes: reasoning, content, calls of tools.

A small state machine over text; pieces may be cut anywhere. Nothing is lost: what looks like a call and cannot be read
as one goes out as content. Knows nothing of HTTP or templates beyond their marks (api/template.py).
Source for the forms of calls: the Qwen3 and Qwen3.5 chat templates, Gemma 4's chat template, common/chat.cpp.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hydra.api.template import Marks, ToolFormat


@dataclass(frozen=True)
class Delta:
    """One piece of an answer. kind `call`: `name` and `arguments` (JSON text) of the call number `index`, whole."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""


_TOOL_MARKS: dict[ToolFormat, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "xml": ("<tool_call>", "</tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
}


class AnswerParser:
    """Feed text, get `Delta`s; `finish` gives what was held back.

    tools: the request's functions (as OpenAI's JSON), empty where none may be called. reasoning: split it off.
    reasoning_open: the prompt has begun it. forced: the answer is one constrained JSON call.
    """

    def __init__(
        self,
        marks: Marks,
        tools: Sequence[dict[str, Any]] = (),
        *,
        reasoning: bool = True,
        reasoning_open: bool = False,
        forced: bool = False,
    ) -> None:
        self._format = marks.tools
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._think = (marks.think_open, marks.think_close) if reasoning and marks.think_close else (None, None)
        self._tool = _TOOL_MARKS.get(marks.tools) if tools else None
        self._mode: Literal["content", "reasoning", "call", "whole"] = "content"
        if forced or (tools and marks.tools == "generic"):
            self._mode = "whole"
        elif reasoning_open and self._think[1]:
            self._mode = "reasoning"
        self._forced = forced
        self._buffer = ""
        self._space = ""
        """Trailing white space of the content so far: dropped before a call or after reasoning, else it goes out."""
        self._fresh = True
        self.calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        out: list[Delta] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        """The end of the answer: what was held back, as what it turned out to be."""
        out: list[Delta] = []
        rest, self._buffer = self._buffer, ""
        if self._mode == "whole":
            out += self._whole(rest)
        elif self._mode == "call":
            # The closing mark may be missing where the answer was cut or the mark was its end token.
            out += self._calls(rest) or self._emit("content", f"{(self._tool or ('', ''))[0]}{rest}")
        elif self._mode == "reasoning":
            if rest.strip():
                out.append(Delta("reasoning", rest.rstrip()))
        else:
            out += self._emit("content", rest)
            if self._space and not self.calls and not self._fresh:
                out.append(Delta("content", self._space))
        return out

    def _advance(self, out: list[Delta]) -> bool:
        """One step; True when there may be another."""
        if self._mode == "content":
            marks = [mark for mark in (self._think[0], self._tool[0] if self._tool else None) if mark]
            at, mark = _first(self._buffer, marks)
            if mark is None:
                text, self._buffer = _split_held(self._buffer, marks)
                out += self._emit("content", text)
                return False
            out += self._emit("content", self._buffer[:at])
            self._space = ""
            self._buffer = self._buffer[at + len(mark) :]
            self._mode = "reasoning" if mark == self._think[0] else "call"
            return True
        if self._mode == "reasoning":
            close = str(self._think[1])
            at, mark = _first(self._buffer, [close])
            if mark is None:
                text, self._buffer = _split_held(self._buffer, [close])
                stripped = text.rstrip()
                self._buffer = text[len(stripped) :] + self._buffer
                out += self._reason(stripped)
                return False
            out += self._reason(self._buffer[:at].rstrip())
            self._buffer = self._buffer[at + len(close) :]
            self._mode, self._fresh, self._space = "content", True, ""
            return True
        if self._mode == "call":
            close = str(self._tool[1]) if self._tool else ""
            at, mark = _first(self._buffer, [close])
            if mark is None:
                return False
            raw = self._buffer[:at]
            out += self._calls(raw) or self._emit("content", f"{self._tool[0] if self._tool else ''}{raw}{close}")
            self._buffer = self._buffer[at + len(close) :]
            self._mode, self._space = "content", ""
            return True
        return False

    def _reason(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return []
        self._fresh = False
        return [Delta("reasoning", text)]

    def _emit(self, kind: Literal["content"], text: str) -> list[Delta]:
        if self._fresh:
            # After reasoning, templates put empty lines; at the very beginning, white space is the model's own.
            text = text.lstrip() if self._think[1] else text
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return []
        self._fresh = False
        return [Delta(kind, body)]

    def _calls(self, raw: str) -> list[Delta]:
        try:
            if self._format == "gemma4":
                found = _gemma4(raw)
            elif "<function=" in raw:
                found = _xml(raw, self._schemas)
            else:
                found = _json_calls(raw)
        except ValueError:
            return []
        return [self._call(name, arguments) for name, arguments in found]

    def _call(self, name: str, arguments: Any) -> Delta:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        delta = Delta("call", "", self.calls, f"call_{secrets.token_hex(12)}", name, text)
        self.calls += 1
        return delta

    def _whole(self, text: str) -> list[Delta]:
        """An answer that is one JSON object: the constrained call, or the object that a model without tool marks was
        asked for."""
        try:
            value = json.loads(text)
            if isinstance(value, dict) and isinstance(value.get("tool_call"), dict):
                return [self._call(str(value["tool_call"]["name"]), value["tool_call"].get("arguments", {}))]
            if self._forced and isinstance(value, dict):
                return [self._call(str(value["name"]), value.get("arguments", {}))]
            if isinstance(value, dict) and isinstance(value.get("response"), str):
                text = value["response"]
        except (ValueError, KeyError):
            pass  # cut by max_tokens, most likely: the caller sees what there is
        return [Delta("content", text)] if text else []


def _first(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found) if found else (-1, None)


def _split_held(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Text that may go out, and a tail that could be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], text[-length:]
    return text, ""


def _json_calls(raw: str) -> list[tuple[str, Any]]:
    """{"name": …, "arguments": {…}}, or a list of such. Raises ValueError."""
    value = json.loads(raw)
    found = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("not a call")
        found.append((call["name"], call.get("arguments", call.get("parameters", {}))))
    return found


_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.S)


def _xml(raw: str, schemas: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    """<function=NAME><parameter=KEY>VALUE</parameter>…</function>; values typed by the function's schema."""
    found = []
    for function in _FUNCTION.finditer(raw):
        properties = schemas.get(function[1], {}).get("properties", {})
        found.append(
            (
                function[1],
                {key: _typed(value, properties.get(key, {})) for key, value in _PARAMETER.findall(function[2])},
            )
        )
    if not found:
        raise ValueError("no function")
    return found


def _typed(value: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _gemma4(raw: str) -> list[tuple[str, Any]]:
    """call:NAME{key:value,…} with strings between <|"|> marks. Raises ValueError."""
    match = re.match(r"\s*call:([^{\s]+)\s*", raw)
    if match is None:
        raise ValueError("no call")
    value, end = _gemma4_value(raw, match.end())
    if not isinstance(value, dict) or raw[end:].strip():
        raise ValueError("no arguments")
    return [(match[1], value)]


_QUOTE = '<|"|>'


def _gemma4_value(raw: str, at: int) -> tuple[Any, int]:
    if raw.startswith(_QUOTE, at):
        end = raw.index(_QUOTE, at + len(_QUOTE))
        return raw[at + len(_QUOTE) : end], end + len(_QUOTE)
    if raw[at : at + 1] in ("{", "["):
        is_object = raw[at] == "{"
        close = "}" if is_object else "]"
        items: dict[str, Any] = {}
        values: list[Any] = []
        at += 1
        while not raw.startswith(close, at):
            if is_object:
                if raw.startswith(_QUOTE, at):
                    key, at = _gemma4_value(raw, at)
                    if not raw.startswith(":", at):
                        raise ValueError("no colon")
                else:
                    colon = raw.index(":", at)
                    key, at = raw[at:colon].strip(), colon
                items[str(key)], at = _gemma4_value(raw, at + 1)
            else:
                value, at = _gemma4_value(raw, at)
                values.append(value)
            if raw.startswith(",", at):
                at += 1
            elif not raw.startswith(close, at):
                raise ValueError("no end")
        return (items if is_object else values), at + 1
    match = re.compile(r"[^,\]}]*").match(raw, at)
    word = match[0] if match else ""
    if not word.strip():
        raise ValueError("no value")
    try:
        return json.loads(word), at + len(word)
    except ValueError:
        return word.strip(), at + len(word)
