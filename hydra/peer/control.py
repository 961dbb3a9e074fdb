"""The peer's side channel: HTTP on the compute port, answered by two threads behind a queue of sixteen.

    /health    200 {"state": "ok"} or 503 {"state": "starting" | "degraded", "reason": …}
    /stats     messages and bytes by command, connections and their socket options, memory (JSON)
    /sockets   the options of this very connection, as the kernel has them
    /metrics   the same figures for Prometheus

A full queue answers 503 and nothing else waits for it: the compute path never comes through here. Requests are parsed
by the standard library's http.server; every one is bounded in time and answered with Connection: close.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from hydra.peer.sockets import read_options

THREADS = 2
QUEUE_LENGTH = 16
REQUEST_S = 5.0
VERBS = frozenset(b"GHPOD")  # first bytes of GET, HEAD, POST/PUT, OPTIONS, DELETE

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Source(Protocol):
    """Where the answers come from: the listener."""

    def health(self) -> dict[str, Any]: ...

    def stats(self) -> dict[str, Any]: ...


class _Handler(BaseHTTPRequestHandler):
    server_version = "hydra-peer"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S

    def __init__(self, sock: socket.socket, address: tuple[str, int], source: Source) -> None:
        self.source = source
        super().__init__(sock, address, None)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.close_connection = True
        path = self.path.split("?")[0]
        if path == "/health":
            health = self.source.health()
            self._json(200 if health["state"] == "ok" else 503, health)
        elif path == "/stats":
            self._json(200, self.source.stats())
        elif path == "/sockets":
            self._json(200, {"options": read_options(self.connection)})
        elif path == "/metrics":
            self._reply(200, "text/plain; version=0.0.4; charset=utf-8", metrics(self.source).encode())
        else:
            self._json(404, {"error": f"There is no {path}; there are /health, /stats, /sockets and /metrics."})

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._reply(status, "application/json", json.dumps(body).encode() + b"\n")

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # a health check every few seconds is no news


def metrics(source: Source) -> str:
    """The figures of /stats and /health in Prometheus' text format."""
    health, stats = source.health(), source.stats()
    lines = [
        "# TYPE hydra_peer_up gauge",
        f"hydra_peer_up {int(health['state'] == 'ok')}",
        "# TYPE hydra_peer_worker_restarts_total counter",
        f"hydra_peer_worker_restarts_total {health['restarts']}",
        "# TYPE hydra_peer_connections gauge",
        f"hydra_peer_connections {len(stats.get('connections', []))}",
    ]
    for field, kind in (("count", "messages"), ("bytes_in", "received_bytes"), ("bytes_out", "sent_bytes")):
        lines.append(f"# TYPE hydra_peer_{kind}_total counter")
        for command, row in stats.get("commands", {}).items():
            lines.append(f'hydra_peer_{kind}_total{{command="{command}"}} {int(row[field])}')
    return "\n".join(lines) + "\n"


class ControlPool:
    """Answers HTTP connections; ``submit`` never blocks."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._queue: queue.Queue[tuple[socket.socket, tuple[str, int]] | None] = queue.Queue(QUEUE_LENGTH)
        self._threads = [threading.Thread(target=self._work, name=f"control {n}", daemon=True) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def submit(self, sock: socket.socket, address: tuple[str, int]) -> bool:
        """Takes the connection over; False (and a 503 sent) when sixteen are waiting."""
        try:
            self._queue.put_nowait((sock, address))
            return True
        except queue.Full:
            try:
                sock.send(_BUSY, socket.MSG_DONTWAIT)
            except OSError:
                pass  # it does not even take a refusal
            sock.close()
            return False

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            sock, address = item
            try:
                sock.settimeout(REQUEST_S)
                _Handler(sock, address, self.source)
            except OSError:
                pass  # it went away
            finally:
                sock.close()

    def close(self) -> None:
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=REQUEST_S)
            except queue.Full:
                return  # daemon threads; the process is ending
