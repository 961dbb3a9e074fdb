"""The peer's front: socket options by construction, who is let in, what silence and noise get, a worker that dies."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import hydra
from hydra.errors import DeviceError, HydraError, PeerError
from hydra.peer import listener as listening
from hydra.peer import sockets
from hydra.peer.launch import start_peer
from hydra.peer.listener import Listener
from hydra.peer.ratelog import RateLimitedLog
from hydra.peer.settings import PeerSettings
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.connection import pack_request
from hydra.rpc.wire import Command
from hydra.security import client_context, connect, init_certs, load_identity
from tests.peer_tools import NODE, OP_ADD, Vectors, get_json


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {condition}")
        time.sleep(0.02)


@contextlib.contextmanager
def listener(**settings: object) -> Iterator[Listener]:
    """A Listener in this process (its worker is a process of its own), so that a test sees the server's own sockets."""
    table = PeerSettings(port=0, devices=("CPU",), threads=1, **settings)  # type: ignore[arg-type]
    ready = threading.Event()
    running = Listener(table, on_ready=lambda _: ready.set())
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        assert ready.wait(30)
        yield running
    finally:
        running.stop()
        thread.join(20)
        assert not thread.is_alive()


def test_options_are_set_before_the_first_byte() -> None:
    with listener() as running:
        plain = socket.socket()
        assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0  # the fault is really present by default
        plain.connect(("127.0.0.1", running.port))
        wait_for(lambda: running._waiting)
        (waiting,) = running._waiting.values()
        options = sockets.read_options(waiting.sock)
        assert options["nodelay"] == 1 and options["keepalive"] == 1
        plain.close()


def test_options_on_every_path() -> None:
    with listener() as running:
        with Client("127.0.0.1", running.port):
            wait_for(lambda: get_json(running.port, "/stats")["connections"])
            (connection,) = get_json(running.port, "/stats")["connections"]
        assert connection["options"]["nodelay"] == 1 and connection["options"]["keepalive"] == 1
        options = get_json(running.port, "/sockets")["options"]
        assert options["nodelay"] == 1 and options["keepalive"] == 1


def test_one_place_accepts() -> None:
    """No module but the listener takes a TCP connection in: a second accept loop is how the bug came in."""
    places = []
    for path in Path(hydra.__file__).parent.rglob("*.py"):
        if path.parts[-2] in ("bench", "link"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "accept":
                places.append(path.name)
    assert places == ["listener.py"]


def test_a_silent_connection_is_closed_in_time_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with listener(first_byte_s=0.3) as running, caplog.at_level(logging.WARNING, "hydra.peer"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as silent:
            assert silent.recv(1) == b""
        wait_for(lambda: "no byte within 0.3 s" in caplog.text)
        assert get_json(running.port, "/health")["state"] == "ok"


@pytest.mark.parametrize("first", [b"\x00", b"\x80\x03", b"\xff" * 50])
def test_noise_is_closed_and_logged(first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with listener() as running, caplog.at_level(logging.WARNING, "hydra.peer"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as noise:
            noise.sendall(first)
            with contextlib.suppress(ConnectionResetError):
                assert noise.recv(1) == b""
        wait_for(lambda: "neither ggml-RPC nor HTTP" in caplog.text)


def test_a_started_message_must_end() -> None:
    with start_peer(device="CPU", threads=1, hello_s=0.4, message_s=0.4) as process:
        with socket.create_connection(("127.0.0.1", process.port), timeout=10) as slow:
            slow.sendall(bytes([Command.HELLO]))
            assert slow.recv(1) == b""
        with Client("127.0.0.1", process.port) as connection:
            connection.socket.sendall(wire.HEADER.pack(Command.GET_ALIGNMENT, 4) + b"\0")
            assert connection.socket.recv(1) == b""
        with Client("127.0.0.1", process.port) as idle:
            time.sleep(1.2)  # between messages it may stay as long as it likes
            assert idle.device_count() == 1


def test_one_connection_too_many_is_refused_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with listener(max_connections=2) as running:
        with Client("127.0.0.1", running.port), Client("127.0.0.1", running.port):
            with pytest.raises(PeerError, match="closed|went away"):
                Client("127.0.0.1", running.port)
            wait_for(lambda: "2 heads are connected already" in caplog.text)
        wait_for(lambda: not running._active)
        with Client("127.0.0.1", running.port) as again:
            assert again.device_count() == 1


def test_only_nodes_may_connect() -> None:
    running = Listener(PeerSettings(allow=("192.0.2.7", "2001:db8::1")))
    for address, allowed in (
        ("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("192.0.2.7", True), ("::ffff:192.0.2.7", True),
        ("2001:db8::1", True), ("192.0.2.8", False), ("10.0.0.1", False), ("fe80::1%eth0", False),
    ):  # fmt: skip
        assert running._may_connect(address) is allowed, address


def test_a_taken_port_is_one_clear_error() -> None:
    with listener() as running, pytest.raises(PeerError, match="cannot be listened on"):
        Listener(PeerSettings(port=running.port)).run()


def test_an_unknown_device_ends_the_start_with_its_name() -> None:
    with pytest.raises(HydraError, match="no device CUDA7; this box has CPU"):
        Listener(PeerSettings(port=0, devices=("CUDA7",))).run()


def test_the_http_side() -> None:
    with start_peer(device="CPU", threads=1, name="mini") as process:
        health = get_json(process.port, "/health")
        assert health["state"] == "ok" and health["name"] == "mini" and health["devices"][0]["name"] == "CPU"
        device = health["devices"][0]
        assert 0 < device["memory_used"] < device["memory_total"] and "temperature" in device
        assert "error" in get_json(process.port, "/nothing")
        with socket.create_connection(("127.0.0.1", process.port), timeout=10) as raw:
            raw.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
        assert "hydra_peer_up 1" in text and "# TYPE hydra_peer_messages_total counter" in text


def test_a_full_control_queue_answers_503_and_computing_goes_on() -> None:
    with listener() as running:
        lazy = [socket.create_connection(("127.0.0.1", running.port), timeout=10) for _ in range(40)]
        try:
            for sock in lazy:
                sock.sendall(b"GET ")  # never finished: two are being read, sixteen wait, the rest is refused
            replies = []
            for sock in lazy:
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    replies.append(sock.recv(100))
            assert sum(b"503" in reply for reply in replies) >= 20
            with Client("127.0.0.1", running.port) as connection:
                vectors = Vectors(connection)
                vectors.set(0, np.ones(64))
                vectors.add(1, 0, 0)
                assert vectors.get(1)[0] == 2
        finally:
            for sock in lazy:
                sock.close()


def ended(vectors: Vectors) -> bool:
    try:
        vectors.get(0)
    except PeerError:
        return True
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_worker_that_dies_is_replaced(how: signal.Signals) -> None:
    with start_peer(device="CPU", threads=1) as process:
        victim = Client("127.0.0.1", process.port)
        vectors = Vectors(victim)
        vectors.set(0, np.ones(64))
        assert vectors.get(0).all()
        os.kill(process.worker_pid, how)
        wait_for(lambda: ended(vectors))
        victim.close()
        wait_for(lambda: get_json(process.port, "/health")["state"] == "degraded", 5)
        assert how.name in get_json(process.port, "/health")["reason"]
        # a head that comes meanwhile waits, and is served
        with Client("127.0.0.1", process.port, timeout_s=20) as after:
            again = Vectors(after)
            again.set(0, np.full(64, 2.0))
            again.add(1, 0, 0)
            assert again.get(1)[0] == 4
        health = get_json(process.port, "/health")
        assert health["state"] == "ok" and health["restarts"] == 1 and health["worker_pid"] != process.worker_pid
        children = psutil.Process(process.pid).children()
        assert [child.status() for child in children if child.status() == psutil.STATUS_ZOMBIE] == []
        assert len(children) == 1


def test_stopping_leaves_nothing() -> None:
    process = start_peer(device="CPU", threads=1)
    with Client("127.0.0.1", process.port):
        assert process.stop() == 0
    assert not psutil.pid_exists(process.worker_pid)
    with socket.create_server(("127.0.0.1", process.port)):
        pass  # the port is free


def figures(pid: int) -> tuple[int, int, int]:
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def unfinished(vectors: Vectors) -> dict[str, bytes]:
    """A whole message of each command, by name."""
    tensor, other = vectors.row(0).tobytes(), vectors.row(1).tobytes()
    quantised = messages.tensor_bytes(id=1, type=8, ne=(64, 2, 1, 1), nb=(34, 68, 136, 136))
    placed = messages.tensor_bytes(
        id=1, type=8, ne=(64, 2, 1, 1), nb=(34, 68, 136, 136), buffer=vectors.handle, data=vectors.base
    )
    rows = np.concatenate([vectors.row(0), vectors.op(1, OP_ADD, 0, 0)])
    requests: list[Any] = [
        messages.AllocBuffer(0, 1 << 20),
        *(messages.DeviceRequest(c) for c in (Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY)),
        messages.BufferRequest(Command.BUFFER_GET_BASE, vectors.handle),
        messages.BufferRequest(Command.FREE_BUFFER, vectors.handle),
        messages.BufferClear(vectors.handle, 1),
        messages.SetTensor(tensor, 0, bytes(vectors.bytes)),
        messages.SetTensorHash(tensor, 0, 1),
        messages.GetTensor(tensor, 0, vectors.bytes),
        messages.CopyTensor(tensor, other),
        messages.GraphCompute(0, [1 + NODE], rows),
        messages.DeviceRequest(Command.GRAPH_RECOMPUTE),
        messages.InitTensor(placed),
        messages.GetAllocSize(0, quantised),
        messages.MemsetTensor(tensor, 0, 8, 1),
    ]
    return {r.command.name: pack_request(r.command, r.pack()) for r in requests} | {
        "DEVICE_COUNT": pack_request(Command.DEVICE_COUNT)
    }


def vanish(port: int, number: int) -> str:
    """A session that allocates and computes, then ends in one of three ways in the middle of a command: its name."""
    how = ("close", "reset", "kill")[number % 3]
    if how == "kill":
        child = os.fork()
        if child == 0:  # holds the connection until it is killed; nothing of the test's own may run on in here
            with contextlib.suppress(BaseException):
                held = Client("127.0.0.1", port)
                leave_unfinished(held, number)
                time.sleep(60)
            os._exit(1)
        wait_for(lambda: any(c["buffer_bytes"] for c in get_json(port, "/stats")["connections"]))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return how
    connection = Client("127.0.0.1", port)
    name = leave_unfinished(connection, number)
    if how == "reset":
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return name


def leave_unfinished(connection: Client, number: int) -> str:
    vectors = Vectors(connection, n=1 << 16)
    vectors.set(0, np.ones(vectors.n))
    vectors.add(1, 0, 0)
    name, message = list(unfinished(vectors).items())[number % 17]
    cut = (1, 8, 9, len(message) // 2, len(message) - 1)[number % 5]
    connection.socket.sendall(message[:cut])
    return name


@pytest.mark.timeout(300)
def test_200_vanished_heads_leave_nothing_behind() -> None:
    with start_peer(device="CPU", threads=1) as process:
        commands = set()

        def rounds(first: int, count: int) -> None:
            for number in range(first, first + count):
                commands.add(vanish(process.port, number))
            wait_for(lambda: not get_json(process.port, "/stats")["connections"])
            time.sleep(0.2)

        rounds(0, 51)
        listener_before, worker_before = figures(process.pid), figures(process.worker_pid)
        rounds(51, 200)
        listener_after, worker_after = figures(process.pid), figures(process.worker_pid)
        assert commands == {c.name for c in Command} - {"HELLO"} | {"kill"}
        assert get_json(process.port, "/health")["restarts"] == 0
        for before, after in ((listener_before, listener_after), (worker_before, worker_after)):
            assert after[0] - before[0] < 8 << 20, "memory"
            assert after[1:] == before[1:], "descriptors, threads"


def test_5000_steps_of_changing_shapes_are_flat() -> None:
    with start_peer(device="CPU", threads=1) as process, Client("127.0.0.1", process.port, timeout_s=60) as connection:
        vectors = Vectors(connection, n=1 << 14)
        vectors.set(0, np.ones(vectors.n))

        def steps(first: int, count: int) -> None:
            for step in range(first, first + count):
                width = 16 + step % 977
                rows = [
                    vectors.row(0, ne=(width, 1, 1, 1), nb=(4, 4 * width, 4 * width, 4 * width)),
                    vectors.op(1, 2, 0, 0, ne=(width, 1, 1, 1), nb=(4, 4 * width, 4 * width, 4 * width)),
                ]
                vectors.compute([1], rows)
            vectors.get(1)

        steps(0, 1500)
        before = figures(process.worker_pid)
        steps(1500, 3500)
        after = figures(process.worker_pid)
        assert after[0] - before[0] < 4 << 20 and after[1:] == before[1:]


def test_a_flood_of_bad_connections_is_few_lines() -> None:
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("test.flood")
    logger.addHandler(Collect())
    log = RateLimitedLog(logger, interval_s=0.2)
    for _ in range(1000):
        log.report("192.0.2.1", "noise", "bad")
    log.report("192.0.2.2", "noise", "bad")
    assert len(lines) == 2
    time.sleep(0.25)
    log.report("192.0.2.1", "noise", "bad")
    assert len(lines) == 3 and "999 more" in lines[2]
    lines.clear()
    log = RateLimitedLog(logger, interval_s=60)
    for number in range(5000):
        log.report(f"source {number}", "noise", "bad")
    assert len(lines) < 1100


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two unrelated CAs, each with files for the nodes desk and mini."""
    folders = (tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("others"))
    for folder in folders:
        init_certs(folder, ["desk", "mini"])
    return folders


def encrypted(port: int, folder: Path, node: str = "desk") -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    wrapped = connect(plain, client_context(load_identity(folder, node)), "mini")
    wrapped.settimeout(10)
    return wrapped


def test_tls_serves_heads_and_health_alike(certificates: tuple[Path, Path]) -> None:
    with listener(name="mini", tls_dir=str(certificates[0]), tls_nodes=("desk", "mini")) as running:
        with Client("127.0.0.1", running.port, hello=False) as client:
            client.socket.close()
            client.socket = encrypted(running.port, certificates[0])
            assert client.hello() == wire.PROTOCOL_VERSION
            vectors = Vectors(client, n=1 << 18)  # a megabyte: many TLS records
            values = np.arange(vectors.n, dtype=np.float32)
            vectors.set(0, values)
            vectors.add(1, 0, 0)
            assert np.array_equal(vectors.get(1), values + values)
            (tunnel,) = get_json(running.port, "/stats")["tls"]  # plain HTTP is for this box alone
            assert tunnel["node"] == "desk"
            assert tunnel["options"]["nodelay"] == 1 and tunnel["options"]["keepalive"] == 1
        with encrypted(running.port, certificates[0]) as http:
            http.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b'"state": "ok"' in b"".join(iter(lambda: http.recv(65536), b""))


def test_tls_refuses_and_says_which(certificates: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    ours, others = certificates
    with listener(name="mini", tls_dir=str(ours), tls_nodes=("mini",)) as running:
        with pytest.raises(PeerError):
            Client("127.0.0.1", running.port)
        wait_for(lambda: "does not speak TLS, and security.tls is on here" in caplog.text)
        with pytest.raises(PeerError):
            encrypted(running.port, others)
        wait_for(lambda: "does not know this box's CA" in caplog.text)
        with contextlib.suppress(OSError, PeerError), encrypted(running.port, ours) as wrong_node:
            assert wrong_node.recv(1) == b""
        wait_for(lambda: "'desk'; expected mini" in caplog.text)
        assert get_json(running.port, "/health")["state"] == "ok"
    with listener() as plain:
        with pytest.raises(PeerError):
            encrypted(plain.port, ours)
        wait_for(lambda: "speaks TLS, and security.tls is off here" in caplog.text)


def test_a_worker_that_never_gets_ready_ends_the_peer(monkeypatch) -> None:
    """libggml or a driver that aborts at once: a few tries, then an error, and not a worker a minute for ever."""
    monkeypatch.setattr(listening, "worker_command", lambda _fd: [sys.executable, "-c", "import os; os.abort()"])
    running = Listener(PeerSettings(port=0, devices=("CPU",), threads=1))
    running._backoff = 0.01
    with pytest.raises(DeviceError, match=r"ended by SIGABRT, 3 times in a row before it was ready"):
        running.run()
    assert running.restarts == 3


SIGNALLED_ELSEWHERE = """
import os, signal, sys, threading, time
from hydra.peer.listener import serve
from hydra.peer.settings import PeerSettings

def to_itself():
    time.sleep(0.5)  # the main loop sleeps by then, for an hour
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

serve(PeerSettings(port=0, devices=("CPU",), threads=1),
      on_ready=lambda _: threading.Thread(target=to_itself).start())
"""


def test_a_signal_that_another_thread_gets_ends_the_peer_too() -> None:
    """As happens when the main thread has just been stopped and continued; Python's handlers run in the main thread."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED_ELSEWHERE], timeout=60, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
