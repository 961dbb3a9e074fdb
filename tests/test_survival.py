"""What kills others: each fault with three answers open, and every token of each checked. Real processes, loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hydra.errors import HydraError
from hydra.head.streams import Unavailable
from hydra.rpc.client import Client
from tests.survival_cut import HEAD_ADDRESS, PEER_ADDRESS
from tests.survival_support import STARTS, Peer, ask_all, collect, expected, run, supervised, toy_split, until

WANTED = [expected(start) for start in STARTS]


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.stop()


def failures(events: list) -> list[str]:
    return [event.message for event in events if event.kind == "failure"]


def test_the_worker_is_killed(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, events):

            async def fault() -> None:
                peer.kill_worker()

            assert await ask_all(supervisor, fault) == WANTED
            (reason,) = failures(events)
            assert "mini" in reason and "3 open answers will be continued" in reason

    run(test)


def test_the_peer_is_killed_and_comes_back(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, events):

            async def fault() -> None:
                peer.kill()
                await until(lambda: supervisor.state == "waiting" and "refuses" in supervisor.reason)
                status = supervisor.status()
                assert status["recovering"] and status["peers"][0]["state"] == "refused"
                peer.restart()

            assert await ask_all(supervisor, fault) == WANTED
            assert "refuses the connection" in failures(events)[0]

    run(test)


@pytest.mark.parametrize("mtp", [False, True])
def test_the_engine_is_killed(peer: Peer, mtp: bool) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer, mtp=mtp)) as (supervisor, events):

            async def fault() -> None:
                os.kill(supervisor.status()["engine_pid"], signal.SIGKILL)

            assert await ask_all(supervisor, fault) == [
                expected(start, name="toy" if mtp else "toy-llama") for start in STARTS
            ]
            assert "SIGKILL" in failures(events)[0]

    run(test)


def test_the_peer_stops_for_longer_than_its_timeout(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, events):

            async def fault() -> None:
                peer.signal_both(signal.SIGSTOP)
                try:
                    await until(lambda: supervisor.ledger.total == 1)
                finally:
                    peer.signal_both(signal.SIGCONT)

            assert await ask_all(supervisor, fault) == WANTED
            assert "does not answer" in failures(events)[0] and "stalled" in failures(events)[0]

    run(test)


def test_the_peer_stops_for_less_than_its_timeout(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer), silence_s=20.0) as (supervisor, events):

            async def fault() -> None:
                peer.signal_both(signal.SIGSTOP)
                await asyncio.sleep(2.0)
                peer.signal_both(signal.SIGCONT)

            assert await ask_all(supervisor, fault) == WANTED
            assert not failures(events), "a pause that ends by itself needs no restart"

    run(test)


@pytest.fixture
def two_boxes() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a veth pair: their names. Skips where none can be made."""
    head, peer = f"hydra{os.getpid()}a", f"hydra{os.getpid()}b"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    steps = [
        f"netns add {head}",
        f"netns add {peer}",
        f"link add veth0 netns {head} type veth peer name veth0 netns {peer}",
    ]
    for name, address in ((head, HEAD_ADDRESS), (peer, PEER_ADDRESS)):
        steps += [
            f"-n {name} addr add {address}/24 dev veth0",
            f"-n {name} link set veth0 up",
            f"-n {name} link set lo up",
        ]
    try:
        for step in steps:
            done = subprocess.run(["ip", *step.split()], capture_output=True, text=True, timeout=10)
            if done.returncode:
                pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
        yield head, peer
    finally:
        for name in (head, peer):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


@pytest.mark.parametrize(("silence_s", "restarts"), [(1.5, 1), (30.0, 0)])
def test_the_link_is_cut_and_restored(two_boxes: tuple[str, str], silence_s: float, restarts: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.survival_cut",
        *two_boxes,
        str(silence_s),
        "restart" if restarts else "wait",
    ]
    done = subprocess.run(["ip", "netns", "exec", two_boxes[0], *command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exact"] and result["restarts"] == restarts, result
    assert all("mini" in reason for reason in result["reasons"]), result


def test_a_peer_of_another_release_is_refused_by_name(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, events):

            async def fault() -> None:
                peer.kill()
                peer.restart(module="tests.other_release_peer")
                await until(lambda: "9.9.9" in supervisor.reason and supervisor.state == "waiting")
                with pytest.raises(Unavailable, match=r"runs hydra 9\.9\.9, this head .* same hydra release"):
                    supervisor.generate([97], {"max_tokens": 1})
                peer.stop()
                peer.restart()

            assert await ask_all(supervisor, fault) == WANTED
            assert any(event.level == "error" and "9.9.9" in event.message for event in events)

    run(test)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_the_memory_of_the_peer_is_full() -> None:
    limited = Peer(prefix=["prlimit", f"--as={3 << 30}"])

    async def test() -> None:
        # A context whose cache is far larger than what malloc keeps of freed blocks.
        spec = dataclasses.replace(toy_split(limited), ctx_size=1 << 18)
        async with supervised(limited, spec) as (supervisor, events):

            async def fault() -> None:
                hog = Client(limited.host, limited.port)
                os.kill(supervisor.status()["engine_pid"], signal.SIGKILL)
                for _ in range(25):  # what the dead engine held is given back a moment later, and taken at once
                    for size in (256 << 20, 16 << 20, 1 << 20):
                        while hog.alloc(size)[0]:
                            pass
                    await asyncio.sleep(0.01)
                await until(lambda: supervisor.ledger.total >= 2)
                hog.close()

            assert await ask_all(supervisor, fault) == WANTED
            # Refused with the size, or, where not even a thread could be started, a worker that ended: the peer is
            # named.
            assert any(event.node == "mini" for event in events if event.kind == "failure"), failures(events)

    try:
        run(test)
    finally:
        limited.stop()


def test_what_never_comes_back_ends_clearly(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, _):
            stream = supervisor.generate([97], {"temperature": 0, "max_tokens": 2000}, max_wait_s=2.0)
            collecting = asyncio.create_task(collect(stream))
            await until(lambda: len(stream.sent) > 20)
            peer.kill()
            with pytest.raises(HydraError, match=r"its limit is 2 s .*refuses the connection"):
                await collecting
            assert stream.sent == expected(97, len(stream.sent))
            peer.restart()

    run(test)


def test_stop_while_the_peer_is_gone(peer: Peer) -> None:
    async def test() -> None:
        async with supervised(peer, toy_split(peer)) as (supervisor, _):
            stream = supervisor.generate([97], {"max_tokens": 3000})
            await until(lambda: len(stream.sent) > 20)
            peer.kill()
            await asyncio.wait_for(supervisor.stop(0.5), 15)
            assert supervisor.state == "stopped"

    run(test)
