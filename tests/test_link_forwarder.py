"""The link between real ends: the device has the same bytes as without it, and a peer that fails is named at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydra.errors import PeerError, ProtocolError
from hydra.link import frames
from hydra.link.forwarder import Forwarder
from hydra.link.frames import Hello
from hydra.link.process import start_link
from hydra.link.settings import LinkSettings
from hydra.peer.launch import PeerProcess, start_peer
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command
from hydra.security import init_certs
from tests.peer_tools import OP_ADD, OP_MUL, Vectors, get_json, peer


class Link:
    """A forwarder on a thread of this process, and what it reported."""

    def __init__(self, host: str, port: int, **settings: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.forwarder = Forwarder(LinkSettings("mini", host, port, **settings), self.events.append)
        self.thread = threading.Thread(target=self.forwarder.serve, daemon=True)
        self.thread.start()

    def client(self, timeout_s: float = 20.0) -> Client:
        return Client("127.0.0.1", self.forwarder.port, timeout_s=timeout_s)

    def faults(self) -> list[dict[str, Any]]:
        wait_for(lambda: any(event["event"] == "fault" for event in self.events))
        return [event for event in self.events if event["event"] == "fault"]


@contextlib.contextmanager
def link(host: str, port: int, **settings: Any) -> Iterator[Link]:
    made = Link(host, port, **settings)
    try:
        yield made
    finally:
        made.forwarder.close()
        made.thread.join(5)
        assert not made.thread.is_alive()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def ours() -> Iterator[PeerProcess]:
    with start_peer(device="CPU", threads=1) as process:
        yield process


def random_session(client: Client, seed: int) -> list[bytes]:
    """Sets, frees, clears, copies, graphs and gets in random order; everything that was ever read back."""
    rng = random.Random(seed)
    n, slots = 600, 8
    seen: list[bytes] = []
    vectors = [Vectors(client, n, slots), Vectors(client, n, slots)]
    data: dict[tuple[int, int], np.ndarray] = {}
    for which in (0, 1):
        client.send(messages.BufferClear(vectors[which].handle, 0))
    for _ in range(250):
        which = rng.randrange(2)
        v = vectors[which]
        kind = rng.random()
        if kind < 0.45:
            slot = rng.randrange(slots)
            values = data.setdefault((which, slot), np.zeros(n, dtype=np.float32))
            for _ in range(rng.choice((0, 1, 3, 600))):
                values[rng.randrange(n)] = rng.random()
            v.set(slot, values)
        elif kind < 0.55:  # a part, at an offset
            slot, first = rng.randrange(slots), rng.randrange(n - 10)
            part = np.array([rng.random() for _ in range(10)], dtype=np.float32).tobytes()
            client.send(messages.SetTensor(v.row(slot).tobytes(), 4 * first, part))
        elif kind < 0.75:
            a, b, to = (rng.randrange(slots) for _ in range(3))
            if to in (a, b):
                continue
            op = rng.choice((OP_ADD, OP_MUL))
            v.compute([to], [*(v.row(slot) for slot in sorted({a, b})), v.op(to, op, a, b)])
            for _ in range(rng.choice((0, 0, 1))):
                v.recompute()
        elif kind < 0.78:
            client.call(messages.CopyTensor(v.row(0).tobytes(), v.row(1).tobytes()))
        elif kind < 0.8:
            client.send(messages.MemsetTensor(v.row(2).tobytes(), 8, 400, rng.randrange(2)))
        elif kind < 0.82:
            client.send(messages.BufferRequest(Command.FREE_BUFFER, v.handle))
            vectors[which] = Vectors(client, n, slots)
            client.send(messages.BufferClear(vectors[which].handle, 0))
        else:
            seen.append(v.get(rng.randrange(slots)).tobytes())
    for v in vectors:
        seen += [v.get(slot).tobytes() for slot in range(slots)]
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_the_device_has_the_same_bytes_as_without_the_link(ours: PeerProcess, seed: int) -> None:
    with Client(ours.host, ours.port) as direct:
        expected = random_session(direct, seed)
    with link(ours.host, ours.port) as through, through.client() as client:
        assert random_session(client, seed) == expected
        counters = through.forwarder.stats()
    assert [event["mode"] for event in through.events] == ["link"]
    assert counters["wire_bytes_up"] < counters["plain_bytes_up"]
    assert counters["wire_sends"] < counters["plain_messages"]


def test_a_repeated_step_costs_little_and_goes_out_together(ours: PeerProcess) -> None:
    with link(ours.host, ours.port) as through, through.client() as client:
        vectors = Vectors(client, n=65536)
        matrix = np.arange(65536)
        vectors.set(1, matrix)

        def step(cell: int) -> None:
            mask[cell] = cell
            vectors.set(0, mask)
            vectors.set(1, matrix)
            vectors.add(2, 0, 1)
            assert vectors.get(2)[cell] == 2 * cell

        mask = np.zeros(65536)
        for cell in range(1, 4):
            step(cell)
        before = through.forwarder.stats()
        for cell in range(4, 24):
            step(cell)
        after = through.forwarder.stats()
    assert after["plain_bytes_up"] - before["plain_bytes_up"] > 20 * 2 * 262144
    assert after["wire_bytes_up"] - before["wire_bytes_up"] < 20 * 100
    assert after["wire_sends"] - before["wire_sends"] <= 20 * 3


def test_large_messages_pass_whole_in_both_directions(ours: PeerProcess) -> None:
    values = np.random.default_rng(1).random(3 << 20, dtype=np.float32)  # 12 MiB: above what is kept or buffered
    with link(ours.host, ours.port) as through, through.client() as client:
        vectors = Vectors(client, n=len(values), slots=2)
        for shift in range(3):
            vectors.set(0, np.roll(values, shift))
            vectors.add(1, 0, 0)
            assert np.array_equal(vectors.get(1), 2 * np.roll(values, shift))


@pytest.mark.parametrize("activations", ["f32", "f16"])
def test_a_prompts_embeddings_cross_once_a_token(ours: PeerProcess, activations: str) -> None:
    columns, tokens = 5120, [index % 100 for index in range(512)]  # 10 MiB: more than any message that is kept
    table = np.random.default_rng(1).random((100, columns), dtype=np.float32)
    with link(ours.host, ours.port, activations=activations) as through, through.client() as client:
        vectors = Vectors(client, n=columns * len(tokens), slots=1)
        whole = 4 * columns * len(tokens)
        shape = {"ne": (columns, len(tokens), 1, 1), "nb": (4, 4 * columns, whole, whole)}
        for shift in range(2):
            data = np.roll(table[tokens], shift, axis=0)
            row = vectors.row(0, name=b"RPC0[127.0.0.1:1]#embd#0", **shape)
            client.send(messages.SetTensor(row.tobytes(), 0, data.tobytes()))
            assert np.array_equal(vectors.get(0).reshape(data.shape), data), "exact, half precision or not"
        stats = through.forwarder.stats()
    assert stats["plain_bytes_up"] > 2 * data.nbytes
    assert stats["wire_bytes_up"] < 1.1 * table.nbytes


def test_a_weight_that_the_peer_has_never_crosses(tmp_path: Path) -> None:
    data = np.random.default_rng(2).bytes(11 << 20)
    row = messages.tensor_bytes(id=1, type=0, ne=(len(data) // 4, 1, 1, 1), nb=(4, *[len(data)] * 3), name=b"blk.0.w")
    fnv = 0x1234567890  # only ever compared: what lies behind it is verified by other means
    with start_peer(device="CPU", threads=1, cache_dir=str(tmp_path)) as process:
        crossed = []
        for _ in range(2):
            with link(process.host, process.port) as through, through.client() as client:
                handle, _ = client.alloc(len(data))
                placed = np.frombuffer(row, dtype=wire.RPC_TENSOR).copy()
                placed["buffer"], placed["data"] = handle, client.base(handle)
                found = client.call(messages.SetTensorHash(placed.tobytes(), 0, fnv))
                if found == b"\0":
                    client.send(messages.SetTensor(placed.tobytes(), 0, data, 1))
                assert client.call(messages.GetTensor(placed.tobytes(), 1 << 20, 4096)) == data[1 << 20 :][:4096]
                crossed.append(through.forwarder.stats()["wire_bytes_up"])
            wait_for(lambda: get_json(process.port, "/stats")["cache"]["stored"] == 1)  # on a thread of its own
        assert crossed[0] > len(data) and crossed[1] < 4096


def test_a_stock_peer_is_recognised_and_served_plainly() -> None:
    with peer("stock") as (host, port):
        expected = None
        for through in (False, True, True):
            with link(host, port) as made, made.client() if through else Client(host, port) as client:
                seen = random_session(client, 3)
            expected = expected or seen
            assert seen == expected
        assert [event["mode"] for event in made.events] == ["plain"]


def test_a_stock_peer_is_not_asked_again_while_it_serves() -> None:
    """It serves one connection at a time; the question would wait behind our own."""
    with peer("stock") as (host, port), link(host, port) as made:
        with made.client() as first:
            assert first.device_count() == 1
        with made.client() as second:
            assert second.device_count() == 1
        assert len(made.events) == 2


def test_a_link_without_deltas_is_plain_to_a_hydra_peer(ours: PeerProcess) -> None:
    with link(ours.host, ours.port, deltas=False) as made, made.client() as client:
        assert Vectors(client).get(0) is not None
        assert made.events[0]["mode"] == "plain"


def test_a_refused_request_ends_with_the_peers_own_words(ours: PeerProcess) -> None:
    with link(ours.host, ours.port) as made:
        with made.client() as client:
            vectors = Vectors(client)
            vectors.compute([1], [vectors.row(0, data=12345), vectors.op(1, OP_ADD, 0, 0)])
            with pytest.raises(PeerError):
                vectors.get(0)
        (fault,) = made.faults()
        assert fault["peer"] == "mini" and fault["kind"] == "fault"
        assert "outside" in fault["message"] or "buffer" in fault["message"], fault
    with Client(ours.host, ours.port) as after:
        assert after.device_count() == 1


def test_a_peer_that_dies_is_named_at_once() -> None:
    with start_peer(device="CPU", threads=1) as process, link(process.host, process.port) as made:
        with made.client() as client:
            vectors = Vectors(client)
            os.kill(process.worker_pid, signal.SIGKILL)
            with pytest.raises(PeerError):
                vectors.get(0)
                vectors.get(0)
        (fault,) = made.faults()
        assert fault["kind"] == "gone" and "mini" in fault["message"]


def test_a_peer_that_is_stopped_is_noticed_within_the_time_set() -> None:
    with start_peer(device="CPU", threads=1) as process, link(process.host, process.port, silence_s=1.0) as made:
        with made.client() as client:
            vectors = Vectors(client)
            os.kill(process.worker_pid, signal.SIGSTOP)
            try:
                with pytest.raises(PeerError):
                    vectors.get(0)
                    vectors.get(0)
                (fault,) = made.faults()
            finally:
                os.kill(process.worker_pid, signal.SIGCONT)
        assert fault["kind"] == "silent" and "silence_s" in fault["message"]


def test_an_idle_connection_is_not_taken_for_a_silent_peer(ours: PeerProcess) -> None:
    with link(ours.host, ours.port, silence_s=0.5) as made, made.client() as client:
        vectors = Vectors(client)
        time.sleep(1.5)
        vectors.set(0, np.ones(64))
        assert vectors.get(0).all()
        assert [event["event"] for event in made.events] == ["connected"]


class FakePeer:
    """Accepts one link, agrees to it, and then does what the test says."""

    def __init__(self, then: Callable[[socket.socket], None], version: int = frames.VERSION) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.then = then
        self.version = version
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listening.accept()
            with sock:
                sock.settimeout(20)
                offer = Hello.unpack(sock.recv(frames.HELLO.size, socket.MSG_WAITALL))
                sock.sendall(Hello(self.version, offer.flags, offer.silence_ms).pack())
                self.then(sock)

    def close(self) -> None:
        self.listening.close()
        self.thread.join(5)


def test_a_device_that_never_finishes_is_named_by_its_keepalives() -> None:
    def busy(sock: socket.socket) -> None:
        for waited_ms in range(0, 5000, 500):
            sock.sendall(frames.LENGTH.pack(frames.Down.ALIVE, waited_ms))
        sock.recv(100)

    fake = FakePeer(busy)
    try:
        with link("127.0.0.1", fake.port, deadline_s=3.0) as made:
            with pytest.raises(PeerError):
                made.client()
            (fault,) = made.faults()
            assert fault["kind"] == "frozen" and "3.5 s" in fault["message"]
    finally:
        fake.close()


@pytest.mark.parametrize("answer", [b"\x00\0\0\0\0", frames.LENGTH.pack(frames.Down.HALF, 3)])
def test_a_peer_that_sends_nonsense_is_named(answer: bytes) -> None:
    fake = FakePeer(lambda sock: sock.sendall(answer))
    try:
        with link("127.0.0.1", fake.port) as made:
            with pytest.raises(PeerError):
                made.client()
            assert "frame" in made.faults()[0]["message"]
    finally:
        fake.close()


def test_no_version_in_common_is_told() -> None:
    fake = FakePeer(lambda sock: None, version=0)
    try:
        with link("127.0.0.1", fake.port) as made:
            with pytest.raises(PeerError):
                made.client()
            assert "version" in made.faults()[0]["message"]
    finally:
        fake.close()


def test_nobody_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with link("127.0.0.1", port) as made:
        with pytest.raises(PeerError):
            made.client()
        assert made.faults()[0]["kind"] == "unreachable"


@pytest.mark.parametrize("opening", [b"hydra" + bytes(27), Hello(version=0).pack(), Hello().pack() + b"\x03\0\0"])
def test_an_opening_that_is_none_ends_that_connection_only(ours: PeerProcess, opening: bytes) -> None:
    with socket.create_connection((ours.host, ours.port), timeout=10) as sock:
        sock.sendall(opening)
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(4096):
                got += piece
        if got[:8] == frames.MAGIC and opening[:8] == frames.MAGIC and len(opening) == 32:
            assert Hello.unpack(got[:32]).version == 0
    with Client(ours.host, ours.port) as after:
        assert after.device_count() == 1


def test_an_opening_is_checked() -> None:
    with pytest.raises(ProtocolError):
        Hello.unpack(bytes(32))
    assert frames.HELLO.size == 32 and frames.FIRST_BYTE == 0x68
    assert frames.agree(Hello(version=9, flags=0xFF, store_bytes=1 << 40)) == Hello(1, 3, store_bytes=64 << 20)


def test_bad_frames_end_the_connection_and_say_why(ours: PeerProcess) -> None:
    with socket.create_connection((ours.host, ours.port), timeout=10) as sock:
        sock.sendall(Hello().pack())
        assert Hello.unpack(sock.recv(32, socket.MSG_WAITALL)).version == 1
        sock.sendall(frames.SLOT.pack(frames.Up.SAME, 9))
        data = b""
        while piece := sock.recv(4096):
            data += piece
    kind, length = frames.LENGTH.unpack_from(data)
    assert kind == frames.Down.FAULT and b"slot 9" in data[5 : 5 + length]


def test_what_is_kept_counts_against_the_peers_budget() -> None:
    with start_peer(device="CPU", threads=1, max_inflight_bytes=100_000) as process:
        with socket.create_connection((process.host, process.port), timeout=10) as sock:
            sock.sendall(Hello().pack())
            sock.recv(32, socket.MSG_WAITALL)
            sock.sendall(frames.KEEP.pack(frames.Up.KEEP, 0, 200_000))
            kind, _ = frames.LENGTH.unpack(sock.recv(5, socket.MSG_WAITALL))
            assert kind == frames.Down.FAULT
        wait_for(lambda: get_json(process.port, "/health")["connections"] == 0)


def test_half_precision_for_activations_alone(ours: PeerProcess) -> None:
    values = np.linspace(-3, 3, 500, dtype=np.float32)
    with link(ours.host, ours.port, activations="f16") as made, made.client() as client:
        assert made.events[0]["activations"] == "f16"
        vectors = Vectors(client, n=500)

        def put(slot: int, name: bytes) -> None:
            client.send(messages.SetTensor(vectors.row(slot, name=name).tobytes(), 0, values.tobytes()))

        def take(slot: int, name: bytes) -> np.ndarray:
            row = vectors.row(slot, name=name).tobytes()
            return np.frombuffer(client.call(messages.GetTensor(row, 0, 2000)), dtype=np.float32)

        halves = values.astype(np.float16).astype(np.float32)
        assert not np.array_equal(halves, values)
        for _ in range(4):
            put(0, b"RPC0[127.0.0.1:1]#l_out-3#0")
            put(1, b"attn_inp_k_rot")
            assert np.array_equal(take(0, b"state"), halves), "the device has what float16 can say"
            assert np.array_equal(take(1, b"state"), values), "a matrix is no activation"
            assert np.array_equal(take(1, b"l_out-4"), halves), "results come back so"
        stats = made.forwarder.stats()
        assert stats["wire_bytes_down"] < stats["plain_bytes_down"]


def test_tls_on_both_ends(tmp_path: Path) -> None:
    init_certs(tmp_path, ["mini", "tower", "other"])
    with start_peer(device="CPU", threads=1, name="mini", tls_dir=str(tmp_path), tls_nodes=("tower",)) as process:
        with link(process.host, process.port, node="tower", tls_dir=str(tmp_path)) as made, made.client() as client:
            assert made.events[0]["mode"] == "link" and made.events[0]["tls"]
            secure = random_session(client, 4)
        with link(process.host, process.port, node="other", tls_dir=str(tmp_path)) as made:
            with pytest.raises(PeerError):
                made.client()
            assert made.faults()
        with link(process.host, process.port) as made:  # without TLS
            with pytest.raises(PeerError):
                made.client()
    with start_peer(device="CPU", threads=1) as process, Client(process.host, process.port) as direct:
        assert random_session(direct, 4) == secure


def test_the_process_tells_and_ends(ours: PeerProcess) -> None:
    events: list[dict[str, Any]] = []
    with start_link(LinkSettings("mini", ours.host, ours.port), events.append, quiet=True) as process:
        host, port = process.endpoint.split(":")
        with Client(host, int(port)) as client:
            assert client.device_count() == 1
            stats = process.stats()
            assert stats["connections"] == 1 and stats["plain_messages"] == 2
        process.process.send_signal(signal.SIGINT)  # Ctrl-C is the parent's to act on
        assert process.stats()["plain_messages"] == 2
    assert process.process.returncode == 0
    assert [event["event"] for event in events] == ["connected"]
    with pytest.raises(PeerError):
        process.stats()


def test_a_process_that_is_killed_is_told(ours: PeerProcess) -> None:
    events: list[dict[str, Any]] = []
    process = start_link(LinkSettings("mini", ours.host, ours.port), events.append, quiet=True)
    process.process.kill()
    wait_for(lambda: events)
    assert events[0]["kind"] == "ended"
    process.stop()


def test_a_link_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="missing"):
        start_link(LinkSettings("mini", "127.0.0.1", 1, node="tower", tls_dir=str(tmp_path)), quiet=True)
