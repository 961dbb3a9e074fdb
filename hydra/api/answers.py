"""What chat and plain completions have in common: open streams for a request, count what they used, time them.

Knows the supervisor and OpenAI's `usage`; nothing of messages or templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from hydra.api import faults, sse
from hydra.api.state import HeadState, head_of, unless_gone
from hydra.errors import HydraError
from hydra.head.streams import Finish, Stream
from hydra.head.supervisor import Supervisor

# How long a streaming request may prepare before its headers go out: an error until then has its own status.
PREPARE_S = 10.0

_P = TypeVar("_P", bound="Prepared")


@dataclass
class Prepared:
    """A request on the engine: its streams, and how they ended."""

    supervisor: Supervisor
    streams: list[Stream]
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)

    def note_finish(self, index: int, finish: Finish) -> None:
        self.stats[index] = finish.stats

    def close(self) -> None:
        """Whoever has not ended is cancelled: nobody listens any more."""
        for stream in self.streams:
            self.supervisor.cancel(stream)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. A prompt that several choices share counts once."""
        prompts = {tuple(stream.prompt) for stream in self.streams}
        prompt = sum(len(tokens) for tokens in prompts)
        completion = sum(len(stream.sent) for stream in self.streams)
        cached = sum(int(stats.get("cached_tokens") or 0) for stats in self.stats.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        }

    def timings(self) -> dict[str, Any]:
        """llama-server's `timings`, of the first choice, with what this head adds to them."""
        stream, stats = self.streams[0], self.stats.get(0, {})
        cached = int(stats.get("cached_tokens") or 0)
        return {
            "cache_n": cached,
            "prompt_n": max(0, len(stream.prompt) - cached),
            "prompt_per_second": stats.get("prefill_tps"),
            "prompt_ms": _ms(stats.get("prefill_s")),
            "predicted_n": len(stream.sent),
            "predicted_per_second": stats.get("decode_tps"),
            "predicted_ms": _ms(stats.get("decode_s")),
            "draft_n": stats.get("drafted") or 0,
            "draft_n_accepted": stats.get("accepted") or 0,
            "acceptance_rate": stats.get("acceptance_rate"),
            "mean_acceptance_length": stats.get("mean_acceptance_length"),
            "draft_ms": _ms(stats.get("draft_s")),
            "verify_ms": _ms(stats.get("verify_s")),
            "n_ctx": self.supervisor.info.get("n_ctx"),
            "context_n": len(stream.prompt) + len(stream.sent),
            "resumed": stream.resumed,
        }


def _ms(seconds: Any) -> float | None:
    return None if seconds is None else round(float(seconds) * 1e3, 3)


def open_streams(
    supervisor: Supervisor, requests: Sequence[tuple[list[int], dict[str, Any]]], max_wait_s: float | None
) -> list[Stream]:
    """All streams of a request, or none: when the line cannot take one, those before it are cancelled."""
    streams: list[Stream] = []
    try:
        for prompt, params in requests:
            streams.append(supervisor.generate(prompt, params, max_wait_s))
    except HydraError:
        for stream in streams:
            supervisor.cancel(stream)
        raise
    return streams


async def respond(
    request: Request,
    stream: bool,
    prepare: Coroutine[Any, Any, _P],
    events: Callable[[_P], AsyncGenerator[dict[str, Any], None]],
    whole: Callable[[_P], Coroutine[Any, Any, dict[str, Any]]],
) -> ASGIApp:
    """A request's answer, as events or whole. Cancelled with its connection. Raises: HydraError before the headers."""
    head = head_of(request)
    if not stream:

        async def answer() -> dict[str, Any]:
            prepared = await prepare
            async with _closing(prepared):
                return await whole(prepared)

        return JSONResponse(await unless_gone(request, answer()))
    task = asyncio.ensure_future(prepare)
    try:
        await unless_gone(request, _some_time(task))
    except BaseException:
        await _abandon(task)
        raise
    return sse.EventStream(_encoded(task, events), lambda: _note(head), head.settings.keepalive_s)


async def _some_time(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task}, timeout=PREPARE_S)
    if task.done():
        task.result()


async def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(result, Prepared):
        result.close()


async def _encoded(
    task: asyncio.Future[_P], events: Callable[[_P], AsyncGenerator[dict[str, Any], None]]
) -> AsyncGenerator[bytes, None]:
    try:
        prepared = await task
        async with _closing(prepared):
            async for data in events(prepared):
                yield sse.event(data)
    except HydraError as error:
        # The status line is gone: clients of OpenAI raise on an event with an error in it.
        yield sse.event(faults.body_of(error))
    finally:
        if not task.done():
            await _abandon(task)
    yield sse.DONE


@asynccontextmanager
async def _closing(prepared: Prepared) -> AsyncIterator[None]:
    try:
        yield
    finally:
        prepared.close()


def _note(head: HeadState) -> dict[str, Any]:
    status = head.supervisor.status()
    return {key: status[key] for key in ("state", "reason", "recovering", "node", "percent", "eta_s")}
