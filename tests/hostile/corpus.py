"""The corpus: hostile sessions of every kind that has been reported against RPC servers of this family, and some more.

Each case is a name, a kind, and the bytes that a client sends after HELLO and two ALLOC_BUFFERs (or from the first byte
on, where ``raw``). ``then`` is what hydra's peer must do about it: close the connection, or answer it and go on. The next
client must be served in every case; that is the runner's to ask (tests/hostile/run.py).

The kinds are those of public reports; the inputs are this project's own. What each rule says is in hydra/peer/rules.py
and op_rules*.py. The length of this file is its data: a case is a line.
"""
# ruff: noqa: E501 - a case a line reads better than a case in five

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hydra.rpc import wire
from hydra.rpc.wire import Command
from tests.hostile.craft import (
    BUFFER_BYTES,
    HELLO,
    Context,
    alloc,
    alloc_size,
    copy_tensor,
    get_tensor,
    graph,
    memset_tensor,
    message,
    set_tensor,
    tensor,
)

HUGE = 2**63
U64 = 2**64 - 1
U32 = 2**32 - 1


@dataclass(frozen=True)
class Case:
    """One hostile session.

    build: the bytes, from what the client knows. raw: they are all that is sent, without HELLO. hold: the connection is
    kept open while the next client is served. end: how the client leaves when it does: "wait" for the peer to act, "close"
    at once, or "reset". then: "closed" or "answered" (by hydra's peer).
    """

    name: str
    kind: str
    build: Callable[[Context], bytes]
    then: str = "closed"
    raw: bool = False
    hold: bool = False
    end: str = "wait"


CASES: list[Case] = []


def fixed(data: bytes) -> Callable[[Context], bytes]:
    """Bytes that need to know nothing."""
    return lambda _: data


def set_of_type(number: int) -> Callable[[Context], bytes]:
    return lambda c: set_tensor(tensor(c=c, at=0, type_=number), bytes(64))


def case(
    name: str, kind: str, then: str = "closed", raw: bool = False, hold: bool = False, end: str = "wait"
) -> Callable[[Callable[[Context], bytes]], Callable[[Context], bytes]]:
    def add(build: Callable[[Context], bytes]) -> Callable[[Context], bytes]:
        CASES.append(Case(name, kind, build, then, raw, hold, end))
        return build

    return add


def simple(name: str, kind: str, build: Callable[[Context], bytes], then: str = "closed") -> None:
    CASES.append(Case(name, kind, build, then))


def raw(name: str, data: bytes, hold: bool = False, end: str = "wait", then: str = "closed") -> None:
    CASES.append(Case(name, "framing", lambda _: data, then, True, hold, end))


# ---- framing

raw("says nothing at all", b"", hold=True)
raw("leaves without a word", b"", end="close")
raw("resets without a word", b"", end="reset")
raw("noise instead of HELLO", bytes(range(1, 200)))
raw("a TLS ClientHello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(506))
raw("DEVICE_COUNT before HELLO", message(Command.DEVICE_COUNT))
raw("HELLO of protocol 6 (no payload)", message(Command.HELLO))
raw("HELLO with a payload too long", message(Command.HELLO, bytes(64)))
raw("HELLO that announces 2^63 bytes", message(Command.HELLO, bytes(24), HUGE))
raw("half a HELLO, then silence", HELLO[:12], hold=True)
raw("half a HELLO, then gone", HELLO[:12], end="reset")
raw("HELLO, then gone", HELLO, end="reset")

simple("HELLO twice", "framing", lambda c: HELLO)
simple("an unknown command", "framing", lambda c: message(99))
simple("command 255", "framing", lambda c: message(255, bytes(8)))
simple("SET_TENSOR announces 2^63 bytes", "framing", lambda c: message(Command.SET_TENSOR, bytes(400), HUGE))
simple("SET_TENSOR announces 2^64-1 bytes", "framing", lambda c: message(Command.SET_TENSOR, bytes(400), U64))
simple("SET_TENSOR announces a terabyte", "framing", lambda c: message(Command.SET_TENSOR, bytes(400), 1 << 40))
simple("GRAPH_COMPUTE announces 2^63 bytes", "framing", lambda c: message(Command.GRAPH_COMPUTE, bytes(400), HUGE))
simple("GRAPH_COMPUTE announces 256 GiB", "framing", lambda c: message(Command.GRAPH_COMPUTE, bytes(400), 1 << 38))
simple("SET_TENSOR shorter than its head", "framing", lambda c: message(Command.SET_TENSOR, bytes(10)))
simple("GET_TENSOR shorter than its layout", "framing", lambda c: message(Command.GET_TENSOR, bytes(10)))
simple("GET_TENSOR longer than its layout", "framing", lambda c: message(Command.GET_TENSOR, bytes(4000)))
simple("GRAPH_COMPUTE of three bytes", "framing", lambda c: message(Command.GRAPH_COMPUTE, bytes(3)))
simple("DEVICE_COUNT with a payload", "framing", lambda c: message(Command.DEVICE_COUNT, bytes(9)))


@case("half a header, then silence", "framing", hold=True)
def _(c: Context) -> bytes:
    return message(Command.GET_DEVICE_MEMORY, bytes(4))[:5]


@case("half a SET_TENSOR, then silence", "framing", hold=True)
def _(c: Context) -> bytes:
    return set_tensor(tensor(c=c, at=0, ne=(4096,)), bytes(16384))[:5000]


@case("half a SET_TENSOR, then gone", "framing", end="reset")
def _(c: Context) -> bytes:
    return set_tensor(tensor(c=c, at=0, ne=(4096,)), bytes(16384))[:5000]


@case("half a graph, then gone", "framing", end="close")
def _(c: Context) -> bytes:
    rows = [tensor(i, c=c, at=0) for i in range(1, 50)]
    return graph([1], *rows)[:7000]


@case("asks for 64 MiB of replies and never reads", "framing", then="answered", hold=True)
def _(c: Context) -> bytes:
    return get_tensor(tensor(c=c, at=0, ne=(BUFFER_BYTES // 4,)), 0, BUFFER_BYTES) * 64


@case("ten thousand questions in one segment", "framing", then="answered")
def _(c: Context) -> bytes:
    return message(Command.GET_ALIGNMENT, bytes(4)) * 10_000


# ---- handles and devices

for command, payload in (
    (Command.BUFFER_GET_BASE, struct.pack("<Q", 0xDEADBEEF)),
    (Command.FREE_BUFFER, struct.pack("<Q", 0xDEADBEEF)),
    (Command.BUFFER_CLEAR, struct.pack("<QB", 0xDEADBEEF, 1)),
    (Command.BUFFER_GET_BASE, bytes(8)),
    (Command.FREE_BUFFER, struct.pack("<Q", U64)),
):
    simple(f"{command.name} of handle {payload[:8].hex()}", "handles", fixed(message(command, payload)))
for command in (Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY, Command.GRAPH_RECOMPUTE):
    simple(f"{command.name} of device 77", "handles", fixed(message(command, struct.pack("<I", 77))))
simple("ALLOC_BUFFER on device 2^32-1", "handles", lambda c: alloc(64, U32))
simple("ALLOC_BUFFER of 2^63 bytes", "handles", lambda c: alloc(HUGE), then="answered")
simple("ALLOC_BUFFER of 2^64-1 bytes", "handles", lambda c: alloc(U64), then="answered")
simple("ALLOC_BUFFER of 0 bytes", "handles", lambda c: alloc(0), then="answered")
simple("two thousand buffers", "handles", lambda c: alloc(4096) * 2000, then="answered")
simple("GRAPH_RECOMPUTE before any graph", "handles", lambda c: message(Command.GRAPH_RECOMPUTE, bytes(4)))


def free(ptr: int) -> bytes:
    return message(Command.FREE_BUFFER, struct.pack("<Q", ptr))


simple("a buffer freed twice", "handles", lambda c: free(c.ptr) * 2)
simple("SET_TENSOR into a freed buffer", "handles", lambda c: free(c.ptr) + set_tensor(tensor(c=c, at=0), bytes(64)))
simple("GET_TENSOR from a freed buffer", "handles", lambda c: free(c.ptr) + get_tensor(tensor(c=c, at=0)))
simple("a graph over a freed buffer", "handles", lambda c: free(c.ptr) + add_graph(c))
simple("GRAPH_RECOMPUTE after a free", "handles",
       lambda c: add_graph(c) + free(c.ptr) + message(Command.GRAPH_RECOMPUTE, bytes(4)))  # fmt: skip
simple("GET_TENSOR without a buffer, at a guessed address", "handles",
       lambda c: get_tensor(tensor(data=0x400000, buffer=0)))  # fmt: skip
simple("SET_TENSOR without a buffer, at a guessed address", "handles",
       lambda c: set_tensor(tensor(data=0x400000, buffer=0), bytes(64)))  # fmt: skip
simple("a handle that is an address one off", "handles", lambda c: get_tensor(tensor(c=c, at=0, buffer=c.ptr + 8)))
simple("one buffer's handle with the other's address", "handles",
       lambda c: get_tensor(tensor(c=c, at=0, data=c.base2, buffer=c.ptr)))  # fmt: skip


def add_graph(c: Context) -> bytes:
    """A graph that is in order: v3 = v1 + v2."""
    return graph([3], tensor(1, c=c, at=0), tensor(2, c=c, at=256), tensor(3, c=c, at=512, op="ADD", src=(1, 2)))


# ---- tensors of a transfer

for number in (4, 5, 31, 36, 43, 255, 2**31, U32):
    simple(f"SET_TENSOR of type {number}", "types",
           set_of_type(number))  # fmt: skip
simple("GET_TENSOR of type 43", "types", lambda c: get_tensor(tensor(c=c, at=0, type_=43)))
simple("INIT_TENSOR of type 2^31", "types",
       lambda c: message(Command.INIT_TENSOR, tensor(c=c, at=0, type_=2**31).tobytes()))  # fmt: skip
simple("GET_ALLOC_SIZE of type 4", "types", lambda c: alloc_size(tensor(type_=4)))
simple("q4_0 of 33 elements a row", "types",
       lambda c: set_tensor(tensor(c=c, at=0, type_="q4_0", ne=(33, 4)), bytes(18)))  # fmt: skip
simple("q6_K of 32 elements a row", "types", lambda c: get_tensor(tensor(c=c, at=0, type_="q6_K", ne=(32, 4))))
simple("every dimension 2^32-1", "tensors",
       lambda c: get_tensor(tensor(c=c, at=0, ne=(U32, U32, U32, U32))))  # fmt: skip
simple("dimensions whose product wraps to 0", "tensors",
       lambda c: get_tensor(tensor(c=c, at=0, ne=(1 << 31, 1 << 31, 4, 1)), 0, 1 << 30))  # fmt: skip
simple("strides that wrap around", "tensors",
       lambda c: get_tensor(tensor(c=c, at=0, ne=(U32, U32, 2, 2), nb=(U32, U32, U32, U32)), 0, 64))  # fmt: skip
simple("starts before its buffer", "offsets", lambda c: get_tensor(tensor(c=c, at=-64)))
simple("starts after its buffer", "offsets", lambda c: get_tensor(tensor(c=c, at=BUFFER_BYTES + 64)))
simple("ends after its buffer", "offsets", lambda c: get_tensor(tensor(c=c, at=BUFFER_BYTES - 16)))
simple("SET_TENSOR ends after its buffer", "offsets",
       lambda c: set_tensor(tensor(c=c, at=BUFFER_BYTES - 16), bytes(256)))  # fmt: skip
simple("address near 2^64", "offsets", lambda c: get_tensor(tensor(c=c, at=0, data=U64 - 7)))
simple("SET_TENSOR at offset 2^64-8", "offsets", lambda c: set_tensor(tensor(c=c, at=64), bytes(64), U64 - 7))
simple("SET_TENSOR past its tensor", "offsets", lambda c: set_tensor(tensor(c=c, at=0), bytes(256), 128))
simple("GET_TENSOR of 2^63 bytes", "offsets", lambda c: get_tensor(tensor(c=c, at=0), 0, HUGE))
simple("GET_TENSOR at offset 2^64-8", "offsets", lambda c: get_tensor(tensor(c=c, at=64), U64 - 7, 16))
simple("GET_TENSOR past its tensor", "offsets", lambda c: get_tensor(tensor(c=c, at=0), 0, 4096))
simple("MEMSET_TENSOR of 2^64-1 bytes", "offsets", lambda c: memset_tensor(tensor(c=c, at=0), 8, U64))
simple("MEMSET_TENSOR past its buffer", "offsets",
       lambda c: memset_tensor(tensor(c=c, at=BUFFER_BYTES - 256), 0, 4096))  # fmt: skip
simple("SET_TENSOR_HASH past its buffer", "offsets",
       lambda c: message(Command.SET_TENSOR_HASH,
                         tensor(c=c, at=BUFFER_BYTES - 4).tobytes() + struct.pack("<QQ", 0, 1)))  # fmt: skip
simple("COPY_TENSOR from a larger source", "copies",
       lambda c: copy_tensor(tensor(1, c=c, at=0, ne=(4096,)), tensor(2, c=c, at=BUFFER_BYTES - 256)))  # fmt: skip
simple("COPY_TENSOR past the end of its source", "copies",
       lambda c: copy_tensor(tensor(1, c=c, at=BUFFER_BYTES - 64, ne=(4096,)), tensor(2, c=c, at=0, ne=(4096,))))  # fmt: skip
simple("COPY_TENSOR to an address that wraps", "copies",
       lambda c: copy_tensor(tensor(1, c=c, at=0), tensor(2, c=c, at=0, data=U64 - 15)))  # fmt: skip
simple("COPY_TENSOR to no buffer", "copies", lambda c: copy_tensor(tensor(1, c=c, at=0), tensor(2)))
simple("GET_ALLOC_SIZE of FLASH_ATTN_EXT without sources", "tensors",
       lambda c: alloc_size(tensor(op="FLASH_ATTN_EXT")))  # fmt: skip
simple("GET_ALLOC_SIZE of operation 999", "tensors", lambda c: alloc_size(tensor(op=999)))

# ---- graphs: the table

simple("2^32-1 nodes in sixteen bytes", "graphs",
       lambda c: message(Command.GRAPH_COMPUTE, struct.pack("<IIQ", 0, U32, 1)))  # fmt: skip
simple(
    "2^29 nodes, whose ids would take 2^32 bytes", "graphs", lambda c: graph([1], tensor(1, c=c, at=0), n_nodes=1 << 29)
)
simple("2^32-1 tensors", "graphs", lambda c: graph([1], tensor(1, c=c, at=0), n_tensors=U32))
simple("one tensor more than it carries", "graphs", lambda c: graph([1], tensor(1, c=c, at=0), n_tensors=2))
simple("no nodes", "graphs", lambda c: graph([], tensor(1, c=c, at=0)))
simple("no tensors", "graphs", lambda c: graph([1]))
simple("a node that is not among the tensors", "graphs", lambda c: graph([9], tensor(1, c=c, at=0)))
simple("node 0", "graphs", lambda c: graph([0], tensor(1, c=c, at=0)))
simple(
    "a source that is not among the tensors", "graphs", lambda c: graph([1], tensor(1, c=c, at=0, op="SQR", src=(9,)))
)
simple("device 77", "graphs", lambda c: graph([1], tensor(1, c=c, at=0), device=77))
simple(
    "the same node twice",
    "graphs",
    lambda c: graph([2, 2], tensor(1, c=c, at=0), tensor(2, c=c, at=256, op="SQR", src=(1,))),
)
simple(
    "the same id twice",
    "graphs",
    lambda c: graph([2], tensor(1, c=c, at=0), tensor(1, c=c, at=0), tensor(2, c=c, at=256, op="SQR", src=(1,))),
)
simple("two nodes that need each other", "graphs",
       lambda c: graph([1, 2], tensor(1, c=c, at=0, op="SQR", src=(2,)), tensor(2, c=c, at=256, op="SQR", src=(1,))))  # fmt: skip
simple("a node that needs itself", "graphs", lambda c: graph([1], tensor(1, c=c, at=0, op="SQR", src=(1,))))
simple("nodes in the wrong order", "graphs",
       lambda c: graph([3, 2], tensor(1, c=c, at=0), tensor(2, c=c, at=256, op="SQR", src=(1,)),
                       tensor(3, c=c, at=512, op="SQR", src=(2,))))  # fmt: skip
simple("a view of itself", "graphs", lambda c: graph([1], tensor(1, c=c, at=0, op="VIEW", src=(1,), view_src=1)))
simple("two views of each other", "graphs",
       lambda c: graph([1], tensor(1, c=c, at=0, op="VIEW", src=(2,), view_src=2),
                       tensor(2, c=c, at=0, op="VIEW", src=(1,), view_src=1)))  # fmt: skip


@case("a chain of 60,000 sources", "graphs", then="answered")
def _(c: Context) -> bytes:
    # in order, but deep: a server that walks sources by recursion needs a stack of that depth
    one = tensor(1, c=c, at=0, ne=(1,))
    rows = np.repeat(one, 60_000)
    rows["id"] = np.arange(1, 60_001)
    rows["op"][1:] = tensor(op="SQR")["op"]
    rows["flags"][1:] = 16
    rows["src"][1:, 0] = np.arange(1, 60_000)
    return graph([60_000], rows)


@case("a chain of 60,000 sources, last one first", "graphs", then="answered")
def _(c: Context) -> bytes:
    rows = np.repeat(tensor(1, c=c, at=0, ne=(1,)), 60_000)
    rows["id"] = np.arange(60_000, 0, -1)
    rows["op"][:-1] = tensor(op="SQR")["op"]
    rows["flags"][:-1] = 16
    rows["src"][:-1, 0] = np.arange(59_999, 0, -1)
    return graph([60_000], rows)


# ---- graphs: nodes that lie


def node(name: str, kind: str, op: str | int, *sources: Mapping[str, object], then: str = "closed", before: bytes | None = None,
         params: tuple[int | float, ...] = (), **result: object) -> None:  # fmt: skip
    """A graph of one node over leaves laid out 64 KiB apart. before: bytes sent first, or what a leaf holds (``holds``)."""

    def build(c: Context) -> bytes:
        data = b""
        rows = []
        for i, fields in enumerate(sources):
            given = dict(fields)
            holds = given.pop("holds", None)
            row = tensor(i + 1, c=c, at=int(given.pop("at", i * 65536)), **given)  # type: ignore[arg-type,call-overload]
            if holds is not None:
                assert isinstance(holds, bytes)
                data += set_tensor(row, holds)
            rows.append(row)
        fields = dict(result)
        at = int(fields.pop("at", 8 * 65536))  # type: ignore[call-overload]
        src = fields.pop("src", tuple(range(1, len(rows) + 1)))
        view_of = fields.pop("view_of", None)
        if view_of is not None:
            fields |= {"view_src": view_of, "data": int(rows[int(view_of) - 1]["data"][0])}  # type: ignore[call-overload]
        rows.append(tensor(99, c=c, at=at, op=op, src=src, params=params, **fields))  # type: ignore[arg-type]
        return data + graph([99], *rows)

    CASES.append(Case(name, kind, build, then))


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


V = {"ne": (64,)}
node("operation 200", "operations", 200, V)
node("operation 2^31", "operations", 2**31, V)
node("MAP_CUSTOM1 with a function pointer", "operations", "MAP_CUSTOM1", V, params=(0x41414141, 0x4141, 1, 0, 0, 0))
node("MAP_CUSTOM2 with a function pointer", "operations", "MAP_CUSTOM2", V, V, params=(0x41414141, 0x4141, 1))
node("MAP_CUSTOM3 with a function pointer", "operations", "MAP_CUSTOM3", V, V, V, params=(0x41414141, 0x4141, 1))
node("CUSTOM with a function pointer", "operations", "CUSTOM", V, params=(0x41414141, 0x4141, 1))
node("an optimiser's step", "operations", "OPT_STEP_SGD", V, V, {"ne": (2,)})
node("FLASH_ATTN_BACK", "operations", "FLASH_ATTN_BACK", V, V, V, V)
node("the unary function 77", "parameters", "UNARY", V, params=(77,))
node("the unary function -1", "parameters", "UNARY", V, params=(-1,))
node("the GLU function 99", "parameters", "GLU", V, params=(99,), ne=(32,))
node("ADD without sources", "sources", "ADD")
node("ADD with one source", "sources", "ADD", V)
node("MUL_MAT without sources", "sources", "MUL_MAT")
node("ADD whose source stands in no buffer", "sources", "ADD", V, {"ne": (64,), "buffer": 0, "data": 0})
node("ADD whose result stands in no buffer", "sources", "ADD", V, V, buffer=0, data=0)
node("ADD whose source has a wild address", "sources", "ADD", V, {"ne": (64,), "buffer": 0, "data": 0x1000})
node("ADD whose result leaves its buffer", "sources", "ADD", V, V, at=BUFFER_BYTES - 4)
node("ADD of shapes that do not repeat", "shapes", "ADD", {"ne": (64,)}, {"ne": (48,)})
node("ADD of i32", "shapes", "ADD", {"ne": (64,), "type_": "i32"}, {"ne": (64,), "type_": "i32"}, type_="i32")
node("ADD into a smaller result", "shapes", "ADD", {"ne": (64, 64)}, {"ne": (64, 64)}, ne=(64, 1))
node(
    "ADD of a source whose rows are 2 bytes apart",
    "shapes",
    "ADD",
    {"ne": (64, 4), "nb": (4, 2, 1024, 1024)},
    V,
    ne=(64, 4),
)
node("ADD with strides of 0 over 2^31 rows", "shapes", "ADD", {"ne": (64, 2**31 - 1), "nb": (4, 0, 0, 0)}, V,
     ne=(64, 2**31 - 1), nb=(4, 0, 0, 0))  # fmt: skip
node("MUL_MAT of rows of different lengths", "shapes", "MUL_MAT", {"ne": (64, 8)}, {"ne": (4096, 2)}, ne=(8, 2))
node("MUL_MAT into a smaller result", "shapes", "MUL_MAT", {"ne": (64, 4096 // 16)}, {"ne": (64, 2)}, ne=(1, 1))
node("MUL_MAT of q8_K", "shapes", "MUL_MAT", {"ne": (256, 4), "type_": "q8_K"}, {"ne": (256, 2)}, ne=(4, 2))
node("MUL_MAT of i32", "shapes", "MUL_MAT", {"ne": (64, 4), "type_": "i32"}, {"ne": (64, 2)}, ne=(4, 2))
node(
    "MUL_MAT with an f16 second source",
    "shapes",
    "MUL_MAT",
    {"ne": (64, 4)},
    {"ne": (64, 2), "type_": "f16"},
    ne=(4, 2),
)
node(
    "MUL_MAT of a transposed matrix",
    "shapes",
    "MUL_MAT",
    {"ne": (64, 64), "nb": (256, 4, 16384, 16384)},
    {"ne": (64, 2)},
    ne=(64, 2),
)
node(
    "MUL_MAT over no matrices (a division by 0)",
    "shapes",
    "MUL_MAT",
    {"ne": (64, 4, 0)},
    {"ne": (64, 2, 2)},
    ne=(4, 2, 2),
)
node(
    "MUL_MAT with a hint for another shape",
    "parameters",
    "MUL_MAT",
    {"ne": (48, 4)},
    {"ne": (48, 2)},
    ne=(4, 2),
    params=(0, 1),
)
node("ROPE of 7 dimensions", "parameters", "ROPE", {"ne": (64, 1, 4)}, {"ne": (4,), "type_": "i32"}, ne=(64, 1, 4),
     params=(0, 7, 0, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node("ROPE of more dimensions than there are", "parameters", "ROPE", {"ne": (64, 1, 4)}, {"ne": (4,), "type_": "i32"}, ne=(64, 1, 4),
     params=(0, 4096, 0, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node("ROPE of 0 dimensions (never ends)", "parameters", "ROPE", {"ne": (64, 1, 4)}, {"ne": (4,), "type_": "i32"}, ne=(64, 1, 4),
     params=(0, 0, 0, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node("ROPE of mode 5", "parameters", "ROPE", {"ne": (64, 1, 4)}, {"ne": (4,), "type_": "i32"}, ne=(64, 1, 4),
     params=(0, 64, 5, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node("ROPE of sections without length (a division by 0)", "parameters", "ROPE", {"ne": (64, 1, 4)}, {"ne": (16,), "type_": "i32"},
     ne=(64, 1, 4), params=(0, 64, 8, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node("ROPE with fewer positions than tokens", "shapes", "ROPE", {"ne": (64, 1, 1024)}, {"ne": (4,), "type_": "i32", "at": BUFFER_BYTES - 16},
     ne=(64, 1, 1024), params=(0, 64, 0, 0, 64, 10000.0, 1.0, 0.0, 1.0))  # fmt: skip
node(
    "SOFT_MAX with a mask of one row",
    "shapes",
    "SOFT_MAX",
    {"ne": (64, 64)},
    {"ne": (64, 1)},
    ne=(64, 64),
    params=(1.0, 0.0),
)
node(
    "SOFT_MAX with a bias and no mask",
    "parameters",
    "SOFT_MAX",
    {"ne": (64, 4)},
    ne=(64, 4),
    params=(1.0, 8.0),
    src=(1,),
)
node("FLASH_ATTN_EXT with fewer values than keys", "shapes", "FLASH_ATTN_EXT", {"ne": (64, 1, 1)}, {"ne": (64, 256, 1)},
     {"ne": (64, 1, 1), "at": BUFFER_BYTES - 256}, ne=(64, 1, 1), params=(1.0,))  # fmt: skip
node("FLASH_ATTN_EXT with keys of i32", "shapes", "FLASH_ATTN_EXT", {"ne": (64, 1, 1)}, {"ne": (64, 32, 1), "type_": "i32"},
     {"ne": (64, 32, 1)}, ne=(64, 1, 1), params=(1.0,))  # fmt: skip
node("FLASH_ATTN_EXT with queries of f16", "shapes", "FLASH_ATTN_EXT", {"ne": (64, 1, 1), "type_": "f16"}, {"ne": (64, 32, 1)},
     {"ne": (64, 32, 1)}, ne=(64, 1, 1), params=(1.0,))  # fmt: skip
node("CPY into quantised rows of another length", "shapes", "CPY", {"ne": (8192,)}, {"ne": (32, 256), "type_": "q4_0"},
     type_="q4_0", ne=(32, 256), view_of=2)  # fmt: skip
node(
    "CPY of more elements than there is room for", "shapes", "CPY", {"ne": (4096,)}, {"ne": (64,)}, ne=(64,), view_of=2
)
node("CPY of i64 to f32", "shapes", "CPY", {"ne": (64,), "type_": "i64"}, {"ne": (64,)}, ne=(64,), view_of=2)
node(
    "CPY of q4_0 to f16",
    "shapes",
    "CPY",
    {"ne": (64,), "type_": "q4_0"},
    {"ne": (64,), "type_": "f16"},
    ne=(64,),
    type_="f16",
    view_of=2,
)
node("CONT of other elements", "shapes", "CONT", {"ne": (64,)}, ne=(4096,))
node("CONT of quantised columns", "shapes", "CONT", {"ne": (64, 32), "type_": "q4_0", "nb": (1152, 18, 36864, 36864)}, type_="q4_0",
     ne=(64, 32))  # fmt: skip
node("REPEAT into a result that is no multiple", "shapes", "REPEAT", {"ne": (48,)}, ne=(64,))
node("CONCAT along dimension 9", "parameters", "CONCAT", {"ne": (64,)}, {"ne": (64,)}, ne=(128,), params=(9,))
node("CONCAT into a smaller result", "shapes", "CONCAT", {"ne": (64, 64)}, {"ne": (64, 64)}, ne=(128, 1), params=(0,))
node("PERMUTE of axes 0, 0, 0, 0", "parameters", "PERMUTE", {"ne": (64, 4)}, ne=(64, 4), params=(0, 0, 0, 0), view_of=1)
node("VIEW that leaves its source", "views", "VIEW", {"ne": (64,)}, ne=(65536,), view_of=1)
node("VIEW at an offset that is not its own", "views", "VIEW", {"ne": (64,)}, ne=(16,), view_of=1, view_offs=64)
node("RESHAPE to more elements", "views", "RESHAPE", {"ne": (64,)}, ne=(4096,), view_of=1)
node("SET past its result", "parameters", "SET", {"ne": (64,)}, {"ne": (64,)}, params=(256, 256, 256, 4096, 0))
node("SET with a negative stride", "parameters", "SET", {"ne": (64,)}, {"ne": (4, 4)}, params=(-4096, 256, 256, 0, 0))
node("RMS_NORM with a negative epsilon", "parameters", "RMS_NORM", V, params=(-1.0,))
node("ARGSORT in order 7", "parameters", "ARGSORT", V, type_="i32", params=(7,))
node("TOP_K of more than there are", "parameters", "TOP_K", V, type_="i32", ne=(4096,))
node("ARANGE that does not fill its result", "parameters", "ARANGE", params=(0.0, 4.0, 1.0), ne=(64,))
node("GROUP_NORM in 0 groups", "parameters", "GROUP_NORM", {"ne": (8, 8, 4)}, ne=(8, 8, 4), params=(0, 1e-5))
node("POOL_2D in steps of 0", "parameters", "POOL_2D", {"ne": (8, 8)}, ne=(8, 8), params=(1, 2, 2, 0, 0, 0, 0))
node("POOL_2D of kind 7", "parameters", "POOL_2D", {"ne": (8, 8)}, ne=(4, 4), params=(7, 2, 2, 2, 2, 0, 0))
node(
    "SSM_CONV with a kernel longer than its rows",
    "shapes",
    "SSM_CONV",
    {"ne": (4, 64)},
    {"ne": (4096, 64), "at": 0},
    ne=(64, 1, 1),
)
node("SSM_SCAN of a state whose stride lies", "shapes", "SSM_SCAN",
     {"ne": (16, 1, 8, 1), "nb": (4, 64, 64, 1 << 19)}, {"ne": (1, 8, 1, 2)}, {"ne": (8, 1, 2)}, {"ne": (16, 8)},
     {"ne": (16, 1, 1, 2)}, {"ne": (16, 1, 1, 2)}, {"ne": (2,), "type_": "i32"}, ne=(16 + 256,), params=(1,))  # fmt: skip
node("GATED_DELTA_NET that keeps 2^31-1 snapshots", "parameters", "GATED_DELTA_NET",
     {"ne": (64, 1, 1, 1)}, {"ne": (64, 1, 1, 1)}, {"ne": (64, 1, 1, 1)}, {"ne": (1, 1, 1, 1)}, {"ne": (1, 1, 1, 1)},
     {"ne": (64, 64, 1, 1)}, ne=(64, 65), params=(2**31 - 1,))  # fmt: skip
node("RWKV_WKV6 of fewer tokens than sequences (a division by 0)", "shapes", "RWKV_WKV6",
     {"ne": (64, 1, 1)}, {"ne": (64, 1, 1)}, {"ne": (64, 1, 1)}, {"ne": (64, 1)}, {"ne": (64, 1, 1)}, {"ne": (4096, 2)},
     ne=(64, 129))  # fmt: skip
node("flags that do not exist", "parameters", "SQR", V, flags=0x7FFFFFFF)

# ---- graphs: what lies in memory

node(
    "GET_ROWS of row 10^6",
    "indices",
    "GET_ROWS",
    {"ne": (64, 8)},
    {"ne": (2,), "type_": "i32", "holds": i32(0, 10**6)},
    ne=(64, 2),
)
node(
    "GET_ROWS of row -1",
    "indices",
    "GET_ROWS",
    {"ne": (64, 8)},
    {"ne": (2,), "type_": "i32", "holds": i32(0, -1)},
    ne=(64, 2),
)
node("SET_ROWS of row 10^6", "indices", "SET_ROWS", {"ne": (64, 2)}, {"ne": (2,), "type_": "i32", "holds": i32(0, 10**6)}, {"ne": (64, 8)},
     ne=(64, 8), view_of=3)  # fmt: skip
node("MUL_MAT_ID of expert 10^6", "indices", "MUL_MAT_ID", {"ne": (64, 8, 4)}, {"ne": (64, 1, 1)},
     {"ne": (2, 1), "type_": "i32", "holds": i32(0, 10**6)}, ne=(8, 2, 1))  # fmt: skip
node("MUL_MAT_ID of expert -10^6", "indices", "MUL_MAT_ID", {"ne": (64, 8, 4)}, {"ne": (64, 1, 1)},
     {"ne": (2, 1), "type_": "i32", "holds": i32(0, -(10**6))}, ne=(8, 2, 1))  # fmt: skip
node("ADD_ID of row 10^6", "indices", "ADD_ID", {"ne": (64, 2, 1)}, {"ne": (64, 4)},
     {"ne": (2, 1), "type_": "i32", "holds": i32(0, 10**6)}, ne=(64, 2, 1))  # fmt: skip


@case("indices that nobody wrote", "indices")
def _(c: Context) -> bytes:
    fill = message(Command.BUFFER_CLEAR, wire.BUFFER_CLEAR.pack(c.ptr, 0x7F))
    table, ids = tensor(1, c=c, at=0, ne=(64, 8)), tensor(2, "i32", (2,), 65536, c=c)
    return fill + graph([3], table, ids, tensor(3, c=c, at=131072, ne=(64, 2), op="GET_ROWS", src=(1, 2)))


@case("indices that the graph itself writes over", "indices")
def _(c: Context) -> bytes:
    table, ids = tensor(1, c=c, at=0, ne=(64, 8)), tensor(2, "i32", (2,), 65536, c=c)
    first = tensor(3, c=c, at=65536, ne=(2,), op="SQR", src=(4,))  # a result on top of the indices
    rows = (
        table,
        ids,
        tensor(4, c=c, at=4096, ne=(2,)),
        first,
        tensor(5, c=c, at=131072, ne=(64, 2), op="GET_ROWS", src=(1, 2)),
    )
    big = np.array([1e9, 1e9], np.float32).tobytes()
    return set_tensor(ids, i32(0, 1)) + set_tensor(rows[2], big) + graph([3, 5], *rows)
