"""The supervisor against an engine child that fails on command: nothing lost, nothing doubled, the reason named."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hydra.errors import EngineError, HydraError, ModelError, PeerUnreachable
from hydra.head.probe import PeerTarget
from hydra.head.spec import EngineSpec
from hydra.head.streams import Finish, Overloaded, Stream, Unavailable, WaitedTooLong
from hydra.head.supervisor import Event, Supervisor, SupervisorSettings

FAKE = Path(__file__).parent / "fake_engine.py"
LIMIT_S = 30.0
QUICK: dict[str, Any] = {
    "backoff_first_s": 0.05,
    "backoff_max_s": 0.2,
    "suspect_s": 0.2,
    "silence_s": 0.6,
    "probe_timeout_s": 0.3,
    "heartbeat_s": 3.0,
    "step_deadline_s": 3.0,
    "grace_s": 2.0,
}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


@asynccontextmanager
async def supervised(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: list[dict[str, Any]] | None = None,
    *,
    spec: EngineSpec | None = None,
    peers: list[PeerTarget] | None = None,
    ready: bool = True,
    **settings: Any,
) -> AsyncIterator[tuple[Supervisor, list[Event]]]:
    monkeypatch.setenv("FAKE_ENGINE_DIR", str(tmp_path))
    monkeypatch.setenv("FAKE_ENGINE_FAULTS", json.dumps(faults or []))
    events: list[Event] = []
    supervisor = Supervisor(
        spec or EngineSpec("fake.gguf", parallel=3),
        peers or [],
        SupervisorSettings(**(QUICK | settings)),
        command=lambda fd: [sys.executable, str(FAKE), "--fd", str(fd)],
        on_event=events.append,
    )
    await supervisor.start()
    try:
        if ready:
            await until(lambda: supervisor.ready or supervisor.state == "failed")
        yield supervisor, events
    finally:
        await supervisor.stop(0.0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s) if hasattr(asyncio, "timeout") else _no_limit():
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _no_limit() -> AsyncIterator[None]:
    yield  # Python 3.10: the limit around the whole test holds


async def collect(stream: Stream) -> tuple[list[int], str, Finish]:
    tokens: list[int] = []
    text = ""
    while True:
        item = await stream.next()
        if isinstance(item, Finish):
            return tokens, text, item
        tokens += item.tokens
        text += item.text


REQUESTS: list[tuple[dict[str, Any], bytes]] = [
    ({"temperature": 0, "max_tokens": 60}, b"one"),
    ({"temperature": 0.8, "seed": 5, "max_tokens": 45}, b"two"),
    ({"temperature": 1.0, "seed": 77, "max_tokens": 80}, b"three"),
]


async def answers(supervisor: Supervisor) -> list[tuple[list[int], str]]:
    streams = [supervisor.generate(list(prompt), params) for params, prompt in REQUESTS]
    return [(tokens, text) for tokens, text, _ in await asyncio.gather(*map(collect, streams))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], str]]:
    found: list[tuple[list[int], str]] = []

    async def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            async with supervised(tmp_path_factory.mktemp("calm"), patch) as (supervisor, _):
                found.extend(await answers(supervisor))

    run(test)
    assert [len(tokens) for tokens, _ in found] == [60, 45, 80]
    assert any("é" in text for _, text in found)
    return found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("abort", "SIGABRT"),
        ("exit", "out of memory"),
        ("stall", "stalled"),
        ("silent", "no sign of life"),
        ("garbage", "no frame"),
        ("failed", "CUDA error 700"),
    ],
)
@pytest.mark.parametrize("after", [0, 50])
def test_every_open_answer_goes_on_where_it_was(
    what: str, words: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    async def test() -> None:
        faults = [{"life": 1, "after": after, "do": what}]
        async with supervised(tmp_path, monkeypatch, faults) as (supervisor, events):
            assert await answers(supervisor) == undisturbed
            failures = [event for event in events if event.kind == "failure"]
            assert len(failures) == 1 and words in failures[0].message, failures
            assert supervisor.ledger.total == 1
            assert [event.kind for event in events].count("recovered") == 1
            assert supervisor.ready and supervisor.reason == ""
            status = supervisor.status()
            assert status["restarts"] == 1 and words in status["last_failure"]["reason"]

    run(test)


def test_many_lives_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any) -> None:
    async def test() -> None:
        faults = [{"life": life, "after": 13, "do": "abort"} for life in range(1, 9)]
        async with supervised(tmp_path, monkeypatch, faults, restart_limit=20) as (supervisor, _):
            assert await answers(supervisor) == undisturbed
            assert supervisor.ledger.total >= 8

    run(test)


def test_killed_from_outside_and_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch) as (supervisor, events):
            pid = supervisor.status()["engine_pid"]
            limits = Path(f"/proc/{pid}/limits").read_text()
            core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
            assert core.split()[4:6] == ["0", "0"]
            asyncio.get_running_loop().call_later(0.03, os.kill, pid, signal.SIGKILL)
            assert await answers(supervisor) == undisturbed
            await until(lambda: supervisor.ledger.total == 1 and supervisor.ready)
            assert "SIGKILL" in next(event.message for event in events if event.kind == "failure")

    run(test)


def test_what_keeps_failing_ends_in_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        faults = [{"life": life, "after": 2, "do": "exit"} for life in range(1, 20)]
        async with supervised(tmp_path, monkeypatch, faults, restart_limit=3) as (supervisor, _):
            stream = supervisor.generate(list(b"x"), {"max_tokens": 500})
            with pytest.raises(EngineError, match="3 times within 10 minutes") as caught:
                await collect(stream)
            assert "out of memory" in caught.value.message and caught.value.hint
            assert supervisor.state == "failed" and supervisor.failed is not None
            assert await supervisor.failed is caught.value
            with pytest.raises(EngineError):
                supervisor.generate(list(b"x"), {})

    run(test)


def test_a_request_that_kills_engines_is_given_up_and_not_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch, spec=EngineSpec("fake.gguf", parallel=4)) as (supervisor, events):
            killer = asyncio.create_task(collect(supervisor.generate(list(b"[[poison]]"), {"max_tokens": 5})))
            assert await answers(supervisor) == undisturbed
            with pytest.raises(EngineError, match=r"ended 3 times while it worked on this request.*GGML_ASSERT"):
                await killer
            failures = [event.message for event in events if event.kind == "failure"]
            assert len(failures) == 3 and supervisor.totals.requests["error"] == 1, failures
            await until(lambda: supervisor.ready)
            with pytest.raises(EngineError, match="ended 3 times"):
                await supervisor.call("embed", tokens=list(b"[[poison]]"))
            assert supervisor.ledger.total == 6
            await until(lambda: supervisor.ready)
            await collect(supervisor.generate(list(b"x"), {"max_tokens": 2}))

    monkeypatch.setitem(QUICK, "restart_limit", 4)
    run(test)


def test_a_model_that_is_not_there_is_not_tried_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch, spec=EngineSpec("missing.gguf")) as (supervisor, _):
            assert supervisor.state == "failed" and supervisor.failed is not None
            assert isinstance(await supervisor.failed, ModelError)
            assert (tmp_path / "lives").read_text() == "1"

    run(test)


def test_load_that_hangs_and_load_that_fails_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        faults = [{"life": 1, "do": "load_hang"}, {"life": 2, "do": "load_failed", "kind": "DeviceError"}]
        async with supervised(tmp_path, monkeypatch, faults) as (supervisor, events):
            assert supervisor.ready
            reasons = [event.message for event in events if event.kind == "failure"]
            assert "a stretch of loading" in reasons[0] and "it does not fit" in reasons[1]

    run(test)


def test_the_queue_is_bounded_and_first_come_first_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        spec = EngineSpec("fake.gguf", parallel=1)
        async with supervised(tmp_path, monkeypatch, spec=spec, queue_max=2) as (supervisor, _):
            order: list[int] = []

            async def one(number: int) -> None:
                stream = supervisor.generate(list(b"q%d" % number), {"max_tokens": 5})
                await collect(stream)
                order.append(number)

            tasks = [asyncio.create_task(one(n)) for n in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 requests wait") as caught:
                supervisor.generate(list(b"more"), {})
            assert 1 <= caught.value.retry_after_s <= 60
            await asyncio.gather(*tasks)
            assert order == [0, 1, 2]
            await collect(supervisor.generate(list(b"room again"), {"max_tokens": 1}))

    run(test)


def test_a_request_waits_only_as_long_as_it_will(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        spec = EngineSpec("fake.gguf", parallel=1)
        async with supervised(tmp_path, monkeypatch, spec=spec) as (supervisor, _):
            long = supervisor.generate(list(b"[[delay:20]]"), {"max_tokens": 100000})
            short = supervisor.generate(list(b"x"), {"max_tokens": 5}, max_wait_s=0.3)
            with pytest.raises(WaitedTooLong, match=r"its limit is 0\.3 s \(waiting for a slot\)"):
                await collect(short)
            supervisor.cancel(long)
            assert (await collect(long))[2].reason == "cancelled"
            await collect(supervisor.generate(list(b"y"), {"max_tokens": 2}))

    run(test)


def test_cancel_frees_the_slot_and_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        spec = EngineSpec("fake.gguf", parallel=1)
        async with supervised(tmp_path, monkeypatch, spec=spec) as (supervisor, _):
            first = supervisor.generate(list(b"[[delay:5]]"), {"max_tokens": 100000})
            await first.next()
            supervisor.cancel(first)
            tokens, _, finish = await collect(supervisor.generate(list(b"z"), {"max_tokens": 3}))
            assert len(tokens) == 3 and finish.reason == "length"
            assert not supervisor.board.active

    run(test)


def test_sampled_without_a_seed_can_be_continued_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch, [{"life": 1, "after": 20, "do": "abort"}]) as (supervisor, _):
            stream = supervisor.generate(list(b"s"), {"temperature": 1.0, "max_tokens": 40})
            tokens, _, _ = await collect(stream)
            again, _, _ = await collect(supervisor.generate(list(b"s"), dict(stream.params)))
            assert tokens == again and stream.resumed == 1

    run(test)


def test_tokenize_waits_for_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setenv("FAKE_ENGINE_LOAD_S", "0.3")
        async with supervised(tmp_path, monkeypatch, ready=False) as (supervisor, events):
            assert await supervisor.call("tokenize", text="hé", add_special=True, parse_special=True) == list(
                "hé".encode()
            )
            assert [e.data["layers_done"] for e in events if e.kind == "progress"] == [0, 5, 10]

    run(test)


def test_graceful_stop_finishes_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch) as (supervisor, _):
            runs = supervisor.generate(list(b"[[delay:3]]"), {"max_tokens": 50})
            await runs.next()
            stop = asyncio.create_task(supervisor.stop(5.0))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                supervisor.generate(list(b"late"), {})
            tokens, _, finish = await collect(runs)
            assert len(tokens) == 49 and finish.reason == "length"
            await stop
            assert supervisor.state == "stopped" and supervisor.status()["engine_pid"] is None

    run(test)


def test_stop_ends_what_will_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(
            tmp_path, monkeypatch, [{"life": 1, "after": 3, "do": "stall"}], step_deadline_s=60, heartbeat_s=60
        ) as (supervisor, _):
            stream = supervisor.generate(list(b"x"), {"max_tokens": 50})
            await stream.next()
            await supervisor.stop(0.1)
            with pytest.raises(Unavailable, match="shutting down"):
                await collect(stream)

    run(test)


def test_reload_keeps_answers_and_gives_up_what_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch, grace_s=0.05) as (supervisor, events):
            calm, _, _ = await collect(supervisor.generate(list(b"[[delay:4]]"), {"max_tokens": 60}))
            stream = supervisor.generate(list(b"[[delay:4]]"), {"max_tokens": 60})
            await stream.next()
            await supervisor.reload(EngineSpec("fake.gguf", parallel=2))
            rest, _, _ = await collect(stream)
            assert calm[1:] == rest and stream.resumed == 1
            assert supervisor.board.parallel == 2 and supervisor.ledger.total == 0
            await supervisor.reload(EngineSpec("missing.gguf", parallel=4))
            await until(lambda: any("going back" in event.message for event in events))
            await until(lambda: supervisor.ready)
            assert supervisor.board.parallel == 2 and supervisor.info["model"] == "fake.gguf"

    run(test)


def test_reload_to_another_model_ends_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with supervised(tmp_path, monkeypatch, grace_s=0.05) as (supervisor, _):
            stream = supervisor.generate(list(b"[[delay:20]]"), {"max_tokens": 600})
            await stream.next()
            await supervisor.reload(EngineSpec("other.gguf"))
            with pytest.raises(Unavailable, match="model was changed"):
                await collect(stream)
            await until(lambda: supervisor.ready)
            assert supervisor.info["model"] == "other.gguf"

    run(test)


def test_first_start_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    async def test() -> None:
        peers = [PeerTarget("mini", "127.0.0.1", unused_port)]
        async with supervised(tmp_path, monkeypatch, peers=peers, peer_wait_s=0.3) as (supervisor, events):
            assert supervisor.failed is not None
            error: HydraError = await supervisor.failed
            assert (
                isinstance(error, PeerUnreachable)
                and "refuses the connection" in error.message
                and "mini" in error.message
            )
            waits = [event for event in events if event.kind == "peer"]
            assert len(waits) >= 2 and waits[0].node == "mini" and waits[1].data["retry_s"] > waits[0].data["retry_s"]
            assert not (tmp_path / "lives").exists()

    run(test)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
