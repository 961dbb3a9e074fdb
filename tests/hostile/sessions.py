"""Recorded sessions of real heads, as short as they are true: every message in order, weights of zeros.

Each file of tests/data/sessions is zlib over: count u32 | count x (cmd u8, payload length u32, reply length u32,
payload, reply). Data of SET_TENSOR above 4 KiB is zeros; small inputs (tokens, positions, masks, indices) are the
recorded ones. A player gives the messages the handles and addresses of the peer that it plays against.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hydra.rpc import wire
from hydra.rpc.wire import Command

DIRECTORY = Path(__file__).parent.parent / "data" / "sessions"
_KEEP_BYTES = 4096


@dataclass(frozen=True)
class Session:
    requests: tuple[tuple[int, bytes], ...]
    replies: tuple[bytes, ...]


def load_all() -> list[Session]:
    return [_unpack(zlib.decompress(path.read_bytes())) for path in sorted(DIRECTORY.glob("*.z"))]


def _unpack(data: bytes) -> Session:
    (count,) = struct.unpack_from("<I", data)
    at, requests, replies = 4, [], []
    for _ in range(count):
        cmd, size, reply = struct.unpack_from("<BII", data, at)
        at += 9
        requests.append((cmd, data[at : at + size]))
        replies.append(data[at + size : at + size + reply])
        at += size + reply
    return Session(tuple(requests), tuple(replies))


def pack(requests: list[tuple[int, bytes]], replies: list[bytes | None]) -> bytes:
    """The file of a recorded session."""
    parts = [struct.pack("<I", len(requests))]
    for (cmd, payload), reply in zip(requests, replies, strict=True):
        if cmd == Command.SET_TENSOR and len(payload) > _KEEP_BYTES:
            payload = payload[: wire.SET_TENSOR_HEAD_SIZE] + bytes(len(payload) - wire.SET_TENSOR_HEAD_SIZE)
        if reply is None or cmd == Command.GET_TENSOR:
            reply = b""  # what was computed is of no use here
        parts += [struct.pack("<BII", cmd, len(payload), len(reply)), payload, reply]
    return zlib.compress(b"".join(parts), 9)


def tensor_offsets(cmd: int, payload: bytes) -> tuple[int, int]:
    """(offset of the first rpc_tensor in a payload, how many there are); (0, 0) where there are none."""
    if cmd in (
        Command.SET_TENSOR,
        Command.GET_TENSOR,
        Command.SET_TENSOR_HASH,
        Command.INIT_TENSOR,
        Command.MEMSET_TENSOR,
    ):
        return 0, 1
    if cmd == Command.COPY_TENSOR:
        return 0, 2
    if cmd == Command.GET_ALLOC_SIZE:
        return 4, 1 + wire.MAX_SRC
    if cmd == Command.GRAPH_COMPUTE:
        (n_nodes,) = struct.unpack_from("<I", payload, 4)
        (n_tensors,) = struct.unpack_from("<I", payload, 8 + 8 * n_nodes)
        return 12 + 8 * n_nodes, n_tensors
    return 0, 0


class Player:
    """Translates one session's handles and addresses to those of the connection it is played on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: dict[int, int] = {}  # recorded -> live
        self._bases: dict[int, tuple[int, int]] = {}  # recorded handle -> (recorded base, live base)

    def translate(self, cmd: int, payload: bytes) -> bytes:
        if cmd in (Command.BUFFER_GET_BASE, Command.FREE_BUFFER, Command.BUFFER_CLEAR):
            (old,) = struct.unpack_from("<Q", payload)
            return struct.pack("<Q", self._handles.get(old, old)) + payload[8:]
        at, count = tensor_offsets(cmd, payload)
        if not count:
            return payload
        data = bytearray(payload)
        rows = np.frombuffer(data, wire.RPC_TENSOR, count, at)
        recorded = rows["buffer"].copy()
        for old, live in self._handles.items():
            of = recorded == old
            if of.any():
                rows["buffer"][of] = live
                if old in self._bases:
                    was, now = self._bases[old]
                    rows["data"][of] += np.uint64((now - was) & (2**64 - 1))
        return bytes(data)

    def learn(self, number: int, reply: bytes) -> None:
        """What a live reply says about the handle that the recorded one named."""
        cmd, payload = self._session.requests[number]
        recorded = self._session.replies[number]
        if cmd == Command.ALLOC_BUFFER and len(recorded) == len(reply) == 16:
            self._handles[struct.unpack_from("<Q", recorded)[0]] = struct.unpack_from("<Q", reply)[0]
        elif cmd == Command.BUFFER_GET_BASE and len(recorded) == len(reply) == 8:
            self._bases[struct.unpack("<Q", payload)[0]] = (
                struct.unpack("<Q", recorded)[0],
                struct.unpack("<Q", reply)[0],
            )
