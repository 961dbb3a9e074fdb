"""A dataclass for each ggml-RPC request and reply: bytes to fields and back.

For everything that is not the peer's hot path: the small client, the tests, the link, recorded sessions. Holds no
state and touches no socket; a payload of the wrong size is a ProtocolError. Layouts: hydra.rpc.wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hydra.errors import ProtocolError
from hydra.rpc import wire
from hydra.rpc.wire import Command


def tensor_bytes(**fields: object) -> bytes:
    """One rpc_tensor (296 bytes) from keyword fields of wire.RPC_TENSOR; those not given are zero."""
    row = np.zeros(1, dtype=wire.RPC_TENSOR)
    for name, value in fields.items():
        row[name][0] = value
    return row.tobytes()


def _exact(cmd: Command, payload: bytes | memoryview, size: int) -> bytes:
    if len(payload) != size:
        raise ProtocolError(f"{cmd.name} carries {len(payload)} bytes; ggml-RPC 7.0 has {size}.")
    return bytes(payload)


@dataclass(frozen=True)
class Hello:
    command: ClassVar[Command] = Command.HELLO
    caps: bytes = bytes(wire.CAPS_SIZE)

    def pack(self) -> bytes:
        return self.caps

    @classmethod
    def unpack(cls, payload: bytes) -> Hello:
        return cls(_exact(cls.command, payload, wire.CAPS_SIZE))


@dataclass(frozen=True)
class HelloReply:
    version: tuple[int, int, int]
    caps: bytes = bytes(wire.CAPS_SIZE)

    def pack(self) -> bytes:
        return wire.HELLO_REPLY.pack(*self.version, 0, self.caps)

    @classmethod
    def unpack(cls, payload: bytes) -> HelloReply:
        major, minor, patch, _, caps = wire.HELLO_REPLY.unpack(_exact(Command.HELLO, payload, wire.HELLO_REPLY.size))
        return cls((major, minor, patch), caps)


@dataclass(frozen=True)
class AllocBuffer:
    command: ClassVar[Command] = Command.ALLOC_BUFFER
    device: int
    size_bytes: int

    def pack(self) -> bytes:
        return wire.ALLOC_BUFFER.pack(self.device, self.size_bytes)

    @classmethod
    def unpack(cls, payload: bytes) -> AllocBuffer:
        return cls(*wire.ALLOC_BUFFER.unpack(_exact(cls.command, payload, 12)))


@dataclass(frozen=True)
class DeviceRequest:
    """GET_ALIGNMENT, GET_MAX_SIZE, GET_DEVICE_MEMORY and GRAPH_RECOMPUTE: a device number and nothing else."""

    command: Command
    device: int = 0

    def pack(self) -> bytes:
        return wire.U32.pack(self.device)


@dataclass(frozen=True)
class BufferRequest:
    """BUFFER_GET_BASE and FREE_BUFFER: a handle and nothing else."""

    command: Command
    remote_ptr: int

    def pack(self) -> bytes:
        return wire.U64.pack(self.remote_ptr)


@dataclass(frozen=True)
class BufferClear:
    command: ClassVar[Command] = Command.BUFFER_CLEAR
    remote_ptr: int
    value: int

    def pack(self) -> bytes:
        return wire.BUFFER_CLEAR.pack(self.remote_ptr, self.value)


@dataclass(frozen=True)
class SetTensor:
    command: ClassVar[Command] = Command.SET_TENSOR
    tensor: bytes
    offset: int
    data: bytes
    cache_flag: int = 0

    def pack(self) -> bytes:
        return self.tensor + wire.SET_TENSOR_TAIL.pack(self.cache_flag, self.offset) + self.data

    @classmethod
    def unpack(cls, payload: bytes) -> SetTensor:
        if len(payload) < wire.SET_TENSOR_HEAD_SIZE:
            raise ProtocolError(
                f"SET_TENSOR carries {len(payload)} bytes; it has at least {wire.SET_TENSOR_HEAD_SIZE}."
            )
        flag, offset = wire.SET_TENSOR_TAIL.unpack_from(payload, wire.TENSOR_SIZE)
        return cls(bytes(payload[: wire.TENSOR_SIZE]), offset, bytes(payload[wire.SET_TENSOR_HEAD_SIZE :]), flag)


@dataclass(frozen=True)
class SetTensorHash:
    command: ClassVar[Command] = Command.SET_TENSOR_HASH
    tensor: bytes
    offset: int
    hash: int

    def pack(self) -> bytes:
        return self.tensor + wire.OFFSET_SIZE.pack(self.offset, self.hash)


@dataclass(frozen=True)
class GetTensor:
    command: ClassVar[Command] = Command.GET_TENSOR
    tensor: bytes
    offset: int
    size_bytes: int

    def pack(self) -> bytes:
        return self.tensor + wire.OFFSET_SIZE.pack(self.offset, self.size_bytes)


@dataclass(frozen=True)
class MemsetTensor:
    command: ClassVar[Command] = Command.MEMSET_TENSOR
    tensor: bytes
    offset: int
    size_bytes: int
    value: int

    def pack(self) -> bytes:
        return self.tensor + wire.MEMSET_TAIL.pack(self.offset, self.size_bytes, self.value)


@dataclass(frozen=True)
class CopyTensor:
    command: ClassVar[Command] = Command.COPY_TENSOR
    src: bytes
    dst: bytes

    def pack(self) -> bytes:
        return self.src + self.dst


@dataclass(frozen=True)
class InitTensor:
    command: ClassVar[Command] = Command.INIT_TENSOR
    tensor: bytes

    def pack(self) -> bytes:
        return self.tensor


@dataclass(frozen=True)
class GetAllocSize:
    command: ClassVar[Command] = Command.GET_ALLOC_SIZE
    device: int
    tensor: bytes
    srcs: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        empty = bytes(wire.TENSOR_SIZE)
        srcs = self.srcs + (empty,) * (wire.MAX_SRC - len(self.srcs))
        return wire.U32.pack(self.device) + self.tensor + b"".join(srcs)


@dataclass(frozen=True)
class GraphCompute:
    """nodes: tensor ids in execution order; tensors: array of wire.RPC_TENSOR."""

    command: ClassVar[Command] = Command.GRAPH_COMPUTE
    device: int
    nodes: list[int]
    tensors: np.ndarray = field(repr=False)

    def pack(self) -> bytes:
        return b"".join(
            (
                wire.GRAPH_HEAD.pack(self.device, len(self.nodes)),
                np.asarray(self.nodes, dtype="<u8").tobytes(),
                wire.U32.pack(len(self.tensors)),
                self.tensors.tobytes(),
            )
        )

    @classmethod
    def unpack(cls, payload: bytes) -> GraphCompute:
        if len(payload) < wire.GRAPH_MIN_SIZE:
            raise ProtocolError(f"GRAPH_COMPUTE carries {len(payload)} bytes; it has at least {wire.GRAPH_MIN_SIZE}.")
        device, n_nodes = wire.GRAPH_HEAD.unpack_from(payload)
        at = 8 + 8 * n_nodes
        if len(payload) < at + 4:
            raise ProtocolError(f"GRAPH_COMPUTE announces {n_nodes} nodes in {len(payload)} bytes.")
        (n_tensors,) = wire.U32.unpack_from(payload, at)
        if len(payload) != at + 4 + n_tensors * wire.TENSOR_SIZE:
            raise ProtocolError(
                f"GRAPH_COMPUTE announces {n_nodes} nodes and {n_tensors} tensors in {len(payload)} bytes;"
                f" that needs {at + 4 + n_tensors * wire.TENSOR_SIZE}."
            )
        nodes = np.frombuffer(payload, dtype="<u8", count=n_nodes, offset=8).tolist()
        tensors = np.frombuffer(payload, dtype=wire.RPC_TENSOR, count=n_tensors, offset=at + 4).copy()
        return cls(device, nodes, tensors)
