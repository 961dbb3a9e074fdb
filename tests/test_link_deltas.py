"""Deltas: whatever is sent, in pieces of any size, comes out byte for byte; and what repeats costs little."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra.errors import ProtocolError
from hydra.link import deltas, frames
from hydra.link.deltas import Decoder, Encoder
from hydra.link.frames import Flag, Hello, Up
from hydra.rpc import messages, wire
from hydra.rpc.connection import pack_request
from hydra.rpc.wire import Command

TERMS = Hello()


def set_tensor(data: bytes, *, buffer: int = 7, address: int = 1 << 44, flag: int = 0, **tensor: object) -> bytes:
    shape = (max(len(data) // 4, 1), 1, 1, 1)
    head = messages.tensor_bytes(id=1, type=0, buffer=buffer, data=address, ne=shape, **tensor)
    return pack_request(Command.SET_TENSOR, messages.SetTensor(head, 0, data, flag).pack())


def embeddings(tokens: list[int], columns: int = 640, seed: int = 0) -> bytes:
    """A SET_TENSOR of one row a token; the same token has the same row."""
    rows = b"".join(random.Random(1000 * seed + token).randbytes(4 * columns) for token in tokens)
    head = messages.tensor_bytes(id=9, type=0, buffer=7, data=1 << 45, ne=(columns, len(tokens), 1, 1), name=b"embd")
    return pack_request(Command.SET_TENSOR, messages.SetTensor(head, 0, rows).pack())


def graph(n: int, mark: int = 0) -> bytes:
    rows = np.concatenate([np.frombuffer(messages.tensor_bytes(id=i + 1, flags=mark), dtype=wire.RPC_TENSOR)
                           for i in range(n)])  # fmt: skip
    return pack_request(Command.GRAPH_COMPUTE, messages.GraphCompute(0, list(range(1, n + 1)), rows).pack())


def get_tensor(size: int) -> bytes:
    return pack_request(Command.GET_TENSOR, messages.GetTensor(messages.tensor_bytes(id=3, buffer=7), 0, size).pack())


class Pair:
    """An encoder and a decoder back to back."""

    def __init__(self, terms: Hello = TERMS, seed: int = 0) -> None:
        self.encoder, self.decoder = Encoder(terms), Decoder(terms)
        self.random = random.Random(seed)

    def send(self, message: bytes) -> tuple[bytes, int]:
        """(what comes out, bytes on the wire)."""
        data = np.frombuffer(bytearray(message), dtype=np.uint8)
        self.encoder.encode(memoryview(data.data), data.ctypes.data)
        sent = b"".join(self.encoder.out)
        assert len(sent) == self.encoder.out_bytes
        self.encoder.clear()
        return self.decode(sent), len(sent)

    def decode(self, sent: bytes) -> bytes:
        """In reads and into rooms of random sizes, like a socket and a session's buffer."""
        raw = memoryview(bytearray(1 << 16))
        out = bytearray()
        pos = end = at = 0
        while True:
            room = memoryview(bytearray(self.random.choice((1, 3, 17, 1000, 100000))))
            pos, written = self.decoder.advance(raw, pos, end, room)
            out += room[:written]
            if written:
                continue
            if at == len(sent):
                assert pos == end and self.decoder.between
                return bytes(out)
            rest = bytes(raw[pos:end])
            raw[: len(rest)] = rest
            pos, end = 0, len(rest)
            step = min(self.random.choice((1, 2, 5, 300, 60000)), len(sent) - at, len(raw) - end)
            raw[end : end + step] = sent[at : at + step]
            at, end = at + step, end + step


def mutate(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((0, 0, 1, 2, 5, 40))):
        at = rng.randrange(len(data))
        length = rng.choice((1, 2, 8, 64, len(data)))
        data[at : at + length] = rng.randbytes(min(length, len(data) - at))


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_comes_out_as_it_went_in(seed: int) -> None:
    rng = random.Random(seed)
    small = Hello(store_bytes=200_000, slots=5)  # so that slots are taken from one another
    pair = Pair(small if seed % 2 else TERMS, seed)
    contents = {
        (buffer, address): bytearray(rng.randbytes(rng.choice((1, 4, 700, 1030, 5000, 70001))))
        for buffer in (7, 8) for address in (4096, 1 << 20, 1 << 30)
    }  # fmt: skip
    for _ in range(300):
        kind = rng.random()
        if kind < 0.6:
            (buffer, address), data = rng.choice(list(contents.items()))
            mutate(rng, data)
            message = set_tensor(bytes(data), buffer=buffer, address=address, flag=int(rng.random() < 0.05),
                                 use_count=rng.choice((0, 0, 0, 9)))  # fmt: skip
        elif kind < 0.75:
            message = graph(rng.choice((1, 5, 40)), rng.choice((0, 0, 16)))
        elif kind < 0.9:
            message = rng.choice((get_tensor(64), get_tensor(9), pack_request(Command.GRAPH_RECOMPUTE, bytes(4))))
        elif kind < 0.95:
            message = pack_request(Command.FREE_BUFFER, struct.pack("<Q", rng.choice((7, 8))))
        else:
            message = pack_request(Command.DEVICE_COUNT)
        assert pair.send(message)[0] == message


# What a client may say, as hypothesis draws and shortens it: sets of any tensor, whole or changed, rows, frees, graphs.
_STEP = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 5999), st.binary(max_size=40)),
                                                          max_size=5)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 1)),
    st.tuples(st.just("free"), st.sampled_from((6, 7)), st.none()),
    st.tuples(st.just("graph"), st.integers(1, 6), st.integers(0, 1)),
    st.tuples(st.just("get"), st.integers(1, 40), st.none()),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_STEP, max_size=60), st.sampled_from(((200_000, 5), (20_000, 2), (1 << 26, 4096), (9999, 1), (0, 0))))
def test_no_sequence_that_hypothesis_finds_comes_out_otherwise(steps: list[Any], bounds: tuple[int, int]) -> None:
    pair = Pair(Hello(store_bytes=bounds[0], slots=bounds[1]))
    contents = [bytearray(length) for length in (1, 700, 5001, 6000)]
    for kind, what, more in steps:
        if kind == "set":
            data = contents[what]
            for at, new in more:
                data[at : at + len(new)] = new[: max(0, len(data) - at)]
            message = set_tensor(bytes(data), address=4096 * (what + 1))
        elif kind == "rows":
            message = embeddings(what, seed=more)
        elif kind == "free":
            message = pack_request(Command.FREE_BUFFER, struct.pack("<Q", what))
        elif kind == "graph":
            message = graph(what, more)
        else:
            message = get_tensor(what)
        assert pair.send(message)[0] == message
        assert pair.encoder._bytes <= bounds[0] and pair.decoder._bytes == pair.encoder._bytes
        assert sorted(pair.decoder._kept) == sorted(set(range(bounds[1])) - set(pair.encoder._free))


def test_a_token_that_comes_again_costs_three_bytes() -> None:
    pair = Pair()
    rng = random.Random(3)
    tokens = [rng.randrange(20) for _ in range(400)]
    costs = []
    for at in range(0, len(tokens), 4):
        message = embeddings(tokens[at : at + 4])
        out, cost = pair.send(message)
        assert out == message
        costs.append(cost)
    assert max(costs[60:]) <= 5 * 3, "twenty tokens are soon known"
    for width in (1, 2, 3):
        for _ in range(3):
            cost = pair.send(embeddings(tokens[:width]))[1]
        assert cost == 3, "and the same step again is one message"


def test_rows_that_begin_alike_are_told_apart() -> None:
    pair = Pair()
    rng = random.Random(4)
    common = rng.randbytes(100)
    for _ in range(40):
        data = b"".join(common + rng.choice((b"a", b"b")) * 2460 for _ in range(3))
        head = messages.tensor_bytes(id=9, type=0, buffer=7, data=1 << 45, ne=(640, 3, 1, 1))
        message = pack_request(Command.SET_TENSOR, messages.SetTensor(head, 0, data).pack())
        assert pair.send(message)[0] == message


def test_results_of_layers_are_not_kept_row_by_row_for_long() -> None:
    pair = Pair()
    for step in range(400):
        message = embeddings([step], seed=step + 1)
        out, cost = pair.send(message)
        assert out == message and cost <= len(message) + 330
    assert cost <= len(message), "none ever came again: whole, and nothing kept"
    assert not next(kept for kept in pair.encoder._kept.values()).by_row


def test_the_oldest_rows_go_first() -> None:
    pair = Pair(Hello(store_bytes=40_000, slots=4096))  # 30,000 of them for rows: eleven
    for _ in range(3):
        pair.send(embeddings([99], seed=5))
        pair.send(embeddings([98], seed=5))
    for token in range(30):
        pair.send(embeddings([token]))
        pair.send(embeddings([50]))
    assert pair.send(embeddings([49]))[1] > 2560
    assert pair.send(embeddings([50]))[1] <= 6
    assert pair.send(embeddings([0]))[1] > 2560
    assert pair.encoder._row_bytes <= 30_000


def test_what_repeats_costs_three_bytes_from_the_third_time() -> None:
    pair = Pair()
    matrix = set_tensor(bytes(range(256)) * 1024)
    assert [pair.send(matrix)[1] for _ in range(4)] == [len(matrix) + 5, len(matrix) + 7, 3, 3]


def test_a_changed_cell_costs_a_range() -> None:
    pair = Pair()
    mask = np.full(65536 * 4, -np.inf, dtype=np.float16)
    for step in range(6):
        mask[1000 + step] = mask[65536 + 1001 + step] = 0
        message = set_tensor(mask.tobytes())
        out, cost = pair.send(message)
        assert out == message
    assert cost <= 5 + 2 * 8 + 2 * 16


def test_the_last_bytes_of_an_odd_length_count() -> None:
    pair = Pair()
    for last in (1, 2, 3, 4):
        message = set_tensor(bytes(5000) + bytes([last]))
        out, cost = pair.send(message)
        assert out == message
    assert cost < 40


def test_what_changes_everywhere_is_sent_whole_and_seldom_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    searched = []
    original = Encoder._ranges

    def counted(self: Encoder, *arguments: Any) -> Any:
        searched.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(Encoder, "_ranges", counted)
    rng = random.Random(5)
    for _ in range(100):
        message = set_tensor(rng.randbytes(20480))
        out, cost = pair.send(message)
        assert out == message
    assert cost <= 20480 + 13, "the head of the tensor is known and not sent again"
    assert len(searched) < 10


def test_weights_and_large_messages_are_not_kept() -> None:
    pair = Pair()
    cached = set_tensor(bytes(3000), flag=1)
    large = set_tensor(bytes(frames.MAX_KEPT_BYTES))
    for message in (cached, large):
        assert {pair.send(message)[1] for _ in range(4)} == {len(message) + 5}
    assert not pair.encoder._kept


def test_a_load_keeps_nothing() -> None:
    pair = Pair()
    for tensor in range(300):
        pair.send(set_tensor(bytes(5000), address=(1 << 40) + tensor * 8192))
    assert not pair.encoder._kept and not pair.decoder._kept


def test_freeing_a_buffer_drops_what_was_kept_of_it_at_both_ends() -> None:
    pair = Pair()
    for buffer in (7, 8):
        for _ in range(3):
            pair.send(set_tensor(bytes(5000), buffer=buffer))
    for _ in range(2):
        pair.send(get_tensor(8))
    assert len(pair.decoder._kept) == 3
    pair.send(pack_request(Command.FREE_BUFFER, struct.pack("<Q", 7)))
    assert len(pair.decoder._kept) == len(pair.encoder._kept) == 1


def test_store_bytes_are_given_back() -> None:
    held: list[int] = []
    pair = Pair()
    pair.decoder._take = held.append
    for _ in range(3):
        pair.send(set_tensor(bytes(5000)))
    pair.send(pack_request(Command.FREE_BUFFER, struct.pack("<Q", 7)))
    pair.send(get_tensor(8))
    pair.send(get_tensor(8))
    pair.decoder.close()
    assert sum(held) == 0 and max(held) > 5000


def test_without_deltas_everything_is_plain() -> None:
    pair = Pair(Hello(flags=0))
    message = set_tensor(bytes(5000))
    assert {pair.send(message)[1] for _ in range(3)} == {len(message) + 5}


@pytest.mark.parametrize(
    "wire",
    [
        b"\x00",
        b"\x81\0\0\0\0",
        frames.SLOT.pack(Up.SAME, 3),
        frames.SLOT.pack(Up.DROP, 3),
        frames.PATCH.pack(Up.PATCH, 3, 1),
        frames.KEEP.pack(Up.KEEP, TERMS.slots, 100),
        frames.KEEP.pack(Up.KEEP, 0, 8),
        frames.KEEP.pack(Up.KEEP, 0, frames.MAX_KEPT_BYTES + 1),
        frames.KEEP.pack(Up.KEEP, 0, 10) + bytes(10) + frames.PATCH.pack(Up.PATCH, 0, 1) + struct.pack("<II", 8, 3),
        frames.KEEP.pack(Up.KEEP, 0, 10) + bytes(10) + frames.PATCH.pack(Up.PATCH, 0, 1) + struct.pack("<II", 8, 0),
        frames.KEEP.pack(Up.KEEP, 0, 10) + bytes(10) + frames.PATCH.pack(Up.PATCH, 0, 0),
        frames.KEEP.pack(Up.KEEP, 0, 10) + bytes(10) + frames.PATCH.pack(Up.PATCH, 0, frames.MAX_RANGES + 1),
        frames.LENGTH.pack(Up.HALF, 3),
    ],
)
def test_frames_that_no_head_makes_are_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        Pair().decode(wire)


def test_the_store_is_bounded() -> None:
    pair = Pair(Hello(store_bytes=1000, slots=4))
    pair.decode(frames.KEEP.pack(Up.KEEP, 0, 600) + bytes(600))
    with pytest.raises(ProtocolError, match="agreed"):
        pair.decode(frames.KEEP.pack(Up.KEEP, 1, 600) + bytes(600))


def test_half_precision_comes_out_as_float32() -> None:
    values = np.array([0, 1.5, -2.25, 1e-3, 65504, 1e6, -1e6, np.inf, -np.inf], dtype="<f4")
    narrow = deltas.narrow(values.tobytes())
    pair = Pair(Hello(flags=int(Flag.DELTAS | Flag.HALF)))
    got = np.frombuffer(pair.decode(frames.LENGTH.pack(Up.HALF, len(narrow)) + narrow), dtype="<f4")
    assert got.tolist()[:3] == [0, 1.5, -2.25] and got[3] == pytest.approx(1e-3, rel=1e-3)
    assert got.tolist()[4:] == [65504, 65504, -65504, np.inf, -np.inf], "finite values stay finite"
    assert np.isnan(np.frombuffer(deltas.widen(deltas.narrow(np.array([np.nan], "<f4").tobytes())), "<f4")[0])
