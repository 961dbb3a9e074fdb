"""A peer that receives a model and throws it away: the floor of a load, which is the stock client's own cost.

Speaks just enough ggml-RPC 7.0 for a client to load a model and open a context: sizes and addresses are made up,
tensors are read from the socket and dropped, graphs are ignored and every read answers zeros. It owns no device and
never loads a library, so what a load against it takes is what the client alone takes. ``found`` decides the answer to
SET_TENSOR_HASH: "no" for a cold load, "yes" for the client's own hashing speed.

Never to be used as a peer: everything it computes is zero.

Source: ggml/src/ggml-rpc/ggml-rpc.cpp (message layouts; the client's half).
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import struct
import sys
import threading

from hydra.bench.process import ChildServer, die_with_parent
from hydra.errors import ProtocolError

# Command numbers of ggml-RPC 7.0, those that a load uses.
_ALLOC_BUFFER, _GET_ALIGNMENT, _GET_MAX_SIZE, _BUFFER_GET_BASE = 0, 1, 2, 3
_SET_TENSOR_HASH, _GET_TENSOR, _COPY_TENSOR = 7, 8, 9
_GET_DEVICE_MEMORY, _GET_ALLOC_SIZE, _HELLO, _DEVICE_COUNT = 11, 13, 14, 15
_SILENT = {4, 5, 6, 10, 12, 16, 17}  # commands without a reply

_HEADER = struct.Struct("<BQ")
# rpc_tensor: id u64 | type u32 | buffer u64 | ne u32[4] | nb u32[4] | …
_NE_NB = struct.Struct("<20x4I4I")
_TENSOR_SIZE = 296
_CHUNK = 8 << 20
_MEMORY = 1 << 40
_BASE = 0x5_0000_0000_0000


class _Session:
    """One client: reads whole messages and answers those that expect it."""

    def __init__(self, sock: socket.socket, found: bool) -> None:
        self._sock = sock
        self._found = b"\x01" if found else b"\x00"
        self._chunk = memoryview(bytearray(_CHUNK))
        self._next_handle = 1

    def serve(self) -> None:
        """Answer until the client hangs up. Raises: ProtocolError on a command that no load sends."""
        while True:
            header = self._receive(_HEADER.size)
            if header is None:
                return
            command, size = _HEADER.unpack(header)
            if command in _SILENT:
                self._discard(size)
                continue
            if size > 64 << 10:
                raise ProtocolError(f"Command {command} with {size} bytes is none that a load sends.")
            payload = self._receive(size)
            if payload is None:
                return
            reply = self._reply(command, bytes(payload))
            self._sock.sendall(struct.pack("<Q", len(reply)) + reply)

    def _reply(self, command: int, payload: bytes) -> bytes:
        if command == _HELLO:
            return bytes([7, 0, 0, 0]) + bytes(24)
        if command == _DEVICE_COUNT:
            return struct.pack("<I", 1)
        if command == _ALLOC_BUFFER:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            return struct.pack("<QQ", handle, struct.unpack_from("<Q", payload, 4)[0])
        if command == _GET_ALIGNMENT:
            return struct.pack("<Q", 128)
        if command == _GET_MAX_SIZE:
            return struct.pack("<Q", (1 << 64) - 1)
        if command == _BUFFER_GET_BASE:
            # Each buffer in a range of its own: the client computes addresses from it.
            return struct.pack("<Q", _BASE + (struct.unpack("<Q", payload)[0] << 40))
        if command == _SET_TENSOR_HASH:
            return self._found
        if command == _GET_TENSOR:
            return bytes(struct.unpack_from("<Q", payload, _TENSOR_SIZE + 8)[0])
        if command == _COPY_TENSOR:
            return b"\x01"
        if command == _GET_DEVICE_MEMORY:
            return struct.pack("<QQ", _MEMORY, _MEMORY)
        if command == _GET_ALLOC_SIZE:
            # The client takes the larger of this and its own ggml_nbytes, so an upper bound by strides is enough.
            shape = _NE_NB.unpack_from(payload, 4)
            return struct.pack("<Q", max(ne * nb for ne, nb in zip(shape[:4], shape[4:], strict=True)))
        raise ProtocolError(f"Command {command} is none that a load sends.")

    def _receive(self, size: int) -> memoryview | None:
        view, got = self._chunk[:size], 0
        while got < size:
            count = self._sock.recv_into(view[got:])
            if count == 0:
                return None
            got += count
        return view

    def _discard(self, size: int) -> None:
        while size:
            count = self._sock.recv_into(self._chunk[: min(size, _CHUNK)])
            if count == 0:
                return
            size -= count


class Sink(ChildServer):
    """A running sink peer in a process of its own. found: what it answers to SET_TENSOR_HASH."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        found: bool = False,
        netns: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        super().__init__("sink", ["--found"] if found else [], host, port, netns=netns, timeout_s=timeout_s)


def serve(host: str, port: int, found: bool) -> None:
    """Serve clients on ``host:port`` until the process ends, a thread each."""
    with socket.create_server((host, port)) as listener:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=_serve_one, args=(sock, found), daemon=True).start()


def _serve_one(sock: socket.socket, found: bool) -> None:
    with sock, contextlib.suppress(ConnectionError):
        try:
            _Session(sock, found).serve()
        except ProtocolError as error:
            sys.stderr.write(f"{error}\n")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="hydra.bench.sink")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args(arguments)
    die_with_parent()
    try:
        serve(options.host, options.port, options.found)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
