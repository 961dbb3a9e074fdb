"""The requests that the API takes, checked: OpenAI's fields, and those of llama.cpp's server that its users know.

Knows nothing of HTTP or engines; `sampling()` gives the dict that head/sampling.py's SamplingParams takes. What OpenAI
has and one local model cannot mean (service_tier, user, metadata, …) is let pass and does nothing there either; what
would change the answer and is not supported is refused, never ignored.
Source: OpenAI's API reference (chat/completions, completions, embeddings); tools/server/README.md of the pinned
llama.cpp for the other names.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hydra.errors import RequestError

MAX_CHOICES = 16
MAX_STOPS = 16


class _Base(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class FunctionSpec(_Base):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Base):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(_Base):
    name: str


class NamedTool(_Base):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(_Base):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Base):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    # llama-server also takes {"type": "json_object", "schema": {…}}.
    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    def constraint(self) -> dict[str, Any] | None:
        """The JSON schema that the whole answer has to follow; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(
                "response_format is json_schema, but no json_schema is given.",
                'Add "json_schema": {"name": …, "schema": {…}}.',
            )
        if self.json_schema is not None:
            return self.json_schema.definition
        return self.definition or {"type": "object"}


class StreamOptions(_Base):
    include_usage: bool = False


class _Sampling(_Base):
    """What chat and plain completions share."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=-1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    grammar: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_wait_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _stops(self) -> _Sampling:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} entries, the limit is {MAX_STOPS}")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, index: int = 0) -> dict[str, Any]:
        """Parameters of choice `index`, by the engine's names; what was not given is left out.

        Choices with a seed get seeds that follow each other, as equal ones would all say the same.
        """
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "typical_p",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "ignore_eos",
            "logit_bias",
            "grammar",
        )
        params = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None and self.seed >= 0:
            params["seed"] = self.seed + index
        if self.max_tokens is not None and self.max_tokens >= 0:
            params["max_tokens"] = self.max_tokens
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if stops:
            params["stop"] = [text for text in stops if text]
        return params


class ChatRequest(_Sampling):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    timings_per_token: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, tools has {names}")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is required, but there are no tools")
        return self

    def constraint(self) -> dict[str, Any] | None:
        if self.json_schema is not None:
            return self.json_schema
        return self.response_format.constraint() if self.response_format else None

    def sampling(self, index: int = 0) -> dict[str, Any]:
        params = super().sampling(index)
        if self.max_completion_tokens is not None and self.max_completion_tokens >= 0:
            params["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        return params


class CompletionRequest(_Sampling):
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False
    """llama-server's: each choice also carries `tokens`, the ids."""

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported (other than equal to n)")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [item for item in self.prompt if isinstance(item, (str, list))]

    def sampling(self, index: int = 0) -> dict[str, Any]:
        params = super().sampling(index)
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
        if self.json_schema is not None:
            params["json_schema"] = self.json_schema
        # OpenAI's own default here is 16, of which nobody thinks: run to the end as llama-server does.
        return params


class EmbeddingRequest(_Base):
    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    max_wait_s: float | None = Field(default=None, gt=0)

    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [[int(token) for token in self.input if isinstance(token, int)]]
        return [item for item in self.input if isinstance(item, (str, list))]


class TokenizeRequest(_Base):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(_Base):
    tokens: list[int]


_Model = TypeVar("_Model", bound=_Base)


class FieldError(RequestError):
    """A request's field that cannot be used; `param` is its name, as OpenAI's errors carry it."""

    def __init__(self, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


def parse(cls: type[_Model], body: bytes) -> _Model:
    """A request's body as its schema. Raises RequestError naming the field."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.", "Send a JSON object.") from error
    if not isinstance(data, dict):
        raise RequestError("The body is not a JSON object.", "Send a JSON object.")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained")))
        raise FieldError(
            f"{where or 'The request'}: {first['msg'].removeprefix('Value error, ')}.",
            "See docs/api.md for what is taken.",
            where or None,
        ) from None
