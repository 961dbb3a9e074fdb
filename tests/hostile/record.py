"""A recording proxy between a stock ggml-RPC client and a server: what a real head says, byte for byte.

Forwards both directions unchanged and keeps every request of every connection with the reply it got. Knows the framing
(hydra.rpc.wire) and nothing of what the messages mean. Used to make the fixtures of tests/data/graphs and to give the
fuzzer real sessions to mutate.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

from hydra.rpc import wire


@dataclass
class Session:
    """One connection: its requests in order, and the replies (None for a command without one)."""

    requests: list[tuple[int, bytes]] = field(default_factory=list)
    replies: list[bytes | None] = field(default_factory=list)


class Recorder:
    """Listens on loopback and forwards to ``target``; ``sessions`` fills as connections come. Use with ``with``.

    max_payload: requests longer than this are forwarded whole but kept only up to here.
    """

    def __init__(self, target: tuple[str, int], max_payload: int = 32 << 20) -> None:
        self._target = target
        self._max_payload = max_payload
        self.sessions: list[Session] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            session = Session()
            self.sessions.append(session)
            server = socket.create_connection(self._target)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked: list[int] = []
            for pump in (self._requests, self._replies):
                thread = threading.Thread(target=pump, args=(client, server, session, asked), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _requests(self, client: socket.socket, server: socket.socket, session: Session, asked: list[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = _exactly(client, wire.HEADER.size)
                cmd, size = wire.HEADER.unpack(header)
                payload = _exactly(client, size)
                session.requests.append((cmd, payload[: self._max_payload]))
                session.replies.append(None)
                if cmd in wire.REPLY_SIZES:
                    asked.append(len(session.requests) - 1)
                server.sendall(header + payload)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _replies(self, client: socket.socket, server: socket.socket, session: Session, asked: list[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                header = _exactly(server, wire.SIZE.size)
                payload = _exactly(server, wire.SIZE.unpack(header)[0])
                session.replies[asked.pop(0)] = payload[: self._max_payload]
                client.sendall(header + payload)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)
