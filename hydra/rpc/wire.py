"""The numbers and layouts of ggml-RPC 7.0: what stands where on the wire, and how large a message of each kind may be.

Knows nothing of sockets, devices or libggml. Everything is little-endian and packed.

    request   | cmd u8 | size u64 | payload (size bytes) |
    reply     | size u64 | payload |            only for the commands in REPLY_SIZES; the others are fire-and-forget

    rpc_tensor, 296 bytes
      0  id u64      8  type u32    12  buffer u64   20  ne u32[4]    36  nb u32[4]     52  op u32
     56  op_params i32[16]         120  flags i32   124  src u64[10] 204  view_src u64 212  view_offs u64
    220  data u64  228  name char[64]               292  use_count i32

Source: ggml/include/ggml-rpc.h and ggml/src/ggml-rpc/ggml-rpc.cpp of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from . import PROTOCOL_VERSION as PROTOCOL_VERSION

DEFAULT_PORT = 50052

MAX_DIMS = 4
MAX_SRC = 10
MAX_OP_PARAMS = 16  # int32 words
MAX_NAME = 64
CAPS_SIZE = 24
HASH_THRESHOLD_BYTES = 10 * 1024 * 1024  # the client asks SET_TENSOR_HASH first above this


class Command(IntEnum):
    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17


HELLO_BYTE = int(Command.HELLO)

RPC_TENSOR = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", (MAX_DIMS,)),
        ("nb", "<u4", (MAX_DIMS,)),
        ("op", "<u4"),
        ("op_params", "<i4", (MAX_OP_PARAMS,)),
        ("flags", "<i4"),
        ("src", "<u8", (MAX_SRC,)),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", f"S{MAX_NAME}"),
        ("use_count", "<i4"),
    ]
)
TENSOR_SIZE = 296
TENSOR_WORDS = TENSOR_SIZE // 8

HEADER = struct.Struct("<BQ")
SIZE = struct.Struct("<Q")
HELLO_REPLY = struct.Struct(f"<4B{CAPS_SIZE}s")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
U64_PAIR = struct.Struct("<QQ")
ALLOC_BUFFER = struct.Struct("<IQ")
BUFFER_CLEAR = struct.Struct("<QB")
GRAPH_HEAD = struct.Struct("<II")

# The fields of an rpc_tensor that a byte transfer needs: type, buffer, ne[4], nb[4] … data.
TENSOR_REGION = struct.Struct("<8x I Q 4I 4I 168x Q 68x")

SET_TENSOR_HEAD_SIZE = TENSOR_SIZE + 1 + 8
SET_TENSOR_TAIL = struct.Struct("<BQ")  # cache_flag, offset, at TENSOR_SIZE
OFFSET_SIZE = struct.Struct("<QQ")  # GET_TENSOR: offset, size; SET_TENSOR_HASH: offset, hash
MEMSET_TAIL = struct.Struct("<QQB")

# Payload sizes that are fixed; SET_TENSOR and GRAPH_COMPUTE are the two of variable size.
REQUEST_SIZES: dict[int, int] = {
    Command.ALLOC_BUFFER: 12,
    Command.GET_ALIGNMENT: 4,
    Command.GET_MAX_SIZE: 4,
    Command.BUFFER_GET_BASE: 8,
    Command.FREE_BUFFER: 8,
    Command.BUFFER_CLEAR: 9,
    Command.SET_TENSOR_HASH: TENSOR_SIZE + 16,
    Command.GET_TENSOR: TENSOR_SIZE + 16,
    Command.COPY_TENSOR: 2 * TENSOR_SIZE,
    Command.GET_DEVICE_MEMORY: 4,
    Command.INIT_TENSOR: TENSOR_SIZE,
    Command.GET_ALLOC_SIZE: 4 + TENSOR_SIZE * (1 + MAX_SRC),
    Command.HELLO: CAPS_SIZE,
    Command.DEVICE_COUNT: 0,
    Command.GRAPH_RECOMPUTE: 4,
    Command.MEMSET_TENSOR: TENSOR_SIZE + 17,
}
# Reply payload sizes; None where it is as long as the request asked (GET_TENSOR).
REPLY_SIZES: dict[int, int | None] = {
    Command.ALLOC_BUFFER: 16,
    Command.GET_ALIGNMENT: 8,
    Command.GET_MAX_SIZE: 8,
    Command.BUFFER_GET_BASE: 8,
    Command.SET_TENSOR_HASH: 1,
    Command.GET_TENSOR: None,
    Command.COPY_TENSOR: 1,
    Command.GET_DEVICE_MEMORY: 16,
    Command.GET_ALLOC_SIZE: 8,
    Command.HELLO: 4 + CAPS_SIZE,
    Command.DEVICE_COUNT: 4,
}

# More than any model's graph (a 27B step has about 1,100 tensors); 65,536 tensors are a message of 20 MB.
MAX_GRAPH_TENSORS = 65536
GRAPH_MIN_SIZE = 12
GRAPH_MAX_SIZE = GRAPH_MIN_SIZE + MAX_GRAPH_TENSORS * (8 + TENSOR_SIZE)


def size_limits(cmd: int, max_tensor_bytes: int) -> tuple[int, int] | None:
    """The smallest and largest payload that a command may announce, in bytes; None for a number that is no command.

    max_tensor_bytes: the largest SET_TENSOR that could fit anywhere on this peer (its largest live buffer).
    """
    fixed = REQUEST_SIZES.get(cmd)
    if fixed is not None:
        return fixed, fixed
    if cmd == Command.SET_TENSOR:
        return SET_TENSOR_HEAD_SIZE, SET_TENSOR_HEAD_SIZE + max_tensor_bytes
    if cmd == Command.GRAPH_COMPUTE:
        return GRAPH_MIN_SIZE, GRAPH_MAX_SIZE
    return None


def command_name(cmd: int) -> str:
    try:
        return Command(cmd).name
    except ValueError:
        return f"command {cmd}"
