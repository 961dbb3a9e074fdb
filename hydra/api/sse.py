"""Server-sent events: an answer that is written while it comes about.

Starlette's own streaming response notices a closed connection only when it sends; an engine that reads a long prompt
would work on for nobody. This one listens for the end of the connection all the time, and keeps silence from being
taken for an end: a comment line goes out every few seconds, and says in JSON what is being waited for.
Source: the HTML standard, section 9.2 (a line that begins with a colon is a comment).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """An ASGI response over an async generator of encoded events.

    note: asked whenever nothing came for `keepalive_s`; what it returns goes out as a comment.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], note: Callable[[], dict[str, Any]], keepalive_s: float = 5.0
    ) -> None:
        self._events = events
        self._note = note
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(self._disconnected(receive))
        upcoming = asyncio.ensure_future(anext(self._events))
        try:
            while True:
                done, _ = await asyncio.wait(
                    {gone, upcoming}, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone in done:
                    return
                if upcoming not in done:
                    await self._send(send, b": hydra " + json.dumps(self._note()).encode() + b"\n\n")
                    continue
                try:
                    piece = upcoming.result()
                except StopAsyncIteration:
                    break
                upcoming = asyncio.ensure_future(anext(self._events))
                await self._send(send, piece)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            if not upcoming.done():
                upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
            await self._events.aclose()

    @staticmethod
    async def _send(send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})

    @staticmethod
    async def _disconnected(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
