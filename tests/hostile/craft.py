"""Hostile bytes, put together by hand: tensors and graphs of which any field may lie.

Nothing here checks anything: that is the point. Layouts: hydra.rpc.wire; numbers: hydra.peer.ops.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydra.peer.ops import BLOCK_SIZE, OP, TYPE_NUMBERS, TYPE_SIZE
from hydra.rpc import wire
from hydra.rpc.wire import Command

BUFFER_BYTES = 1 << 20
HELLO = wire.HEADER.pack(Command.HELLO, wire.CAPS_SIZE) + bytes(wire.CAPS_SIZE)
COMPUTE = 16


@dataclass(frozen=True)
class Context:
    """What a client knows after HELLO and two ALLOC_BUFFERs of BUFFER_BYTES: handles and base addresses."""

    ptr: int
    base: int
    ptr2: int
    base2: int


def message(cmd: int, payload: bytes = b"", size: int | None = None) -> bytes:
    """A request; ``size`` is what it announces, where that is not what it carries."""
    return wire.HEADER.pack(cmd, len(payload) if size is None else size) + payload


def strides(type_: int, ne: tuple[int, ...]) -> tuple[int, ...]:
    """ggml's own strides, wrapped to the wire's 32 bits; any type number."""
    known = 0 <= type_ < len(BLOCK_SIZE) and BLOCK_SIZE[type_] > 0
    size, block = (int(TYPE_SIZE[type_]), int(BLOCK_SIZE[type_])) if known else (4, 1)
    nb = [size, size * (ne[0] // block)]
    nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
    return tuple(n & 0xFFFFFFFF for n in nb)


def tensor(
    id_: int = 1,
    type_: str | int = "f32",
    ne: tuple[int, ...] = (64,),
    at: int | None = None,
    *,
    c: Context | None = None,
    op: str | int = "NONE",
    src: tuple[int, ...] = (),
    params: tuple[int | float, ...] = (),
    **fields: Any,
) -> np.ndarray:
    """One rpc_tensor. at: bytes from the start of the context's first buffer (None: no buffer). fields: any others."""
    number = TYPE_NUMBERS[type_] if isinstance(type_, str) else type_
    shape = (tuple(ne) + (1, 1, 1))[:4]
    row = np.zeros(1, wire.RPC_TENSOR)
    words = [struct.unpack("<i", struct.pack("<f", p))[0] if isinstance(p, float) else p for p in params]
    values: dict[str, Any] = {
        "id": id_,
        "type": number,
        "ne": shape,
        "nb": strides(number, shape),
        "op": OP[op] if isinstance(op, str) else op,
        "op_params": words + [0] * (wire.MAX_OP_PARAMS - len(words)),
        "src": list(src) + [0] * (wire.MAX_SRC - len(src)),
        "flags": 0 if op == "NONE" else COMPUTE,
        "use_count": 8,
        "name": b"hostile",
    }
    if c is not None and at is not None:
        values |= {"buffer": c.ptr, "data": (c.base + at) & (2**64 - 1)}
    for name, value in (values | fields).items():
        row[name][0] = value
    return row


def graph(
    nodes: list[int],
    *rows: np.ndarray,
    device: int = 0,
    n_nodes: int | None = None,
    n_tensors: int | None = None,
    size: int | None = None,
) -> bytes:
    """A GRAPH_COMPUTE request; the counts may lie."""
    table = np.concatenate(rows) if rows else np.zeros(0, wire.RPC_TENSOR)
    head = struct.pack("<II", device, len(nodes) if n_nodes is None else n_nodes)
    head += struct.pack(f"<{len(nodes)}Q", *nodes)
    count = struct.pack("<I", len(table) if n_tensors is None else n_tensors)
    return message(Command.GRAPH_COMPUTE, head + count + table.tobytes(), size)


def set_tensor(row: np.ndarray, data: bytes, offset: int = 0, flag: int = 0) -> bytes:
    return message(Command.SET_TENSOR, row.tobytes() + wire.SET_TENSOR_TAIL.pack(flag, offset) + data)


def get_tensor(row: np.ndarray, offset: int = 0, size: int = 16) -> bytes:
    return message(Command.GET_TENSOR, row.tobytes() + wire.OFFSET_SIZE.pack(offset, size))


def memset_tensor(row: np.ndarray, offset: int = 0, size: int = 16, value: int = 1) -> bytes:
    return message(Command.MEMSET_TENSOR, row.tobytes() + wire.MEMSET_TAIL.pack(offset, size, value))


def copy_tensor(src: np.ndarray, dst: np.ndarray) -> bytes:
    return message(Command.COPY_TENSOR, src.tobytes() + dst.tobytes())


def alloc_size(row: np.ndarray, *srcs: np.ndarray, device: int = 0) -> bytes:
    table = b"".join(s.tobytes() for s in srcs).ljust(wire.MAX_SRC * wire.TENSOR_SIZE, b"\0")
    return message(Command.GET_ALLOC_SIZE, struct.pack("<I", device) + row.tobytes() + table)


def alloc(size: int, device: int = 0) -> bytes:
    return message(Command.ALLOC_BUFFER, wire.ALLOC_BUFFER.pack(device, size))
