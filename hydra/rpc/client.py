"""A small blocking ggml-RPC client: ask a peer, stock or ours, and be told clearly why it does not answer.

For the doctor, the head's probes, the benchmarks and the tests; inference goes through llama.cpp's own client. One
request at a time, every wait bounded by ``timeout_s``. Knows nothing of libggml.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Protocol

from hydra.errors import PeerError, PeerUnreachable, ProtocolError, VersionMismatch
from hydra.rpc import messages, wire
from hydra.rpc.connection import pack_request
from hydra.rpc.wire import Command


class _Packable(Protocol):
    @property
    def command(self) -> Command: ...

    def pack(self) -> bytes: ...


class Client:
    """One connection to a peer, after HELLO.

    Raises: PeerUnreachable when nothing answers, VersionMismatch when another protocol version does, ProtocolError
    when the answer is not one.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float = 5.0, hello: bool = True) -> None:
        self.address = f"{host}:{port}"
        try:
            self.socket = socket.create_connection((host, port), timeout=timeout_s)
        except TimeoutError as exc:
            raise PeerUnreachable(
                f"No answer from {self.address} within {timeout_s:g} s.",
                "Check that the box is on and that its firewall lets this port through.",
            ) from exc
        except ConnectionRefusedError as exc:
            raise PeerUnreachable(
                f"{self.address} refuses the connection: nothing listens there.", "Start `hydra up` on that box."
            ) from exc
        except socket.gaierror as exc:
            raise PeerUnreachable(
                f"The name {host} cannot be resolved.",
                "Use the box's IP address in hydra.toml, or mend the name service.",
            ) from exc
        except OSError as exc:
            raise PeerUnreachable(f"{self.address} cannot be reached: {exc.strerror or exc}.") from exc
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.version: tuple[int, int, int] | None = None
        if hello:
            try:
                self.hello()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def hello(self) -> tuple[int, int, int]:
        """Shakes hands; returns the peer's (major, minor, patch)."""
        reply = messages.HelloReply.unpack(self.call(messages.Hello()))
        self.version = reply.version
        major, minor, _ = wire.PROTOCOL_VERSION
        if reply.version[0] != major or reply.version[1] > minor:
            theirs = ".".join(map(str, reply.version[:2]))
            raise VersionMismatch(
                f"Peer {self.address} speaks ggml-RPC {theirs}; this side needs {major}.{minor}.",
                "Install the same hydra release on both.",
            )
        return reply.version

    def send(self, message: _Packable) -> None:
        """Sends a request that has no reply, or whose reply ``receive`` takes later."""
        try:
            self.socket.sendall(pack_request(message.command, message.pack()))
        except OSError as exc:
            raise PeerError(f"Peer {self.address} went away: {exc.strerror or exc}.") from exc

    def receive(self, size: int | None) -> bytes:
        """One reply's payload; size: what it must be, in bytes (None: as announced, up to 1 GiB)."""
        (announced,) = wire.SIZE.unpack(self._exactly(wire.SIZE.size))
        if announced > 1 << 30 or (size is not None and announced != size):
            raise ProtocolError(f"Peer {self.address} announces a reply of {announced} bytes; expected {size}.")
        return self._exactly(announced)

    def call(self, message: _Packable) -> bytes:
        """Sends a request and returns its reply's payload."""
        self.send(message)
        size = wire.REPLY_SIZES[message.command]
        if isinstance(message, messages.GetTensor):
            size = message.size_bytes
        return self.receive(size)

    def device_count(self) -> int:
        self.socket.sendall(pack_request(Command.DEVICE_COUNT))
        (count,) = wire.U32.unpack(self.receive(4))
        return int(count)

    def device_memory(self, device: int = 0) -> tuple[int, int]:
        """(free, total) in bytes."""
        free, total = wire.U64_PAIR.unpack(self.call(messages.DeviceRequest(Command.GET_DEVICE_MEMORY, device)))
        return free, total

    def alloc(self, size_bytes: int, device: int = 0) -> tuple[int, int]:
        """(remote_ptr, remote_size); (0, 0) when the device has no room."""
        ptr, size = wire.U64_PAIR.unpack(self.call(messages.AllocBuffer(device, size_bytes)))
        return ptr, size

    def base(self, remote_ptr: int) -> int:
        (base,) = wire.U64.unpack(self.call(messages.BufferRequest(Command.BUFFER_GET_BASE, remote_ptr)))
        return int(base)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            try:
                n = self.socket.recv_into(view[got:])
            except TimeoutError as exc:
                raise PeerUnreachable(
                    f"Peer {self.address} accepted the connection but does not answer.",
                    "It hangs, or serves another head (a stock server serves one at a time).",
                ) from exc
            except OSError as exc:
                raise PeerError(f"Peer {self.address} went away: {exc.strerror or exc}.") from exc
            if n == 0:
                raise PeerError(f"Peer {self.address} closed the connection.", "Its log says why.")
            got += n
        return bytes(data)
