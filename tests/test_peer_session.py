"""Every command of ggml-RPC 7.0 on a real peer, with the stock server under the same test where both must agree."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hydra.bench.stock import StockServer
from hydra.errors import PeerError, VersionMismatch
from hydra.peer.launch import start_peer
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command
from tests.peer_tools import NODE, OP_ADD, OP_MUL, Vectors, get_json, peer


@pytest.fixture(scope="module", params=["hydra", "stock"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    with peer(request.param) as where:
        yield where


@pytest.fixture(scope="module")
def ours() -> Iterator[tuple[str, int]]:
    with peer("hydra") as where:
        yield where


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[Client]:
    with Client(*address) as connection:
        yield connection


def test_devices(client: Client) -> None:
    assert client.version == wire.PROTOCOL_VERSION
    assert client.device_count() == 1
    free, total = client.device_memory()
    assert 0 < free <= total
    (alignment,) = wire.U64.unpack(client.call(messages.DeviceRequest(Command.GET_ALIGNMENT)))
    assert alignment in (16, 32, 64, 128, 256)
    (max_size,) = wire.U64.unpack(client.call(messages.DeviceRequest(Command.GET_MAX_SIZE)))
    assert max_size >= 1 << 30


def test_bytes_go_in_and_come_out(client: Client) -> None:
    vectors = Vectors(client, n=1000)
    values = np.arange(1000, dtype=np.float32)
    vectors.set(3, values)
    assert np.array_equal(vectors.get(3), values)
    part = client.call(messages.GetTensor(vectors.row(3).tobytes(), 40, 8))
    assert part == values[10:12].tobytes()
    client.send(messages.SetTensor(vectors.row(3).tobytes(), 40, b"\0" * 8))
    values[10:12] = 0
    assert np.array_equal(vectors.get(3), values)


def test_clear_memset_copy(client: Client) -> None:
    vectors = Vectors(client)
    client.send(messages.BufferClear(vectors.handle, 0))
    assert not vectors.get(0).any()
    vectors.set(0, np.arange(64))
    assert client.call(messages.CopyTensor(vectors.row(0).tobytes(), vectors.row(1).tobytes())) == b"\1"
    assert np.array_equal(vectors.get(1), np.arange(64, dtype=np.float32))
    client.send(messages.MemsetTensor(vectors.row(1).tobytes(), 4, 8, 0))
    assert vectors.get(1)[:4].tolist() == [0, 0, 0, 3]


def test_a_graph_and_again(client: Client) -> None:
    vectors = Vectors(client)
    vectors.set(0, np.arange(64))
    vectors.set(1, np.full(64, 0.5))
    # (a + b) * a, the sum used once
    rows = [
        vectors.row(0),
        vectors.row(1),
        vectors.op(2, OP_ADD, 0, 1, use_count=1),
        vectors.op(3, OP_MUL, 2 + NODE, 0),
    ]
    vectors.compute([2, 3], rows)
    a = np.arange(64, dtype=np.float32)
    assert np.array_equal(vectors.get(3), (a + 0.5) * a)
    vectors.set(1, np.zeros(64))
    vectors.recompute()
    assert np.array_equal(vectors.get(3), a * a)


def test_a_chain_of_graphs_reads_what_the_one_before_wrote(client: Client) -> None:
    """Order on the stream: a set, a graph or a get that overtook another would give another sum."""
    vectors = Vectors(client, n=1 << 16)
    vectors.set(0, np.zeros(vectors.n))
    total = 0.0
    for step in range(1, 60):
        vectors.set(1, np.full(vectors.n, float(step)))
        vectors.add(0, 0, 1)
        total += step
        vectors.set(1, np.full(vectors.n, 1e6))  # must not reach the graph before it
    result = vectors.get(0)
    assert result[0] == total and (result == total).all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_set_never_overtakes_a_running_graph_on_a_gpu() -> None:
    """Graphs of some milliseconds are queued, their inputs overwritten right behind: one set too early, another sum."""
    with start_peer(device="auto") as process, Client(process.host, process.port, timeout_s=60) as connection:
        assert get_json(process.port, "/health")["devices"][0]["kind"] == "gpu"
        vectors = Vectors(connection, n=1 << 22)
        vectors.set(0, np.zeros(vectors.n))
        chain = [vectors.row(0), vectors.row(1), vectors.op(0, OP_ADD, 0, 1, id=2 * NODE, use_count=1)]
        for k in range(99):
            chain.append(vectors.op(0, OP_ADD, 2 * NODE + k, 1, id=2 * NODE + k + 1, use_count=int(k < 98)))
        rows = np.concatenate(chain)
        total = 0.0
        for step in range(1, 31):
            vectors.set(1, np.full(vectors.n, float(step)))
            connection.send(messages.GraphCompute(0, [2 * NODE + k for k in range(100)], rows))
            total += 100 * step
            vectors.set(1, np.full(vectors.n, 1e6))
        assert (vectors.get(0) == total).all()


def test_alloc_size_and_init(client: Client) -> None:
    vectors = Vectors(client)
    q8 = messages.tensor_bytes(id=1, type=8, ne=(64, 2, 1, 1), nb=(34, 68, 136, 136))
    (size,) = wire.U64.unpack(client.call(messages.GetAllocSize(0, q8)))
    assert size >= 136
    placed = messages.tensor_bytes(
        id=1, type=8, ne=(64, 2, 1, 1), nb=(34, 68, 136, 136), buffer=vectors.handle, data=vectors.base
    )
    client.send(messages.InitTensor(placed))
    assert client.device_count() == 1  # still served


def test_no_room_is_an_answer_and_not_an_end(client: Client) -> None:
    assert client.alloc(1 << 62) == (0, 0)
    assert client.alloc(0)[1] == 0
    assert client.device_count() == 1


def test_hash_is_not_found_without_a_cache(client: Client) -> None:
    vectors = Vectors(client)
    assert client.call(messages.SetTensorHash(vectors.row(0).tobytes(), 0, 12345)) == b"\0"


def test_replies_equal_the_stock_servers() -> None:
    """A recorded list of requests: what both answer must be equal byte for byte, but for handles and free memory."""
    replies = []
    for kind in ("stock", "hydra"):
        with peer(kind) as where, Client(*where) as connection:
            vectors = Vectors(connection)
            vectors.set(0, np.linspace(-1, 1, 64))
            vectors.set(1, np.linspace(0, 3, 64))
            vectors.compute(
                [2, 3],
                [
                    vectors.row(0),
                    vectors.row(1),
                    vectors.op(2, OP_MUL, 0, 1, use_count=1),
                    vectors.op(3, OP_ADD, 2 + NODE, 0),
                ],
            )
            q4 = messages.tensor_bytes(id=1, type=2, ne=(96, 3, 1, 1), nb=(18, 54, 162, 162))
            replies.append(
                [
                    connection.version,
                    connection.device_count(),
                    connection.call(messages.DeviceRequest(Command.GET_ALIGNMENT)),
                    connection.call(messages.DeviceRequest(Command.GET_MAX_SIZE)),
                    vectors.size,
                    vectors.get(2).tobytes(),
                    vectors.get(3).tobytes(),
                    connection.call(messages.GetAllocSize(0, q4)),
                    connection.call(messages.CopyTensor(vectors.row(3).tobytes(), vectors.row(4).tobytes())),
                    vectors.get(4).tobytes(),
                    connection.call(messages.SetTensorHash(vectors.row(0).tobytes(), 0, 1)),
                ]
            )
    assert replies[0] == replies[1]


def test_many_messages_in_one_segment_and_one_byte_at_a_time(ours: tuple[str, int]) -> None:
    with Client(*ours) as connection:
        vectors = Vectors(connection)
        burst = b"".join(
            bytes([Command.SET_TENSOR]) + wire.SIZE.pack(len(body)) + body
            for body in (
                messages.SetTensor(vectors.row(k % 8).tobytes(), 0, np.full(64, k, dtype=np.float32).tobytes()).pack()
                for k in range(500)
            )
        )
        connection.socket.sendall(burst)
        assert vectors.get(3)[0] == 499 - (499 - 3) % 8
        for byte in burst[:700]:
            connection.socket.sendall(bytes([byte]))
        connection.socket.sendall(burst[700:])
        assert vectors.get(3)[0] == 499 - (499 - 3) % 8


def test_large_payloads_in_odd_pieces(ours: tuple[str, int]) -> None:
    """20 MB in pieces that fit no boundary of ours, small messages right behind."""
    with Client(*ours, timeout_s=20) as connection:
        vectors = Vectors(connection, n=5_000_000, slots=2)
        values = np.random.default_rng(1).random(vectors.n, dtype=np.float32)
        body = messages.SetTensor(vectors.row(1).tobytes(), 0, values.tobytes()).pack()
        stream = bytes([Command.SET_TENSOR]) + wire.SIZE.pack(len(body)) + body
        for start in range(0, len(stream), 777_777):
            connection.socket.sendall(stream[start : start + 777_777])
        assert np.array_equal(vectors.get(1), values)
        vectors.add(0, 1, 1)
        assert np.array_equal(vectors.get(0), values + values)


def test_handles_of_another_connection_are_unknown(ours: tuple[str, int]) -> None:
    with Client(*ours) as first, Client(*ours) as second:
        mine, theirs = Vectors(first), Vectors(second)
        assert mine.handle != theirs.handle and abs(mine.base - theirs.base) > 1 << 20
        second.send(messages.BufferRequest(Command.FREE_BUFFER, mine.handle))
        with pytest.raises(PeerError):
            second.device_count()
        mine.set(0, np.ones(64))
        assert mine.get(0).all()


def test_no_reply_carries_an_address_of_the_worker() -> None:
    with start_peer(device="CPU", threads=1) as process, Client(process.host, process.port) as connection:
        received = bytearray()
        receive = connection._exactly

        def record(size: int) -> bytes:
            data = receive(size)
            received.extend(data)
            return data

        connection._exactly = record  # type: ignore[method-assign]
        vectors = Vectors(connection)
        vectors.set(0, np.zeros(64))
        vectors.add(1, 0, 0)
        vectors.get(1)
        connection.device_memory()
        connection.call(messages.GetAllocSize(0, vectors.row(0).tobytes()))
        ranges = []
        with open(f"/proc/{process.worker_pid}/maps", encoding="utf-8") as maps:
            for line in maps:
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                ranges.append((low, high))
        words = {int.from_bytes(received[at : at + 8], "little") for at in range(len(received) - 7)}
        # Small numbers are sizes; no mapping of a 64-bit process lies below 1 MiB.
        leaked = [hex(word) for word in words if word > 1 << 20 and any(low <= word < high for low, high in ranges)]
        assert vectors.base in words and leaked == []


def test_freed_buffers_take_their_graphs_along(ours: tuple[str, int]) -> None:
    with Client(*ours) as connection:
        vectors, other = Vectors(connection), Vectors(connection)
        vectors.set(0, np.ones(64))
        vectors.add(1, 0, 0)
        connection.send(messages.BufferRequest(Command.FREE_BUFFER, other.handle))
        vectors.recompute()
        with pytest.raises(PeerError):
            vectors.get(1)


def test_version_6_is_told_and_the_next_client_served(ours: tuple[str, int]) -> None:
    # protocol 6 had a HELLO without payload
    with socket.create_connection(ours, timeout=5) as old:
        old.sendall(wire.HEADER.pack(Command.HELLO, 0))
        assert old.recv(1) == b""
    with Client(*ours) as connection:
        assert connection.device_count() == 1


def test_a_client_closing_in_mid_message_harms_nobody(ours: tuple[str, int]) -> None:
    for cut in (1, 5, 9, 20, 33, 100, 300, 350):
        connection = Client(*ours)
        vectors = Vectors(connection)
        body = messages.SetTensor(vectors.row(0).tobytes(), 0, bytes(256)).pack()
        connection.socket.sendall((bytes([Command.SET_TENSOR]) + wire.SIZE.pack(len(body)) + body)[:cut])
        connection.close()
    with Client(*ours) as after:
        vectors = Vectors(after)
        vectors.set(0, np.ones(64))
        vectors.add(1, 0, 0)
        assert vectors.get(1)[0] == 2


def test_two_heads_at_once_each_with_its_own(ours: tuple[str, int]) -> None:
    """Connections on one device share no buffer and no order: each sees its own sums, whatever the other does."""
    results: dict[int, bool] = {}

    def head(number: int) -> None:
        with Client(*ours, timeout_s=30) as connection:
            vectors = Vectors(connection, n=4096)
            vectors.set(0, np.zeros(4096))
            vectors.set(1, np.full(4096, number))
            vectors.add(0, 0, 1)
            for _ in range(199):
                vectors.recompute()
            results[number] = bool((vectors.get(0) == 200 * number).all())

    threads = [threading.Thread(target=head, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {1: True, 2: True, 3: True}


def test_a_peer_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with StockServer() as server:
        monkeypatch.setattr(wire, "PROTOCOL_VERSION", (8, 0, 0))
        with pytest.raises(VersionMismatch, match=r"speaks ggml-RPC 7\.0; this side needs 8\.0"):
            Client(server.host, server.port)


def test_counters_of_what_went_over_the_wire() -> None:
    with start_peer(device="CPU", threads=1, timings=True) as process:
        with Client(process.host, process.port) as connection:
            vectors = Vectors(connection)
            for _ in range(10):
                vectors.set(0, np.ones(64))
            vectors.get(0)
            commands = get_json(process.port, "/stats")["commands"]
        assert commands["SET_TENSOR"]["count"] == 10
        assert commands["SET_TENSOR"]["bytes_in"] == 10 * (9 + 305 + 256)
        assert commands["GET_TENSOR"]["bytes_out"] == 8 + 256
        assert commands["SET_TENSOR"]["p50_us"] > 0
