"""What the doctor's tests share: peers with a known fault, and a look at the findings.

Knows the faults, not the checks. Only loopback; every thread and process is ended here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.doctor.finding import Finding
from hydra.peer.listener import Listener
from hydra.peer.settings import PeerSettings


def of(findings: Iterable[Finding], group: str, check: str = "") -> list[Finding]:
    """The findings of one group whose check contains the words."""
    return [finding for finding in findings if finding.group == group and check in finding.check]


def one(findings: Iterable[Finding], group: str, check: str = "") -> Finding:
    found = of(findings, group, check)
    assert len(found) == 1, found
    return found[0]


@contextlib.contextmanager
def listener(make_ready: Callable[[socket.socket], None] | None = None, **settings: Any) -> Iterator[Listener]:
    """A hydra peer whose listener runs in this process, by default as it is; make_ready: a faulty one."""
    table = PeerSettings(**{"port": 0, "devices": ("CPU",), "threads": 1, **settings})
    ready = threading.Event()
    options: dict[str, Any] = {} if make_ready is None else {"make_ready": make_ready}
    running = Listener(table, on_ready=lambda _: ready.set(), **options)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        assert ready.wait(60)
        yield running
    finally:
        running.stop()
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server on loopback, one thread a connection; yields its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    stop = threading.Event()
    listening.settimeout(0.05)

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(10)
            handle(sock)

    def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = listening.accept()
                threads.append(threading.Thread(target=serve, args=(sock,)))
                threads[-1].start()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        stop.set()
        thread.join(10)
        listening.close()
        for worker in threads:
            worker.join(15)


def answer(body: dict[str, Any], status: str = "200 OK", headers: str = "") -> Callable[[socket.socket], None]:
    """A handler that gives one JSON answer to whatever is asked."""

    def handle(sock: socket.socket) -> None:
        sock.recv(4096)
        data = json.dumps(body).encode()
        sock.sendall(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    return handle


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """A port whose SYNs the kernel drops, as a firewall would: a listener with its queue full and nobody accepting."""
    with socket.socket() as listening, contextlib.ExitStack() as held:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", port))
        yield port
