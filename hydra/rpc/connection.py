"""Both ends of a ggml-RPC connection as states without a socket: bytes in, messages out.

    AWAIT_HELLO ──HELLO──► OPEN ──HELLO again, unknown command, wrong size──► CLOSED
         └────── anything else ──────────────────────────────────────────────► CLOSED

``check_header`` is the one place where a message's first nine bytes are judged, before a byte of its payload is waited
for or allocated; the peer's session calls it too. ``ServerConnection`` puts whole messages together for everything
that is not the peer's hot path (tests, recorded sessions, the link).

Source: rpc_serve_client in ggml-rpc.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydra.errors import ProtocolError
from hydra.rpc import wire


class State(Enum):
    AWAIT_HELLO = "await hello"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True)
class Request:
    cmd: int
    payload: bytes


def check_header(state: State, cmd: int, size: int, max_tensor_bytes: int) -> None:
    """Judges a message by its first nine bytes.

    Raises: ProtocolError for a command that is unknown or out of order, or a size that it cannot have.
    """
    if state is State.AWAIT_HELLO:
        if cmd != wire.Command.HELLO:
            raise ProtocolError(f"{wire.command_name(cmd)} before HELLO.", "The client must say HELLO first.")
        if size != wire.CAPS_SIZE:
            raise ProtocolError(
                f"HELLO of {size} bytes; ggml-RPC 7.0 has {wire.CAPS_SIZE}.",
                "The client speaks another protocol version: install the same release on both boxes.",
            )
        return
    if cmd == wire.Command.HELLO:
        raise ProtocolError("HELLO a second time on one connection.")
    limits = wire.size_limits(cmd, max_tensor_bytes)
    if limits is None:
        raise ProtocolError(f"Unknown command {cmd}; ggml-RPC 7.0 has 0 to {max(wire.Command)}.")
    low, high = limits
    if not low <= size <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        raise ProtocolError(f"{wire.command_name(cmd)} of {size} bytes; {wanted} are possible here.")


class ServerConnection:
    """The server's side of one connection: feed bytes as they come, take whole requests out.

    max_tensor_bytes: bound for SET_TENSOR payloads, in bytes.
    Raises (from next_request): ProtocolError, after which the state is CLOSED.
    """

    def __init__(self, max_tensor_bytes: int = 1 << 31) -> None:
        self.state = State.AWAIT_HELLO
        self.max_tensor_bytes = max_tensor_bytes
        self._data = bytearray()

    def receive_data(self, data: bytes) -> None:
        self._data += data

    def next_request(self) -> Request | None:
        """The next whole request, or None until more bytes have come."""
        if self.state is State.CLOSED:
            raise ProtocolError("The connection is closed.")
        if len(self._data) < wire.HEADER.size:
            return None
        cmd, size = wire.HEADER.unpack_from(self._data)
        try:
            check_header(self.state, cmd, size, self.max_tensor_bytes)
        except ProtocolError:
            self.state = State.CLOSED
            raise
        end = wire.HEADER.size + size
        if len(self._data) < end:
            return None
        payload = bytes(self._data[wire.HEADER.size : end])
        del self._data[:end]
        self.state = State.OPEN
        return Request(cmd, payload)


def pack_request(cmd: int, payload: bytes = b"") -> bytes:
    """A request as it goes out: 9 bytes of header and the payload, in one piece."""
    return wire.HEADER.pack(cmd, len(payload)) + payload


def pack_reply(payload: bytes) -> bytes:
    return wire.SIZE.pack(len(payload)) + payload
