"""A running API for tests: uvicorn on loopback in a thread, over a supervisor with the fake engine (or a real one)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from hydra.api.app import create_app
from hydra.api.settings import ApiSettings
from hydra.head.probe import PeerTarget
from hydra.head.spec import EngineSpec
from hydra.head.supervisor import Event, Supervisor, SupervisorSettings

FAKE = Path(__file__).parent / "fake_engine.py"
LIMIT_S = 60.0
T = TypeVar("T")


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Head:
    """A head on loopback. `url` ends in the port; `events` are the supervisor's."""

    def __init__(
        self,
        folder: Path,
        spec: EngineSpec,
        peers: Sequence[PeerTarget],
        settings: SupervisorSettings,
        api: ApiSettings,
        command: Callable[[int], Sequence[str]] | None,
    ) -> None:
        self.folder = folder
        self.events: list[Event] = []
        options: dict[str, Any] = {} if command is None else {"command": command}
        self.supervisor = Supervisor(spec, peers, settings, on_event=self.events.append, **options)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(uvicorn.Config(create_app(self.supervisor, api), log_config=None, lifespan="off"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self.supervisor.start()
        await self.server.serve([self.socket])
        await self.supervisor.stop(0.0)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the supervisor lives."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def until(self, condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.supervisor.status(), self.events[-5:])
            time.sleep(0.01)

    def until_ready(self, timeout_s: float = LIMIT_S) -> None:
        self.until(lambda: self.supervisor.ready or self.supervisor.state == "failed", timeout_s)
        assert self.supervisor.ready, self.supervisor.status()


QUICK: dict[str, Any] = {
    "backoff_first_s": 0.05,
    "backoff_max_s": 0.2,
    "suspect_s": 0.2,
    "silence_s": 0.6,
    "probe_timeout_s": 0.3,
    "step_deadline_s": 2.0,
    "grace_s": 2.0,
    "restart_limit": 50,
}


@contextmanager
def running_head(
    folder: Path,
    *,
    spec: EngineSpec | None = None,
    peers: Sequence[PeerTarget] = (),
    faults: Sequence[dict[str, Any]] = (),
    api: ApiSettings | None = None,
    env: dict[str, str] | None = None,
    real: bool = False,
    ready: bool = True,
    **settings: Any,
) -> Iterator[Head]:
    """A head that serves, ended at the end. real: the real engine child instead of the fake one."""
    fresh = {"FAKE_ENGINE_DIR": str(folder), "FAKE_ENGINE_FAULTS": json.dumps(list(faults)), **(env or {})}
    before = {name: os.environ.get(name) for name in fresh}
    os.environ.update(fresh)
    command = None if real else (lambda fd: [sys.executable, str(FAKE), "--fd", str(fd)])
    head = Head(
        folder,
        spec or EngineSpec("fake.gguf", parallel=4),
        peers,
        SupervisorSettings(**(QUICK | settings)),
        api or ApiSettings(keepalive_s=0.2),
        command,
    )
    head.start()
    try:
        if ready:
            head.until_ready(120.0)
        yield head
    finally:
        head.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
