"""Real processes to be killed: a peer, an engine child with a toy model split over both, several answers open.

The toy model says a known token after each token, so a token that was lost, doubled or computed from a wrong state
shows in the answer itself; no second run is needed to compare with.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from hydra.head.probe import PeerTarget
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec
from hydra.head.streams import Finish, Stream
from hydra.head.supervisor import Event, Supervisor, SupervisorSettings
from hydra.peer.launch import PeerProcess, start_peer
from tests.engine_support import toy, toy_language

LIMIT_S = 90.0
STARTS = (97, 65, 48)
N_TOKENS = 600
FAULT_AFTER = 150
PATIENCE: dict[str, Any] = {
    "backoff_first_s": 0.1,
    "backoff_max_s": 0.5,
    "suspect_s": 0.4,
    "silence_s": 1.5,
    "probe_timeout_s": 0.5,
    "step_deadline_s": 30.0,
    "restart_limit": 50,
    "peer_wait_s": 60.0,
}


class Peer:
    """A peer process on a fixed port, which can be ended and started again."""

    def __init__(self, host: str = "127.0.0.1", **options: Any) -> None:
        self._options: dict[str, Any] = {"host": host, "device": "CPU", "threads": 1, **options}
        self.process: PeerProcess = start_peer(**self._options)
        self.port = self.process.port
        self.host = host

    @property
    def target(self) -> PeerTarget:
        return PeerTarget("mini", self.host, self.port)

    def restart(self, **options: Any) -> None:
        self.process = start_peer(**{**self._options, "port": self.port, **options})

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.process.wait(10)

    def kill_worker(self) -> None:
        os.kill(self.process.worker_pid, signal.SIGKILL)

    def signal_both(self, number: int) -> None:
        for pid in (self.process.pid, self.process.worker_pid):
            os.kill(pid, number)

    def stop(self) -> None:
        self.process.stop()


def toy_split(peer: Peer, *, mtp: bool = False, model: str | None = None) -> EngineSpec:
    """Two of the toy's four layers on the peer."""
    return EngineSpec(
        model or (toy("toy") if mtp else toy("toy-llama")),
        endpoints=(Endpoint("mini", peer.target.endpoint),),
        layers={"mini": 2},
        devices=("CPU",),
        ctx_size=4096,
        batch_size=64,
        ubatch_size=32,
        parallel=len(STARTS),
        threads=1,
        use_extra_bufts=False,
        draft=DraftSpec("mtp" if mtp else "none"),
    )


@asynccontextmanager
async def supervised(peer: Peer, spec: EngineSpec, **settings: Any) -> AsyncIterator[tuple[Supervisor, list[Event]]]:
    events: list[Event] = []
    supervisor = Supervisor(spec, [peer.target], SupervisorSettings(**(PATIENCE | settings)), on_event=events.append)
    await supervisor.start()
    try:
        await until(lambda: supervisor.ready or supervisor.state == "failed")
        assert supervisor.ready, supervisor.status()
        yield supervisor, events
    finally:
        await supervisor.stop(0.0)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


async def collect(stream: Stream) -> tuple[list[int], Finish]:
    tokens: list[int] = []
    while True:
        item = await stream.next()
        if isinstance(item, Finish):
            return tokens, item
        tokens += item.tokens


def expected(start: int, n: int = N_TOKENS, name: str = "toy-llama") -> list[int]:
    return toy_language(name=name).say(start, n)


async def ask_all(
    supervisor: Supervisor, fault: Callable[[], Awaitable[None]] | None = None, n: int = N_TOKENS
) -> list[list[int]]:
    """Three answers at once, greedy and seeded, with `fault` once some of them have come."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "seed": 8}]
    streams = [supervisor.generate([start], {**way, "max_tokens": n}) for start, way in zip(STARTS, ways, strict=True)]
    collecting = [asyncio.create_task(collect(stream)) for stream in streams]
    if fault is not None:
        await until(lambda: sum(len(stream.sent) for stream in streams) >= FAULT_AFTER)
        assert not any(stream.finished for stream in streams)
        await fault()
    results = await asyncio.gather(*collecting)
    assert all(finish.reason == "length" for _, finish in results)
    return [tokens for tokens, _ in results]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))
