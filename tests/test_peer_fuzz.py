"""Fuzzing in the test run: 20,000 messages of a fixed seed, as many of a fresh one, and hypothesis on the same.

The device worker must not restart. A session that restarts it is named by seed and number:
``python -m tests.hostile.fuzz --seed S --session N --log`` plays it again.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra.peer import rules
from hydra.peer.launch import PeerProcess, start_peer
from hydra.peer.ops import IS_VIEW_OP, op_name
from hydra.rpc import wire
from hydra.rpc.wire import Command
from tests.hostile import craft, fuzz
from tests.hostile.tables import parse_graph, table
from tests.peer_tools import get_json

T = TypeVar("T")
MESSAGES = 20_000
FIXED_SEED = 20261130


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    with start_peer(device="CPU", **fuzz.PEER) as process:
        yield process


def restarts(peer: PeerProcess) -> int:
    return int(get_json(peer.port, "/health")["restarts"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [FIXED_SEED, secrets.randbits(32)], ids=["fixed", "fresh"])
def test_no_message_restarts_the_worker(peer: PeerProcess, seed: int) -> None:
    fuzzer = fuzz.Fuzzer(peer.host, peer.port)
    before = restarts(peer)
    guilty = fuzzer.run(seed, MESSAGES, lambda: restarts(peer), lambda line: None)
    tally = fuzzer.tally
    print(f"seed {seed}: {tally.messages} messages, {tally.graphs} graphs, {tally.closed}/{tally.sessions} closed")
    assert not guilty, f"seed {seed}: {guilty}"
    assert restarts(peer) == before
    assert tally.messages >= MESSAGES
    # it must neither stop at the door nor be let through unseen
    assert tally.graphs > MESSAGES // 50
    assert tally.sessions // 10 < tally.closed < tally.sessions


class Taped:
    """fuzz.Source from the bytes of a tape, which hypothesis writes and shortens to what matters.

    The whole tape is drawn before the session: how far a session comes before the peer closes it is a matter of timing,
    and hypothesis takes draws that differ from run to run for a fault. Behind its end the tape goes on by chance.
    """

    def __init__(self, tape: bytes) -> None:
        self._tape = tape
        self._beyond = random.Random(tape)

    def data(self, size: int) -> bytes:
        taken, self._tape = self._tape[:size], self._tape[size:]
        return taken + self._beyond.randbytes(size - len(taken))

    def integer(self, low: int, high: int) -> int:
        span = high - low
        return low + int.from_bytes(self.data((span.bit_length() + 7) // 8), "big") % (span + 1)

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) < percent

    def choice(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]


@pytest.mark.timeout(240)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(tape=st.binary(max_size=2048))
def test_no_session_that_hypothesis_finds_restarts_the_worker(peer: PeerProcess, tape: bytes) -> None:
    before = restarts(peer)
    tally = fuzz.Tally()
    connection = fuzz.Wire(peer.host, peer.port, tally)
    try:
        with contextlib.suppress(ConnectionError):
            fuzz.structured_session(Taped(tape), connection)
    finally:
        connection.close()
    assert restarts(peer) == before


@pytest.mark.timeout(240)
def test_a_graph_writes_only_where_its_results_lie(peer: PeerProcess) -> None:
    """A buffer full of one byte, a graph (in order, or bent and let through), and nothing but its results changed."""
    size, filling = 1 << 20, 0x5A
    passed = bent_passed = 0
    for number in range(160):
        source = fuzz.Random(77, number)
        tally = fuzz.Tally()
        w = fuzz.Wire(peer.host, peer.port, tally)
        try:
            w.call(Command.HELLO, bytes(wire.CAPS_SIZE))
            ptr = struct.unpack("<QQ", w.call(Command.ALLOC_BUFFER, wire.ALLOC_BUFFER.pack(0, size)))[0]
            base = struct.unpack("<Q", w.call(Command.BUFFER_GET_BASE, struct.pack("<Q", ptr)))[0]
            w.send(Command.BUFFER_CLEAR, wire.BUFFER_CLEAR.pack(ptr, filling))
            bend = number % 2 == 1
            payload, sketch = fuzz.make_graph(source, fuzz.Place(ptr, base, size), bend)
            allowed = np.zeros(size, np.bool_)
            for row, data in sketch.writes:
                w.send(Command.SET_TENSOR, row.tobytes() + wire.SET_TENSOR_TAIL.pack(0, 0) + data)
                at = int(row["data"][0]) - base
                allowed[at : at + len(data)] = True
            w.send(Command.GRAPH_COMPUTE, payload)
            whole = craft.tensor(1, "i8", (size,), 0, c=craft.Context(ptr, base, 0, 0))
            answer = w.call(Command.GET_TENSOR, whole.tobytes() + wire.OFFSET_SIZE.pack(0, size))
        except ConnectionError:
            assert bend, f"graph {number}, which is in order, was refused"
            continue
        finally:
            w.close()
        t = table(*parse_graph(payload), {ptr: (base, size)})
        rules.check_tensors(t)
        assert t.layout is not None
        for node in t.nodes[~IS_VIEW_OP[t.op[t.nodes]]].tolist():
            at = int(t.data[node])
            allowed[at : at + int(t.layout.extent[node])] = True
        changed = np.frombuffer(answer, np.uint8) != filling
        outside = np.flatnonzero(changed & ~allowed)
        assert not len(outside), f"graph {number} wrote at {outside[:8]}"
        passed += 1
        bent_passed += bend
    assert passed >= 80 and bent_passed >= 3


def test_the_generators_make_graphs_that_are_in_order() -> None:
    """Without this the fuzzer could knock at the door for ever: its unbent graphs must pass the rules."""
    seen = set()
    for number in range(150):
        place = fuzz.Place(1, 1 << 40, 1 << 20)
        payload, _ = fuzz.make_graph(fuzz.Random(5, number), place, bend=False)
        t = table(*parse_graph(payload), {1: (1 << 40, 1 << 20)})
        rules.check_tensors(t)
        rules.check_graph(t)
        seen |= {op_name(int(op)) for op in t.op[t.nodes]}
    assert len(seen) >= 64
