"""What a head learns of its peers, and does about it: a scripted peer that is up, down, silent, new or of another
release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hydra import __version__
from hydra.head.probe import PeerTarget, probe, stats
from hydra.rpc import messages, wire
from tests.test_supervisor import collect, run, supervised, until, unused_port

__all__ = ["unused_port"]
UP: dict[str, Any] = {"state": "ok", "version": __version__, "protocol": "7.0.0", "worker_pid": 1}


class Scripted:
    """Answers GET /health with `body` and `status`; with `mode` otherwise: silent, close, stock, old."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = dict(UP)
        self.status = 200
        self.mode = "http"
        self.asked = 0
        self.server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()

    @property
    def target(self) -> PeerTarget:
        return PeerTarget("mini", "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        first = await reader.read(1)
        if self.mode == "silent":
            await asyncio.sleep(5)
        elif self.mode in ("stock", "old") and first == b"\x0e":
            major = 7 if self.mode == "stock" else 6
            await reader.readexactly(8 + 24)
            payload = bytes([major, 0, 0, 0]) + bytes(24)
            writer.write(wire.SIZE.pack(len(payload)) + payload)
            await writer.drain()
        elif self.mode == "http":
            data = json.dumps(self.body).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (self.status, len(data)) + data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    peer = Scripted()
    await peer.open()
    try:
        yield peer
    finally:
        await peer.close()


def test_hello_is_as_long_as_the_scripted_peer_thinks() -> None:
    assert len(messages.Hello().pack()) == 24


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({}, "up", "is up"),
        ({"status": 503, "body": {**UP, "state": "degraded", "reason": "worker died"}}, "degraded", "worker died"),
        ({"body": {**UP, "version": "9.9"}}, "mismatch", "runs hydra 9.9"),
        ({"body": {**UP, "protocol": "6.3.0"}}, "mismatch", "speaks ggml-RPC 6.3.0"),
        ({"mode": "silent"}, "silent", "does not answer within 0.4 s"),
        ({"mode": "stock"}, "up", "a stock server"),
        ({"mode": "old"}, "mismatch", "speaks ggml-RPC 6.0"),
        ({"mode": "close"}, "silent", "closed the connection"),
    ],
)
def test_probe(change: dict[str, Any], state: str, words: str) -> None:
    async def test() -> None:
        async with scripted() as peer:
            for name, value in change.items():
                setattr(peer, name, value)
            report = await probe(peer.target, 0.4)
            assert report.state == state and words in report.detail, report
            assert report.usable == (state == "up") and (report.usable or report.hint)

    run(test)


def test_probe_of_what_is_not_there(unused_port: int) -> None:
    async def test() -> None:
        refused = await probe(PeerTarget("mini", "127.0.0.1", unused_port), 1.0)
        assert refused.state == "refused" and "nothing listens" in refused.detail
        nowhere = await probe(PeerTarget("mini", "no-such-host.invalid", 1), 2.0)
        assert nowhere.state in ("unreachable", "silent")
        assert await stats(PeerTarget("mini", "127.0.0.1", unused_port), 1.0) == {}

    run(test)


def test_a_stock_server_is_not_asked_while_our_engine_holds_it() -> None:
    async def test() -> None:
        async with scripted() as peer:
            peer.mode = "stock"
            report = await probe(peer.target, 0.4, engine_connected=True)
            assert report.usable and report.stock and peer.asked == 1

    run(test)


def idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Scripted], Awaitable[None] | None], words: str
) -> None:
    """An idle head whose peer changes: it restarts by itself, and says why."""

    async def test() -> None:
        async with (
            scripted() as peer,
            supervised(tmp_path, monkeypatch, peers=[peer.target], probe_s=0.1) as (supervisor, events),
        ):
            asked = peer.asked
            await until(lambda: peer.asked > asked + 4)
            assert not supervisor.ledger.total, "a peer that stays as it is needs no restart"
            done = change(peer)
            if done is not None:
                await done
            await until(lambda: supervisor.ledger.total == 1)
            peer.mode, peer.status, peer.body = "http", 200, {**UP, "worker_pid": 2}
            if peer.server is not None and not peer.server.is_serving():
                await peer.open()
            await until(lambda: supervisor.ready)
            reason = next(event.message for event in events if event.kind == "failure")
            assert words in reason, reason
            await collect(supervisor.generate(list(b"x"), {"max_tokens": 3}))

    run(test)


def test_idle_and_the_peer_was_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(tmp_path, monkeypatch, lambda peer: peer.body.update(worker_pid=2), "was started anew")


def test_idle_and_the_peer_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(tmp_path, monkeypatch, lambda peer: peer.close(), "refuses the connection")


def test_idle_and_the_peer_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(tmp_path, monkeypatch, lambda peer: setattr(peer, "mode", "silent"), "does not answer")


def test_a_slow_step_is_left_alone_while_the_peer_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with (
            scripted() as peer,
            supervised(
                tmp_path,
                monkeypatch,
                [{"life": 1, "after": 5, "do": "pause"}],
                peers=[peer.target],
                step_deadline_s=30.0,
            ) as (supervisor, _),
        ):
            asked = peer.asked
            tokens, _, _ = await collect(supervisor.generate(list(b"x"), {"max_tokens": 20}))
            assert len(tokens) == 20 and not supervisor.ledger.total
            assert peer.asked > asked + 2, "it was looked at all the same"

    run(test)
