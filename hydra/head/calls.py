"""Short questions to the engine that have no stream: tokenize, detokenize, embed.

They have no state, so those that a dying engine left open are simply asked again. Knows frames only as dicts to be
sent; the supervisor says when an engine is there, and when it died.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra.errors import EngineError, HydraError
from hydra.head.streams import GIVE_UP_DEATHS


@dataclass
class _Call:
    frame: dict[str, Any]
    future: asyncio.Future[Any]
    sent: bool = False
    deaths: int = 0

    def fail(self, error: HydraError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Calls:
    """The open questions. send: how a frame goes to the engine that is there."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._open: dict[str, _Call] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, kind: str, fields: dict[str, Any], *, now: bool, patience_s: float) -> Any:
        """The engine's answer. now: there is an engine to ask. Raises: asyncio.TimeoutError, or what it answered."""
        number = f"call-{next(self._ids)}"
        call = _Call({"type": kind, "id": number, **fields}, asyncio.get_running_loop().create_future())
        self._open[number] = call
        if now:
            self._ask(call)
        try:
            return await asyncio.wait_for(call.future, patience_s)
        finally:
            self._open.pop(number, None)

    def engine_ready(self) -> None:
        """Ask all that is open; what an earlier engine was asked is asked again."""
        for call in self._open.values():
            self._ask(call)

    def engine_died(self, reason: str) -> None:
        """Give up what too many engines died under: it may be what they died of."""
        for call in self._open.values():
            call.deaths += call.sent
            call.sent = False
            if call.deaths >= GIVE_UP_DEATHS:
                words = f"The engine ended {call.deaths} times while it worked on this request: {reason}."
                call.fail(EngineError(words, "Other requests go on."))

    def answer(self, number: str, value: Any) -> None:
        call = self._open.get(number)
        if call is not None and not call.future.done():
            call.future.set_result(value)

    def fail(self, number: str, error: HydraError) -> bool:
        """False when there is no such question."""
        call = self._open.get(number)
        if call is not None:
            call.fail(error)
        return call is not None

    def fail_all(self, error: HydraError, *, unsent_only: bool = False) -> None:
        for call in self._open.values():
            if not (unsent_only and call.sent):
                call.fail(error)

    def _ask(self, call: _Call) -> None:
        call.sent = True
        self._send(call.frame)
