"""Renders a conversation with the model's own chat template, in a sandbox, and reads from the template how the model
answers.

The template is part of the model file, so it is data from outside: jinja2's immutable sandbox runs it. Knows nothing of
HTTP or tokens. Which marks begin reasoning and tool calls is recognised by the marks themselves in the template's text.
Source: transformers' apply_chat_template (environment, filters) and common/chat.cpp of the pinned llama.cpp (formats).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from hydra.errors import ModelError, RequestError

ToolFormat = Literal["hermes", "xml", "gemma4", "generic"]

# What llama.cpp falls back to as well.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_END = "<|im_end|>"
TOOLS_PROMPT = (
    "You may call functions. They are, as JSON:\n{tools}\n"
    'To call one, answer only {{"tool_call": {{"name": …, "arguments": {{…}}}}}}. '
    'To answer without a call, answer only {{"response": "your answer"}}.'
)


@dataclass(frozen=True)
class Marks:
    """How a model marks the parts of an answer. None where it has no such mark."""

    think_open: str | None = None
    think_close: str | None = None
    tools: ToolFormat = "generic"

    @property
    def control(self) -> tuple[str, ...]:
        """Marks that may be control tokens of the vocabulary: their text has to be kept in the output."""
        marks = [mark for mark in (self.think_open, self.think_close) if mark]
        if self.tools == "gemma4":
            marks += ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"]
        elif self.tools != "generic":
            marks += ["<tool_call>", "</tool_call>"]
        return tuple(dict.fromkeys(mark.strip() for mark in marks))


def recognise(source: str) -> Marks:
    """The marks of a template, by its text."""
    think: tuple[str | None, str | None] = (None, None)
    if "<|channel>thought" in source and "<channel|>" in source:
        think = ("<|channel>thought\n", "<channel|>")
    elif "</think>" in source or "<think>" in source:
        think = ("<think>", "</think>")
    tools: ToolFormat = "generic"
    if "<|tool_call>call:" in source:
        tools = "gemma4"
    elif "<tool_call>" in source and "<function=" in source:
        tools = "xml"
    elif "<tool_call>" in source:
        tools = "hermes"
    return Marks(*think, tools)


@dataclass(frozen=True)
class Rendered:
    """A prompt, what of the answer it has already begun, and texts at which the answer ends."""

    text: str
    reasoning_open: bool
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """One model's template. bos/eos: the texts of these tokens, as templates put them in.

    Raises: ModelError (in `render`) where the template is not valid jinja.
    """

    source: str = CHATML
    bos: str = ""
    eos: str = ""
    marks: Marks = field(default_factory=Marks)
    own: bool = True
    """False: the model has none, ChatML stands in."""

    @classmethod
    def of(cls, source: str | None, bos: str, eos: str) -> ChatTemplate:
        if not source:
            return cls(bos=bos, eos=eos, own=False)
        return cls(source, bos, eos, recognise(source))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        """The prompt's text. kwargs go to the template (enable_thinking, …).

        Raises: RequestError when the template refuses the conversation (its own words), ModelError when it is broken.
        """
        plain = [normalise(message) for message in messages]
        native = self.marks.tools != "generic"
        if not native:
            plain = without_tools(plain, tools)
        import jinja2

        variables = {
            "tools": [*tools] if tools and native else None,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        try:
            try:
                text = _compiled(self.source).render(messages=plain, **variables)
            except _Refused:
                # Some models have no system role (Gemma 2): what it says goes before the first question, as in
                # llama.cpp.
                if len(plain) < 2 or plain[0]["role"] != "system" or plain[1]["role"] != "user":
                    raise
                first = {**plain[1], "content": f"{plain[0]['content']}\n\n{plain[1]['content']}"}
                text = _compiled(self.source).render(messages=[first, *plain[2:]], **variables)
        except _Refused as error:
            raise RequestError(
                f"The model's chat template refuses this conversation: {error}.",
                "Check the order and roles of the messages.",
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise RequestError(
                f"The model's chat template fails on this conversation: {error}.",
                "Check the messages; the template itself is shown by /props.",
            ) from error
        mark = self.marks.think_open
        # A model without a template knows ChatML's marks from text alone, not as a token that ends its answer.
        stops = () if self.own else (CHATML_END,)
        return Rendered(text, bool(mark) and text.rstrip().endswith(str(mark).rstrip()), stops)

    def close_reasoning(self, rendered: Rendered) -> Rendered:
        """The same prompt with its reasoning closed at once: a constrained answer begins with the answer."""
        if not rendered.reasoning_open:
            return rendered
        return Rendered(f"{rendered.text.rstrip()}\n{self.marks.think_close}\n\n", False, rendered.stops)


class _Refused(Exception):
    """raise_exception() of a template."""


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise _Refused(message)

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks the assistant's part for training; here it is just its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    env.filters["tojson"] = tojson
    env.filters["fromjson"] = json.loads
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return env.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"The model's chat template is not valid jinja: {error}.",
            "The GGUF file may have been made by an old converter.",
        ) from error


def normalise(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content a string, arguments of calls an object.

    Raises: RequestError for a role or a content that cannot be used.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("A message has no role.", "Each message needs a role and a content.")
    out = {key: value for key, value in message.items() if value is not None}
    if role == "developer":
        out["role"] = "system"
    out["content"] = _text(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError("tool_calls of a message is not a list.")
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content of a message must be a text or a list of parts.")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"A message has a part of type {kind!r}.", "Only text parts can be read by this head.")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "\n".join(texts)


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError("An entry of tool_calls has no function.")
    function = dict(call["function"])
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass  # it stays text; every template can print that
    function["arguments"] = arguments
    return {**call, "type": "function", "function": function}


def without_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: calls and results as plain turns, the functions as
    instruction."""
    if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        return messages
    out: list[dict[str, Any]] = []
    if tools:
        functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        out.append({"role": "system", "content": TOOLS_PROMPT.format(tools=functions)})
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": f"Result of the function call: {message['content']}"}
        elif message.get("tool_calls"):
            calls = [
                json.dumps(
                    {"tool_call": {"name": call["function"].get("name"), "arguments": call["function"]["arguments"]}},
                    ensure_ascii=False,
                )
                for call in message["tool_calls"]
            ]
            message = {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *calls]))}
        # Several templates of this kind demand that roles alternate.
        if out and out[-1]["role"] == message["role"]:
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out
