"""What the head remembers of each request while an engine, or the next one, works on it.

A `Stream` holds the prompt, the parameters and every token that went out: all that a fresh engine needs to go on after
the last of them. The `Board` is the line at the counter: bounded, first come first served, at most `parallel` on the
engine. Neither knows processes, sockets or HTTP; the supervisor moves streams, the API reads them. Everything here runs
on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import EngineError, HydraError, RequestError

# Engines that died in a row under one request, with not one more token of it: from the first number on such requests
# are tried one at a time, so that it shows which it is; at the second the request is given up, and not the head.
SUSPECT_DEATHS, GIVE_UP_DEATHS = 2, 3


class Overloaded(RequestError):
    """The line is full: come back in `retry_after_s`."""

    def __init__(self, message: str, hint: str = "", retry_after_s: float = 5.0) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class WaitedTooLong(Overloaded):
    """The request's own limit on waiting passed before the engine could (go on to) answer it."""


class Unavailable(Overloaded):
    """The head is going down, or cannot serve until somebody mends what its status names."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens of the answer and the text that they completed (bytes of an unfinished character wait for the
    rest)."""

    tokens: list[int]
    text: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Finish:
    """The end of an answer: `stop`, `length` or `cancelled`, with the engine's figures."""

    reason: str
    stats: dict[str, Any]


@dataclass(eq=False)
class Stream:
    """One answer in the making. Iterate it for `Chunk`s and one `Finish`; a HydraError is raised where it ends
    badly."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    max_wait_s: float
    created: float = field(default_factory=time.monotonic)
    sent: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    waiting_since: float | None = None
    active: bool = False
    finished: bool = False
    cancelled: bool = False
    resumed: int = 0
    """How often a new engine took it up again."""
    deaths: int = 0
    """Engines that died under it since its last token."""
    pause: str = ""
    """Why nothing comes at the moment, in words; empty while the engine works on it."""
    _items: asyncio.Queue[Chunk | Finish | HydraError] = field(default_factory=asyncio.Queue)

    def deliver(self, chunk: Chunk) -> None:
        if self.finished:
            return
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
        self.waiting_since = None
        if chunk.tokens:
            self.deaths = 0
        self.sent.extend(chunk.tokens)
        self._items.put_nowait(chunk)

    def finish(self, reason: str, stats: dict[str, Any]) -> None:
        if not self.finished:
            self.finished = True
            self._items.put_nowait(Finish(reason, stats))

    def fail(self, error: HydraError) -> None:
        if not self.finished:
            self.finished = True
            self._items.put_nowait(error)

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    def start_waiting(self, why: str) -> None:
        self.pause = why
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()

    def waited_s(self, now: float) -> float:
        return 0.0 if self.waiting_since is None else now - self.waiting_since

    async def next(self) -> Chunk | Finish:
        """The next item. Raises the HydraError that ended the stream."""
        item = await self._items.get()
        if isinstance(item, HydraError):
            raise item
        return item

    async def __aiter__(self) -> AsyncIterator[Chunk | Finish]:
        while True:
            item = await self.next()
            yield item
            if isinstance(item, Finish):
                return


class Board:
    """The open streams: those on the engine and those in line.

    parallel: how many the engine serves at once. queue_max: how many more may wait.
    """

    def __init__(self, parallel: int, queue_max: int) -> None:
        self.parallel = parallel
        self.queue_max = queue_max
        self.waiting: deque[Stream] = deque()
        self.active: dict[str, Stream] = {}
        self._ids = itertools.count(1)

    def new(self, prompt: list[int], params: dict[str, Any], max_wait_s: float) -> Stream:
        """A stream at the end of the line. Sampled without a seed, it gets one, so that it can be continued exactly.

        Raises: Overloaded when the line is full.
        """
        if len(self.waiting) >= self.queue_max + max(0, self.parallel - len(self.active)):
            raise Overloaded(
                f"All {self.parallel} slots are busy and {len(self.waiting)} requests wait already.",
                "Try again in a few seconds, or raise head.queue_max or model.parallel.",
                self.retry_after_s(),
            )
        params = dict(params)
        if params.get("seed") is None:
            params["seed"] = random.SystemRandom().randrange(1, 2**31)
        stream = Stream(str(next(self._ids)), list(prompt), params, max_wait_s)
        stream.start_waiting("waiting for a slot")
        self.waiting.append(stream)
        return stream

    def retry_after_s(self) -> float:
        """A guess from how many stand in line; never less than a second, never more than a minute."""
        return float(min(60, max(1, 2 * (len(self.waiting) // max(1, self.parallel) + 1))))

    def take(self) -> Stream | None:
        """The next stream for the engine, now active; None when no slot is free or nobody waits."""
        while self.waiting and len(self.active) < self.parallel:
            if self.waiting[0].suspect and any(stream.suspect for stream in self.active.values()):
                return None
            stream = self.waiting.popleft()
            if stream.finished:
                continue
            stream.active = True
            stream.pause = ""
            self.active[stream.id] = stream
            return stream
        return None

    def release(self, stream_id: str) -> Stream | None:
        """The stream left the engine (done, failed, or cancelled and confirmed)."""
        stream = self.active.pop(stream_id, None)
        if stream is not None:
            stream.active = False
        return stream

    def drop_waiting(self, stream: Stream) -> None:
        try:
            self.waiting.remove(stream)
        except ValueError:
            pass

    def engine_died(self) -> None:
        """Remember under which streams it did; `engine_lost` and `give_up_killers` follow."""
        for stream in self.active.values():
            stream.deaths += 1

    def give_up_killers(self, why: str) -> list[Stream]:
        """Fail, and return, the streams under which too many engines died: nothing says that the next one would not."""
        killers = [s for s in self.waiting if s.deaths >= GIVE_UP_DEATHS and not s.finished]
        for stream in killers:
            self.waiting.remove(stream)
            stream.fail(
                EngineError(
                    f"The engine ended {stream.deaths} times while it worked on this request, without one more token: "
                    f"{why}.",
                    "Other requests go on. Something in this one may be what it cannot bear: its grammar, its length.",
                )
            )
        return killers

    def engine_lost(self, why: str) -> int:
        """All active streams go back to the head of the line, oldest first. Returns how many will be continued."""
        back = [s for s in sorted(self.active.values(), key=lambda s: s.created) if not s.finished]
        self.active.clear()
        for stream in back:
            stream.active = False
            stream.resumed += 1
        self.waiting.extendleft(reversed(back))
        for stream in self.waiting:
            stream.start_waiting(why)
        return len(back)

    def expire(self, now: float) -> list[Stream]:
        """Fail, and return, every stream that has waited longer than it was willing to."""
        late = [s for s in (*self.waiting, *self.active.values()) if not s.finished and s.waited_s(now) > s.max_wait_s]
        for stream in late:
            why = f" ({stream.pause})" if stream.pause else ""
            stream.fail(
                WaitedTooLong(
                    f"The request waited {stream.waited_s(now):.0f} s, its limit is {stream.max_wait_s:g} s{why}.",
                    "Raise the limit (max_wait_s in the request, head.queue_wait_s for all); /health says what lacks.",
                    self.retry_after_s(),
                )
            )
            self.drop_waiting(stream)
        return late

    def fail_all(self, error: HydraError) -> None:
        for stream in (*self.waiting, *self.active.values()):
            stream.fail(error)
        self.waiting.clear()

    def open(self) -> list[Stream]:
        return [*self.active.values(), *self.waiting]
