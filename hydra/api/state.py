"""What all routes share: the supervisor, the settings, and the loaded model as the API sees it.

Knows nothing of single routes. The guard puts the
`HeadState` into each request's scope; routes get it with `head_of(request)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from hydra.api.settings import ApiSettings
from hydra.api.template import ChatTemplate
from hydra.head.streams import Chunk, Finish, Stream, WaitedTooLong
from hydra.head.supervisor import Supervisor

SCOPE_KEY = "hydra.head"
_T = TypeVar("_T")


class ClientGone(Exception):
    """The caller closed the connection before its answer was there."""


class HeadState:
    """The head as routes see it."""

    def __init__(self, supervisor: Supervisor, settings: ApiSettings) -> None:
        self.supervisor = supervisor
        self.settings = settings
        self.created = int(time.time())
        self._template: tuple[str, ChatTemplate] | None = None

    @property
    def model_name(self) -> str:
        """The id of the one model there is."""
        return self.settings.model_alias or Path(self.supervisor.spec.model_path).stem

    @property
    def template(self) -> ChatTemplate:
        """The loaded model's chat template; needs `model_known` first."""
        info = self.supervisor.info
        source = info.get("chat_template") or ""
        if self._template is None or self._template[0] != source:
            template = ChatTemplate.of(source, str(info.get("bos_text") or ""), str(info.get("eos_text") or ""))
            self._template = (source, template)
        return self._template[1]

    async def model_known(self, max_wait_s: float | None) -> dict[str, Any]:
        """The model's `info`, waiting for the first load where need be. Raises: WaitedTooLong, Unavailable."""
        supervisor = self.supervisor
        patience = supervisor.settings.queue_wait_s if max_wait_s is None else max_wait_s
        deadline = time.monotonic() + patience
        while not supervisor.info:
            supervisor.refuse_if_closed()
            if time.monotonic() > deadline:
                raise WaitedTooLong(
                    f"The request waited {patience:g} s, its limit ({supervisor.reason or supervisor.state}).",
                    "See /health for what is missing.",
                )
            await asyncio.sleep(0.05)
        return supervisor.info

    async def tokenize(self, text: str, max_wait_s: float | None, *, special: bool = True) -> list[int]:
        """Tokens of a prompt. A beginning-of-text token that the template wrote out is not added a second time."""
        bos = str(self.supervisor.info.get("bos_text") or "")
        add = special and not (bos and text.startswith(bos))
        tokens = await self.supervisor.call("tokenize", max_wait_s, text=text, add_special=add, parse_special=special)
        return [int(token) for token in tokens]


def head_of(request: Request) -> HeadState:
    state: HeadState = request.scope[SCOPE_KEY]
    return state


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Chunk | Finish]]:
    """The items of all streams as they come, each with its stream's index. Raises what ends any of them badly."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    pending = {asyncio.ensure_future(stream.next()): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: pending[task]):
                index = pending.pop(task)
                item = task.result()
                if not isinstance(item, Finish):
                    pending[asyncio.ensure_future(streams[index].next())] = index
                yield index, item
    finally:
        for task in pending:
            task.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client closes its connection. Raises: ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Returns when the client has gone; the body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
