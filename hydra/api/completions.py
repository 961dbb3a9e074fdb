"""POST /v1/completions and /v1/embeddings, /tokenize and /detokenize: text or tokens in, no chat template between.

Source: OpenAI's API reference (legacy completions, embeddings); llama-server's README for the last two.
"""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from hydra.api.answers import Prepared, open_streams, respond
from hydra.api.schema import CompletionRequest, DetokenizeRequest, EmbeddingRequest, FieldError, TokenizeRequest, parse
from hydra.api.state import HeadState, head_of, merged, unless_gone
from hydra.errors import RequestError
from hydra.head.streams import Chunk, Finish

MAX_INPUTS = 2048


@dataclass
class _Completion(Prepared):
    request: CompletionRequest = field(kw_only=True)
    echoes: list[str] = field(kw_only=True)
    model: str = field(kw_only=True)
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(16)}", kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "hydra",
            "choices": choices,
        }


async def completions(request: Request) -> ASGIApp:
    parsed = parse(CompletionRequest, await request.body())
    return await respond(request, parsed.stream, _prepare(head_of(request), parsed), _events, _whole)


async def _prepare(head: HeadState, request: CompletionRequest) -> _Completion:
    await head.model_known(request.max_wait_s)
    prompts = request.prompts()
    if not prompts:
        raise FieldError("prompt is empty.", "Send a text, or a list of tokens.", "prompt")
    requests, echoes = [], []
    for prompt in prompts:
        tokens = await head.tokenize(prompt, request.max_wait_s) if isinstance(prompt, str) else prompt
        echo = prompt if isinstance(prompt, str) else ""
        if request.echo and not isinstance(prompt, str):
            echo = str(await head.supervisor.call("detokenize", request.max_wait_s, tokens=prompt))
        for index in range(request.n):
            requests.append((tokens, request.sampling(index)))
            echoes.append(echo if request.echo else "")
    streams = open_streams(head.supervisor, requests, request.max_wait_s)
    return _Completion(head.supervisor, streams, request=request, echoes=echoes, model=head.model_name)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, tokens: list[int] | None = None
) -> dict[str, Any]:
    """One choice; `tokens` only where the request asked for them (llama-server's return_tokens)."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return choice if tokens is None else {**choice, "tokens": tokens}


def _reason(finish: Finish) -> str:
    return "length" if finish.reason == "length" else "stop"


class _Logprobs:
    """OpenAI's old form: four lists side by side; `text_offset` counts characters of the answer."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        if not entries:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.get("text", ""))
        return {
            "tokens": [entry.get("text", "") for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top.get("text", ""): top["logprob"] for top in entry.get("top") or ()} for entry in entries
            ],
            "text_offset": offsets,
        }


async def _events(done: _Completion) -> AsyncGenerator[dict[str, Any], None]:
    probs = [_Logprobs() for _ in done.streams]
    for index, echo in enumerate(done.echoes):
        if echo:
            yield done.envelope([_choice(index, echo, None, None)])
    async for index, item in merged(done.streams):
        if isinstance(item, Chunk):
            tokens = item.tokens if done.request.return_tokens else None
            if item.text or item.logprobs or tokens:
                yield done.envelope([_choice(index, item.text, probs[index].of(item.logprobs), None, tokens)])
            continue
        done.note_finish(index, item)
        last = done.envelope([_choice(index, "", None, _reason(item))])
        if index == 0:
            last["timings"] = done.timings()
        yield last
    if done.request.include_usage:
        yield {**done.envelope([]), "usage": done.usage()}


async def _whole(done: _Completion) -> dict[str, Any]:
    texts = list(done.echoes)
    entries: list[list[dict[str, Any]]] = [[] for _ in done.streams]
    reasons = [""] * len(done.streams)
    async for index, item in merged(done.streams):
        if isinstance(item, Chunk):
            texts[index] += item.text
            entries[index] += item.logprobs or ()
        else:
            done.note_finish(index, item)
            reasons[index] = _reason(item)
    choices = []
    for index, stream in enumerate(done.streams):
        tokens = list(stream.sent) if done.request.return_tokens else None
        choices.append(_choice(index, texts[index], _Logprobs().of(entries[index]), reasons[index], tokens))
    return {**done.envelope(choices), "usage": done.usage(), "timings": done.timings()}


async def embeddings(request: Request) -> Response:
    parsed = parse(EmbeddingRequest, await request.body())
    return JSONResponse(await unless_gone(request, _embeddings(head_of(request), parsed)))


async def _embeddings(head: HeadState, request: EmbeddingRequest) -> dict[str, Any]:
    inputs = request.inputs()
    if not inputs or any(not item for item in inputs):
        raise FieldError("input has an empty text.", "Every text must have at least one character.", "input")
    if len(inputs) > MAX_INPUTS:
        raise FieldError(f"input has {len(inputs)} texts; the limit is {MAX_INPUTS}.", "Send it in parts.", "input")
    await head.model_known(request.max_wait_s)
    data, used = [], 0
    for index, item in enumerate(inputs):
        tokens = await head.tokenize(item, request.max_wait_s) if isinstance(item, str) else item
        used += len(tokens)
        value = await head.supervisor.call("embed", request.max_wait_s, tokens=tokens)
        vector = _unit([float(x) for x in value])
        if request.dimensions is not None:
            if request.dimensions > len(vector):
                raise FieldError(
                    f"dimensions is {request.dimensions}; the model has {len(vector)}.", "Ask for fewer.", "dimensions"
                )
            vector = _unit(vector[: request.dimensions])
        shown: list[float] | str = vector
        if request.encoding_format == "base64":
            shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": used, "total_tokens": used}
    return {"object": "list", "data": data, "model": head.model_name, "usage": usage}


def _unit(vector: list[float]) -> list[float]:
    """At length one, as OpenAI's are: a dot product is then the cosine."""
    length = sum(x * x for x in vector) ** 0.5
    if not length:
        raise RequestError("The embedding of this text is zero.", "The loaded model may not be fit for embeddings.")
    return [x / length for x in vector]


async def tokenize(request: Request) -> Response:
    parsed = parse(TokenizeRequest, await request.body())
    head = head_of(request)
    await unless_gone(request, head.model_known(None))
    tokens = await head.supervisor.call(
        "tokenize", text=parsed.content, add_special=parsed.add_special, parse_special=parsed.parse_special
    )
    return JSONResponse({"tokens": tokens})


async def detokenize(request: Request) -> Response:
    parsed = parse(DetokenizeRequest, await request.body())
    head = head_of(request)
    await unless_gone(request, head.model_known(None))
    return JSONResponse({"content": await head.supervisor.call("detokenize", tokens=parsed.tokens)})
