"""Fuzzing a peer: whole sessions made up by structure, and recorded real sessions with bytes bent.

    python -m tests.hostile.fuzz [--messages N] [--seed S] [--device CPU]

A session is a list of steps that know each other's handles; most messages are in order, so that the states deep inside
are reached, and some lie in one field. The same generators run from a seeded random source (fast: CI's 20,000 messages,
and the long runs by hand) and from hypothesis (which shrinks what it finds): ``Source`` is all that they ask for.

A peer may answer or close; its device worker must not restart. A session that does restart it is named by seed and
number: --session plays exactly that one again.
"""
# ruff: noqa: E501 - the tables of operations read better a line each

from __future__ import annotations

import argparse
import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from hydra.link import frames
from hydra.peer.launch import start_peer
from hydra.peer.ops import BLOCK_SIZE, TYPE_NUMBERS, TYPE_SIZE
from hydra.rpc import wire
from hydra.rpc.wire import Command
from tests.hostile import craft, fixtures, sessions
from tests.hostile.tables import build_graph, parse_graph
from tests.peer_tools import get_json

T = TypeVar("T")
ANSWER_S = 20.0
PEER: dict[str, Any] = {"threads": 1, "max_connections": 8, "message_s": 0.3, "hello_s": 1.0, "first_byte_s": 1.0}
_U32, _U64 = 2**32 - 1, 2**64 - 1
_ODD = (
    0,
    1,
    2,
    3,
    7,
    31,
    33,
    63,
    255,
    256,
    4096,
    65535,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    _U64 - 7,
    _U64,
)


class Source(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int: ...

    def chance(self, percent: int) -> bool: ...

    def choice(self, items: Sequence[T]) -> T: ...

    def data(self, size: int) -> bytes: ...


class Random:
    """A seeded source."""

    def __init__(self, *seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high, endpoint=True, dtype=np.uint64 if low >= 0 else np.int64))

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) < percent

    def choice(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]

    def data(self, size: int) -> bytes:
        return self._rng.bytes(size)


# ---- sessions by structure

FLOATS = ("f32", "f16", "bf16")
WEIGHTS = ("f32", "f16", "q4_0", "q8_0", "q5_1", "q4_K", "q6_K", "iq4_nl", "mxfp4", "iq2_xs", "tq2_0")
ALL_TYPES = tuple(TYPE_NUMBERS)
_ALIGN = 64


@dataclass
class Place:
    """The buffer that a graph's tensors lie in, filled from the start. ptr, base: as the peer named them."""

    ptr: int
    base: int
    size: int
    used: int = 0

    def take(self, size: int) -> int:
        at = self.used
        self.used += -(-size // _ALIGN) * _ALIGN
        return at if self.used <= self.size else 0


class Sketch:
    """A graph under construction: rows by id, and the ids of its nodes."""

    def __init__(self, source: Source, place: Place, lies: bool = False) -> None:
        self.source, self.place, self.lies = source, place, lies
        self.rows: list[np.ndarray] = []
        self.nodes: list[int] = []
        self.writes: list[tuple[np.ndarray, bytes]] = []  # what leaves must hold, or (a lie) do hold

    def row(self, id_: int) -> np.ndarray:
        return self.rows[id_ - 1]

    def add(self, type_: str, ne: tuple[int, ...], op: str = "NONE", src: Sequence[int] = (), params: Sequence[float] = (),
            view_of: int = 0, offset: int = 0, **fields: Any) -> int:  # fmt: skip
        """One more tensor; a node unless ``op`` is NONE. Its id."""
        number = TYPE_NUMBERS[type_]
        shape = (*ne, 1, 1, 1)[:4]
        size = shape[0] // int(BLOCK_SIZE[number]) * int(TYPE_SIZE[number]) * shape[1] * shape[2] * shape[3]
        context = craft.Context(self.place.ptr, self.place.base, 0, 0)
        if view_of:
            of = self.row(view_of)
            root = int(of["view_src"][0]) or view_of
            offset += int(of["view_offs"][0])
            at = int(self.row(root)["data"][0]) - self.place.base + offset
            fields |= {"view_src": root, "view_offs": offset}
        else:
            at = self.place.take(size)
        id_ = len(self.rows) + 1
        self.rows.append(
            craft.tensor(id_, type_, shape, at, c=context, op=op, src=tuple(src), params=tuple(params), **fields)
        )
        if op != "NONE":
            self.nodes.append(id_)
        return id_

    def shape(self, id_: int) -> tuple[int, ...]:
        return tuple(int(n) for n in self.row(id_)["ne"][0])

    def type(self, id_: int) -> str:
        return next(name for name, number in TYPE_NUMBERS.items() if number == int(self.row(id_)["type"][0]))


def _leaf(s: Sketch, type_: str | None = None, ne: tuple[int, ...] | None = None) -> int:
    source = s.source
    type_ = type_ or source.choice(("f32", "f32", "f16"))
    block = int(BLOCK_SIZE[TYPE_NUMBERS[type_]])
    if ne is None:
        ne = (
            block * source.integer(1, max(1, 96 // block)),
            source.integer(1, 9),
            source.choice((1, 1, 2, 3)),
            source.choice((1, 1, 2)),
        )
    return s.add(type_, ne)


def _f32(s: Sketch) -> int:
    """Some f32 tensor without gaps: an earlier result, or a new leaf."""
    have = [
        i
        for i in s.nodes
        if int(s.row(i)["type"][0]) == 0 and s.row(i)["nb"][0].tolist() == list(craft.strides(0, s.shape(i)))
    ]
    return s.source.choice(have) if have and s.source.chance(60) else _leaf(s, "f32")


def _unary(s: Sketch) -> None:
    a = _f32(s)
    op, params = s.source.choice(
        [("SQR", ()), ("SQRT", ()), ("LOG", ()), ("SIN", ()), ("COS", ()), ("UNARY", (s.source.integer(0, 21),)), ("SCALE", (0.5, 1.0)),
         ("CLAMP", (-1.0, 1.0)), ("NORM", (1e-5,)), ("RMS_NORM", (1e-6,)), ("L2_NORM", (1e-6,)), ("FILL", (2.0,)), ("CUMSUM", ()),
         ("SOFT_MAX", (1.0, 0.0)), ("DUP", ()), ("CONT", ()), ("DIAG_MASK_INF", (s.source.integer(0, 4),))]
    )  # fmt: skip
    s.add("f32", s.shape(a), op, (a,), params)


def _reduce(s: Sketch) -> None:
    a = _f32(s)
    ne = s.shape(a)
    op = s.source.choice(("SUM", "SUM_ROWS", "MEAN", "ARGSORT", "TOP_K"))
    if op == "SUM":
        s.add("f32", (1,), op, (a,))
    elif op in ("SUM_ROWS", "MEAN"):
        s.add("f32", (1, *ne[1:]), op, (a,))
    elif op == "ARGSORT":
        s.add("i32", ne, op, (a,), (s.source.integer(0, 1),))
    else:
        s.add("i32", (s.source.integer(1, ne[0]), *ne[1:]), op, (a,))


def _binary(s: Sketch) -> None:
    a = _f32(s)
    ne = tuple(n if s.source.chance(60) else 1 for n in s.shape(a))
    s.add("f32", s.shape(a), s.source.choice(("ADD", "SUB", "MUL", "DIV")), (a, _leaf(s, "f32", ne)))


def _glu(s: Sketch) -> None:
    a = _f32(s)
    ne = s.shape(a)
    which = s.source.integer(0, 6)
    if s.source.chance(50) and ne[0] > 1:
        s.add("f32", (ne[0] // 2, *ne[1:]), "GLU", (a,), (which, s.source.integer(0, 1)))
    else:
        s.add("f32", ne, "GLU", (a, _leaf(s, "f32", ne)), (which, 0, 1.7, 7.0))


def _mul_mat(s: Sketch) -> None:
    type_ = s.source.choice(WEIGHTS)
    block = int(BLOCK_SIZE[TYPE_NUMBERS[type_]])
    k, n, m = block * s.source.integer(1, 2), s.source.integer(1, 40), s.source.integer(1, 9)
    heads, share = s.source.choice((1, 1, 2)), s.source.choice((1, 2))
    a = s.add(type_, (k, n, heads))
    s.add(
        "f32", (n, m, heads * share), "MUL_MAT", (a, s.add("f32", (k, m, heads * share))), (s.source.choice((0, 10)),)
    )


def _mul_mat_id(s: Sketch) -> None:
    experts, used, tokens = s.source.integer(2, 5), s.source.integer(1, 2), s.source.integer(1, 5)
    type_ = s.source.choice(WEIGHTS)
    k, n = int(BLOCK_SIZE[TYPE_NUMBERS[type_]]), s.source.integer(1, 20)
    order = s.add("i32", (experts, tokens), "ARGSORT", (s.add("f32", (experts, tokens)),), (1,))
    ids = s.add(
        "i32",
        (used, tokens),
        "VIEW",
        (order,),
        view_of=order,
        nb=(4, 4 * experts, 4 * experts * tokens, 4 * experts * tokens),
    )
    weights = s.add(type_, (k, n, experts))
    s.add("f32", (n, used, tokens), "MUL_MAT_ID", (weights, s.add("f32", (k, 1, tokens)), ids))


def _rope(s: Sketch) -> None:
    width, heads, tokens = 2 * s.source.integer(1, 40), s.source.integer(1, 3), s.source.integer(1, 5)
    mode = s.source.choice((0, 2, 8, 40))
    dims = 2 * s.source.integer(1, width // 2)
    positions = s.add("i32", (tokens * (4 if mode & 8 else 1),))
    sections = (max(1, width // 4), width // 4, width // 4, 0) if mode & 8 else (0, 0, 0, 0)
    a = s.add("f32", (width, heads, tokens))
    s.add("f32", (width, heads, tokens), "ROPE", (a, positions),
          (0, dims, mode, 0, 64, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, *sections))  # fmt: skip


def _attention(s: Sketch) -> None:
    type_ = s.source.choice(("f16", "f32", "q8_0", "q4_0"))
    size, kv, heads, tokens = (
        32 * s.source.integer(1, 4),
        s.source.integer(1, 40),
        s.source.integer(1, 2),
        s.source.integer(1, 5),
    )
    q = s.add("f32", (size, tokens, heads * 2))
    k, v = s.add(type_, (size, kv, heads)), s.add(type_, (size, kv, heads))
    src = [q, k, v]
    if s.source.chance(60):
        src.append(s.add("f16", (kv, tokens + s.source.integer(0, 3))))
    s.add(
        "f32",
        (size, heads * 2, tokens),
        "FLASH_ATTN_EXT",
        src,
        (0.1, 0.0, s.source.choice((0.0, 30.0)), s.source.choice((0, 10))),
    )


def _views(s: Sketch) -> None:
    a = _f32(s)
    ne = s.shape(a)
    nb = [int(n) for n in s.row(a)["nb"][0]]
    kind = s.source.choice(("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))
    if kind == "RESHAPE":
        view = s.add("f32", (ne[0] * ne[1], ne[2], ne[3]), kind, (a,), view_of=a)
    elif kind == "VIEW":
        rows = s.source.integer(1, ne[1])
        skip = (ne[1] - rows) * nb[1]
        view = s.add("f32", (ne[0], rows, ne[2], ne[3]), kind, (a,), (skip, 0), view_of=a, offset=skip, nb=nb)
    elif kind == "PERMUTE":
        axes = [0, 1, 2, 3]
        i, j = s.source.integer(0, 3), s.source.integer(0, 3)
        axes[i], axes[j] = axes[j], axes[i]
        shape, strides = [0] * 4, [0] * 4
        for old, new in enumerate(axes):
            shape[new], strides[new] = ne[old], nb[old]
        view = s.add("f32", tuple(shape), kind, (a,), axes, view_of=a, nb=strides)
    else:
        view = s.add("f32", (ne[1], ne[0], *ne[2:]), kind, (a,), view_of=a, nb=(nb[1], nb[0], *nb[2:]))
    s.add("f32", s.shape(view), "CONT", (view,))


def _copies(s: Sketch) -> None:
    kind = s.source.choice(("cast", "quantize", "concat", "repeat", "pad"))
    if kind == "cast":
        a = _leaf(s, s.source.choice(FLOATS))
        id_ = len(s.rows) + 1
        s.add(s.source.choice(FLOATS), s.shape(a), "CPY", (a, id_))
    elif kind == "quantize":
        type_ = s.source.choice(("q4_0", "q8_0", "q5_1", "iq4_nl", "q4_K"))
        ne = (int(BLOCK_SIZE[TYPE_NUMBERS[type_]]) * 2, s.source.integer(1, 6))
        a, target = s.add("f32", ne), s.add(type_, ne)
        s.add(type_, ne, "CPY", (a, target), view_of=target)
    elif kind == "concat":
        a = _f32(s)
        dim = s.source.integer(0, 3)
        other = tuple(n if d != dim else s.source.integer(1, 5) for d, n in enumerate(s.shape(a)))
        result = tuple(x + y if d == dim else x for d, (x, y) in enumerate(zip(s.shape(a), other, strict=True)))
        s.add("f32", result, "CONCAT", (a, _leaf(s, "f32", other)), (dim,))
    elif kind == "repeat":
        a = _f32(s)
        s.add("f32", tuple(n * s.source.integer(1, 3) for n in s.shape(a)), "REPEAT", (a,))
    else:
        a = _f32(s)
        edges = [s.source.integer(0, 2) for _ in range(8)]
        s.add("f32", tuple(n + edges[2 * d] + edges[2 * d + 1] for d, n in enumerate(s.shape(a))), "PAD", (a,), edges)


def _recurrent(s: Sketch) -> None:
    if s.source.chance(50):
        kernel, width, tokens = 4, s.source.integer(1, 40), s.source.integer(1, 5)
        x, c = s.add("f32", (kernel - 1 + tokens, width)), s.add("f32", (kernel, width))
        s.add("f32", (width, tokens), "SSM_CONV", (x, c))
    else:
        size, heads, tokens, keep = (
            16 * s.source.integer(1, 4),
            s.source.integer(1, 2),
            s.source.integer(1, 4),
            s.source.integer(1, 3),
        )
        src = [s.add("f32", (size, heads, tokens)) for _ in range(3)]
        src += [s.add("f32", (1, heads, tokens)) for _ in range(2)]
        src.append(s.add("f32", (size, size, heads)))
        s.add("f32", (size * heads, tokens + keep * size), "GATED_DELTA_NET", src, (keep,))


def _rows(s: Sketch) -> None:
    """GET_ROWS or SET_ROWS by indices that the client writes: nearly always such as there are."""
    width, count, picked = 32 * s.source.integer(1, 2), s.source.integer(1, 9), s.source.integer(1, 5)
    wide = s.source.chance(40)
    ids = s.add("i64" if wide and s.source.chance(50) else "i32", (picked,))
    values = [s.source.integer(0, count - 1) for _ in range(picked)]
    if s.lies and s.source.chance(50):
        values[0] = s.source.choice(_ODD) & 0x7FFFFFFF
    s.writes.append((s.row(ids), np.array(values, "<i8" if s.type(ids) == "i64" else "<i4").tobytes()))
    if s.type(ids) == "i32" and s.source.chance(60):
        table = s.add(s.source.choice(("f32", "f16", "q8_0", "q4_0", "i32")), (width, count))
        s.add("i32" if s.type(table) == "i32" else "f32", (width, picked), "GET_ROWS", (table, ids))
    else:
        type_ = s.source.choice(("f32", "f16", "q8_0", "q4_0"))
        rows, target = s.add("f32", (width, picked)), s.add(type_, (width, count))
        s.add(type_, (width, count), "SET_ROWS", (rows, ids, target), view_of=target)


def _state_space(s: Sketch) -> None:
    kind = s.source.choice(("scan", "wkv6", "wkv7", "gla"))
    tokens, seqs, heads = s.source.integer(1, 4), s.source.integer(1, 2), s.source.integer(1, 2)
    if kind == "scan":
        state, dim, keep = 16 * s.source.integer(1, 2), s.source.integer(1, 5), s.source.integer(1, 3)
        ids = s.add("i32", (seqs,))
        s.writes.append((s.row(ids), np.arange(seqs, dtype="<i4").tobytes()))
        scalar = keep > 1 or s.source.chance(50)
        src = [
            s.add("f32", (state, dim, heads, seqs)), s.add("f32", (dim, heads, tokens, seqs)), s.add("f32", (heads, tokens, seqs)),
            s.add("f32", (1 if scalar else state, heads)), s.add("f32", (state, 1, tokens, seqs)), s.add("f32", (state, 1, tokens, seqs)), ids,
        ]  # fmt: skip
        s.add("f32", (dim * heads * tokens * seqs + keep * state * dim * heads * seqs,), "SSM_SCAN", src, (keep,))
        return
    size, tokens = 64, tokens * seqs
    count = {"wkv6": 3, "wkv7": 6, "gla": 4}[kind]
    src = [s.add("f32", (size, heads, tokens)) for _ in range(count)]
    if kind == "wkv6":
        src += [s.add("f32", (size, heads)), s.add("f32", (size, heads, tokens))]
    src.append(s.add("f32", (size * size * heads, seqs)))
    op = {"wkv6": "RWKV_WKV6", "wkv7": "RWKV_WKV7", "gla": "GATED_LINEAR_ATTN"}[kind]
    s.add("f32", (size * heads, tokens + size * seqs), op, src, (0.5,) if kind == "gla" else ())


def _squares(s: Sketch) -> None:
    n, k = s.source.integer(1, 12), s.source.integer(1, 5)
    kind = s.source.choice(("TRI", "DIAG", "SOLVE_TRI", "ARGMAX", "ARANGE", "SET", "ADD_ID", "GROUP_NORM"))
    a = s.add("f32", (n, n))
    if kind == "TRI":
        s.add("f32", (n, n), kind, (a,), (s.source.integer(0, 3),))
    elif kind == "DIAG":
        s.add("f32", (n, n), kind, (s.add("f32", (n,)),))
    elif kind == "SOLVE_TRI":
        s.add("f32", (k, n), kind, (a, s.add("f32", (k, n))))
    elif kind == "ARGMAX":
        s.add("i32", (n,), kind, (a,))
    elif kind == "ARANGE":
        s.add("f32", (n,), kind, (), (0.0, float(n), 1.0))
    elif kind == "SET":
        rows = s.source.integer(1, n)
        s.add("f32", (n, n), kind, (a, s.add("f32", (n, rows))), (4 * n, 4 * n * n, 4 * n * n, 4 * n * (n - rows), 0))
    elif kind == "ADD_ID":
        ids = s.add("i32", (2, k))
        s.writes.append((s.row(ids), np.arange(2 * k, dtype="<i4").clip(0, n - 1).tobytes()))
        s.add("f32", (n, 2, k), kind, (s.add("f32", (n, 2, k)), a, ids))
    else:
        b = s.add("f32", (n, k, 4))
        s.add("f32", (n, k, 4), kind, (b,), (s.source.integer(1, 4), 1e-5))


def _images(s: Sketch) -> None:
    width, height, channels = s.source.integer(4, 12), s.source.integer(4, 12), s.source.integer(1, 3)
    a = s.add("f32", (width, height, channels))
    kind = s.source.choice(
        ("POOL_1D", "POOL_2D", "UPSCALE", "PAD_REFLECT_1D", "ROLL", "IM2COL", "CONV_2D", "CONV_2D_DW", "COL2IM_1D")
    )
    step, pad, size = s.source.integer(1, 3), s.source.integer(0, 1), s.source.integer(1, 3)
    if kind == "POOL_1D":
        s.add(
            "f32",
            ((width + 2 * pad - size) // step + 1, height, channels),
            kind,
            (a,),
            (s.source.integer(0, 1), size, step, pad),
        )
    elif kind == "POOL_2D":
        out = [(n + 2 * pad - size) // step + 1 for n in (width, height)]
        s.add("f32", (*out, channels), kind, (a,), (s.source.integer(0, 1), size, size, step, step, pad, pad))
    elif kind == "UPSCALE":
        mode = s.source.choice((0, 1, 2, 256, 257, 258, 513))
        s.add(
            "f32",
            (s.source.integer(1, 30), s.source.integer(1, 30), channels * s.source.integer(1, 2)),
            kind,
            (a,),
            (mode,),
        )
    elif kind == "PAD_REFLECT_1D":
        left, right = s.source.integer(0, width - 1), s.source.integer(0, width - 1)
        s.add("f32", (width + left + right, height, channels), kind, (a,), (left, right))
    elif kind == "ROLL":
        s.add(
            "f32",
            (width, height, channels),
            kind,
            (a,),
            [s.source.integer(0, n - 1) for n in (width, height, channels)],
        )
    elif kind == "COL2IM_1D":
        crop = s.source.integer(0, 1)
        length = (height - 1) * step + width - 2 * crop
        if length > 0:
            s.add("f32", (length, 2), kind, (s.add("f32", (width * 2, height)),), (step, 2, crop))
    else:
        out = [(n + 2 * pad - (size - 1) - 1) // step + 1 for n in (width, height)]
        params = (step, step, pad, pad, 1, 1)
        type_ = s.source.choice(("f32", "f16"))
        if kind == "IM2COL":
            kernel = s.add(type_, (size, size, channels, 2))
            s.add(type_, (size * size * channels, *out), kind, (kernel, a), (*params, 1))
        elif kind == "CONV_2D":
            s.add("f32", (*out, 2), kind, (s.add(type_, (size, size, channels, 2)), a), params)
        else:
            s.add("f32", (*out, channels), kind, (s.add(type_, (size, size, 1, channels)), a), params)


def _mixing(s: Sketch) -> None:
    width, tokens, streams = s.source.integer(1, 20), s.source.integer(1, 4), 4
    kind = s.source.choice(("DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST", "LIGHTNING_INDEXER"))
    if kind == "DSV4_HC_COMB":
        src = [s.add("f32", (24, tokens)), s.add("f32", (3,)), s.add("f32", (24,))]
        s.add("f32", (4, 4, tokens), kind, src, (1e-6, s.source.integer(1, 5)))
    elif kind == "DSV4_HC_PRE":
        gated = s.source.integer(0, 1)
        weights = s.add("f32", (width, streams, tokens) if gated else (streams, tokens))
        s.add("f32", (width, tokens), kind, (s.add("f32", (width, streams, tokens)), weights), (1.0, gated))
    elif kind == "DSV4_HC_POST":
        src = [s.add("f32", (width, tokens)), s.add("f32", (width, streams, tokens)), s.add("f32", (streams, tokens))]
        if s.source.chance(60):
            src.append(s.add("f32", (streams, streams, tokens)))
        s.add("f32", (width, streams, tokens), kind, src)
    else:
        size, heads, kv = 32, s.source.integer(1, 3), s.source.integer(1, 20)
        type_ = s.source.choice(("f32", "f16", "q8_0"))
        src = [
            s.add("f32", (size, heads, tokens)),
            s.add(type_, (size, 1, kv)),
            s.add("f32", (heads, tokens)),
            s.add("f16", (kv, tokens)),
        ]
        s.add("f32", (kv, tokens), kind, src)


_PIECES: tuple[Callable[[Sketch], None], ...] = (
    _unary, _unary, _binary, _binary, _reduce, _glu, _mul_mat, _mul_mat_id, _rope, _attention, _views, _views, _copies, _recurrent, _rows, _rows, _state_space, _squares, _images, _mixing,
)  # fmt: skip


def bend_row(source: Source, row: np.ndarray, ids: Sequence[int]) -> None:
    """One field of one rpc_tensor becomes something else."""
    name = source.choice(
        (
            "type",
            "ne",
            "nb",
            "op",
            "op_params",
            "src",
            "view_src",
            "view_offs",
            "data",
            "buffer",
            "flags",
            "id",
            "use_count",
        )
    )
    column = row[name]
    flat = column.reshape(-1)
    at = source.integer(0, len(flat) - 1)
    bits = flat.dtype.itemsize * 8
    old = int(flat[at]) & (2**bits - 1)
    new = source.choice((
        source.choice(_ODD), old + 1, old - 1, old * 2, old // 2, old ^ (1 << source.integer(0, bits - 1)), source.integer(0, 2**bits - 1),
        source.choice(list(ids) or [0]), source.integer(0, 110),
    ))  # fmt: skip
    flat.view(np.uint64 if bits == 64 else np.uint32)[at] = new & (2**bits - 1)


def make_graph(source: Source, place: Place, bend: bool) -> tuple[bytes, Sketch]:
    """A GRAPH_COMPUTE payload of some operations, in order or (``bend``) with some lies; and where it came from."""
    place.used = 0
    sketch = Sketch(source, place, bend)
    for _ in range(source.integer(1, 8)):
        source.choice(_PIECES)(sketch)
    rows = np.concatenate(sketch.rows)
    nodes = list(sketch.nodes)
    if bend:
        for _ in range(source.choice((1, 1, 1, 2, 4))):
            at = source.integer(0, len(rows) - 1)
            bend_row(source, rows[at : at + 1], [int(i) for i in rows["id"]])
        if source.chance(10):
            nodes.append(source.choice([*nodes, 0, 2**64 - 1]))
        if source.chance(10):
            nodes.reverse()
    return build_graph(nodes, rows), sketch


# ---- playing sessions


@dataclass
class Tally:
    """What a run sent and what became of it."""

    messages: int = 0
    sessions: int = 0
    closed: int = 0
    graphs: int = 0
    commands: dict[str, int] = field(default_factory=dict)

    def count(self, cmd: int) -> None:
        self.messages += 1
        self.graphs += cmd == Command.GRAPH_COMPUTE
        name = wire.command_name(cmd)
        self.commands[name] = self.commands.get(name, 0) + 1


class Wire:
    """One connection, spoken by hand. Raises ConnectionError when the peer has closed it."""

    def __init__(self, host: str, port: int, tally: Tally) -> None:
        self.sock = socket.create_connection((host, port), timeout=ANSWER_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tally = tally

    def send(self, cmd: int, payload: bytes = b"", announce: int | None = None) -> None:
        self.tally.count(cmd)
        self.sock.sendall(craft.message(cmd, payload, announce))

    def reply(self) -> bytes:
        (size,) = struct.unpack("<Q", self.exactly(8))
        if size > 1 << 28:
            raise AssertionError(f"the peer announces a reply of {size} bytes")
        return self.exactly(size)

    def call(self, cmd: int, payload: bytes = b"") -> bytes:
        self.send(cmd, payload)
        return self.reply() if cmd in wire.REPLY_SIZES else b""

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("closed by the peer")
            data += piece
        return bytes(data)

    def finish(self) -> None:
        """Says that nothing more comes, and waits until the peer has done with what came."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise ConnectionResetError("closed by the peer") from error
        while self.sock.recv(1 << 16):
            pass

    def close(self) -> None:
        self.sock.close()


def structured_session(source: Source, w: Wire) -> None:
    """One made-up session, up to its end or to the message that the peer closes it for."""
    w.call(Command.HELLO, bytes(wire.CAPS_SIZE))
    places: list[Place] = []

    def new_buffer() -> None:
        size = source.choice((1 << 20, 1 << 20, 3 << 20, 4096))
        ptr, real = struct.unpack("<QQ", w.call(Command.ALLOC_BUFFER, wire.ALLOC_BUFFER.pack(0, size)))
        if ptr:
            base = struct.unpack("<Q", w.call(Command.BUFFER_GET_BASE, struct.pack("<Q", ptr)))[0]
            places.append(Place(ptr, base, real))

    new_buffer()
    rows: list[np.ndarray] = []
    for _ in range(source.integer(3, 30)):
        bend = source.chance(6)
        place = source.choice(places) if places else Place(1, 2, 3)
        context = craft.Context(place.ptr, place.base, 0, 0)
        kind = source.integer(0, 99)
        if kind < 34:
            big = [p for p in places if p.size >= 1 << 20]
            if big:
                payload, sketch = make_graph(source, source.choice(big), bend)
                rows = sketch.rows
                for row, data in sketch.writes:
                    w.send(Command.SET_TENSOR, row.tobytes() + wire.SET_TENSOR_TAIL.pack(0, 0) + data)
                w.send(Command.GRAPH_COMPUTE, payload)
        elif kind < 44:
            if rows or bend:
                w.send(Command.GRAPH_RECOMPUTE, struct.pack("<I", source.choice(_ODD) & _U32 if bend else 0))
        elif kind < 48:
            new_buffer()
        elif kind < 51 and len(places) > 1:
            gone = places.pop(source.integer(0, len(places) - 1))
            w.send(Command.FREE_BUFFER, struct.pack("<Q", gone.ptr))
            rows = []
            if bend:
                places.append(gone)
        elif kind < 53:
            w.call(source.choice((Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.GET_DEVICE_MEMORY)),
                   struct.pack("<I", source.choice(_ODD) & _U32 if bend else 0))  # fmt: skip
        elif kind < 55:
            value = source.integer(0, 255)
            w.send(
                Command.BUFFER_CLEAR, wire.BUFFER_CLEAR.pack(place.ptr ^ (source.choice(_ODD) if bend else 0), value)
            )
        elif kind < 57 and bend:
            size = source.integer(0, 700)
            w.send(source.integer(0, 255), source.data(size), source.choice((size, *_ODD)))
            w.call(Command.DEVICE_COUNT)
        else:
            _transfer(source, w, context, place, rows, bend)
    w.finish()


def _transfer(source: Source, w: Wire, c: craft.Context, place: Place, rows: list[np.ndarray], bend: bool) -> None:
    if rows and source.chance(50):
        row = source.choice(rows).copy()
    else:
        type_ = source.choice(ALL_TYPES)
        ne = (int(BLOCK_SIZE[TYPE_NUMBERS[type_]]) * source.integer(1, 3), source.integer(1, 4))
        row = craft.tensor(1, type_, ne, 64 * source.integer(0, 8), c=c)
    number = int(row["type"][0])
    shape = [int(n) for n in row["ne"][0]]
    extent = shape[0] // int(BLOCK_SIZE[number]) * int(TYPE_SIZE[number]) * shape[1] * shape[2] * shape[3]
    offset = source.integer(0, extent)
    size = min(source.integer(0, extent - offset), 1 << 16)
    if bend and source.chance(70):
        bend_row(source, row, ())
    elif bend:
        offset, size = source.choice((*_ODD, offset)), source.choice((*_ODD, size))
    data = row.tobytes()
    kind = source.integer(0, 6)
    if kind <= 2:
        w.send(Command.SET_TENSOR, data + wire.SET_TENSOR_TAIL.pack(0, offset & _U64) + source.data(min(size, 1 << 16)))
    elif kind == 3:
        w.call(Command.GET_TENSOR, data + wire.OFFSET_SIZE.pack(offset & _U64, size & _U64))
    elif kind == 4:
        w.send(Command.MEMSET_TENSOR, data + wire.MEMSET_TAIL.pack(offset & _U64, size & _U64, source.integer(0, 255)))
    elif kind == 5:
        other = row.copy()
        other["data"] += np.uint64(64 * source.integer(0, 8))
        if int(other["data"][0]) - place.base + extent <= place.size or bend:
            w.call(Command.COPY_TENSOR, data + other.tobytes())
    else:
        w.send(Command.INIT_TENSOR, data)


def bent_session(source: Source, w: Wire, recorded: sessions.Session) -> None:
    """A recorded session with the peer's own handles, and bytes bent in one or two of its messages."""
    which = {source.integer(1, len(recorded.requests) - 1) for _ in range(source.choice((1, 1, 2)))}
    player = sessions.Player(recorded)
    for number, (cmd, payload) in enumerate(recorded.requests):
        payload = player.translate(cmd, payload)
        announce = None
        if number in which:
            how = source.integer(0, 9)
            if how == 0:
                continue
            if how == 1:
                w.send(cmd, payload)
                if cmd in wire.REPLY_SIZES:
                    w.reply()
            elif how == 2:
                payload = payload[: source.integer(0, len(payload))]
            elif how == 3:
                announce = source.choice(_ODD)
            else:
                payload = _bend_bytes(source, payload)
        w.send(cmd, payload, announce)
        if cmd in wire.REPLY_SIZES:
            player.learn(number, w.reply())
    w.finish()


def _bend_bytes(source: Source, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(source.choice((1, 1, 2, 8))):
        if data:
            size = min(source.choice((1, 1, 2, 4, 8)), len(data))
            at = source.integer(0, len(data) - size)
            if source.chance(50):
                data[at : at + size] = source.data(size)
            else:
                data[at] ^= 1 << source.integer(0, 7)
    return bytes(data)


def graph_session(source: Source, w: Wire, recorded: fixtures.Recorded) -> None:
    """A recorded graph over buffers of zeros, with fields of some rows bent, a few times over."""
    w.call(Command.HELLO, bytes(wire.CAPS_SIZE))
    places = {}
    for handle, (base, size) in recorded.buffers.items():
        ptr = struct.unpack("<QQ", w.call(Command.ALLOC_BUFFER, wire.ALLOC_BUFFER.pack(0, size)))[0]
        w.send(Command.BUFFER_CLEAR, wire.BUFFER_CLEAR.pack(ptr, 0))
        places[handle] = (ptr, struct.unpack("<Q", w.call(Command.BUFFER_GET_BASE, struct.pack("<Q", ptr)))[0] - base)
    ids, rows = parse_graph(recorded.payload)
    for handle, (ptr, shift) in places.items():
        at = rows["buffer"] == handle
        rows["data"][at] = (rows["data"][at].astype(object) + shift).astype(np.uint64)
        rows["buffer"][at] = ptr
    w.send(Command.GRAPH_COMPUTE, build_graph(ids, rows))
    w.send(Command.GRAPH_RECOMPUTE, bytes(4))
    w.call(Command.DEVICE_COUNT)
    for _ in range(source.integer(1, 4)):
        bent = rows.copy()
        for _ in range(source.choice((1, 1, 3))):
            at = source.integer(0, len(bent) - 1)
            bend_row(source, bent[at : at + 1], [int(i) for i in rows["id"][:50]])
        w.send(Command.GRAPH_COMPUTE, build_graph(ids, bent))
        w.call(Command.DEVICE_COUNT)
    w.finish()


def linked_session(source: Source, w: Wire) -> None:
    """The link's opening, and frames of which some are bent: kept messages, patches, halves, numbers out of nowhere."""
    opening = frames.Hello(flags=source.integer(0, 3), slots=source.choice((0, 4, 512)), silence_ms=5000)
    w.sock.sendall(_bend_bytes(source, opening.pack()) if source.chance(5) else opening.pack())
    w.exactly(frames.HELLO.size)
    questions = [(Command.DEVICE_COUNT, b""), (Command.GET_ALIGNMENT, bytes(4)), (Command.GET_DEVICE_MEMORY, bytes(4))]
    parts = [frames.LENGTH.pack(frames.Up.PLAIN, len(craft.HELLO)) + craft.HELLO]
    w.tally.count(Command.HELLO)
    kept: list[tuple[int, bytes]] = []
    for _ in range(source.integer(2, 30)):
        cmd, payload = source.choice(questions)
        plain = craft.message(cmd, payload)
        kind = source.integer(0, 6)
        if kind == 0 or not kept:
            slot = source.integer(0, 3)
            kept.append((slot, plain))
            frame = frames.KEEP.pack(frames.Up.KEEP, slot, len(plain)) + plain
        elif kind == 1:
            frame = frames.SLOT.pack(frames.Up.SAME, source.choice(kept)[0])
        elif kind == 2:
            slot, old = kept[-1]
            at = source.integer(0, len(old) - 1)
            frame = frames.PATCH.pack(frames.Up.PATCH, slot, 1) + struct.pack("<II", at, len(old) - at) + old[at:]
        elif kind == 3:
            frame = frames.LENGTH.pack(frames.Up.HALVE, source.integer(0, 9))
        elif kind == 4 and source.chance(20):
            frame = frames.LENGTH.pack(frames.Up.HALF, 2 * source.integer(0, 50)) + source.data(100)
        else:
            frame = frames.LENGTH.pack(frames.Up.PLAIN, len(plain)) + plain
        w.tally.count(cmd)
        parts.append(_bend_bytes(source, frame) if source.chance(4) else frame)
    for part in parts:
        w.sock.sendall(part)
    w.finish()


class Fuzzer:
    """Plays numbered sessions of one seed against one peer."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.tally = Tally()
        self.recorded = [fixtures.load(name) for name in fixtures.names()]
        self.recorded = [r for r in self.recorded if len(r.payload) < 100_000]
        self.sessions = sessions.load_all()

    def play(self, source: Source) -> None:
        """One session; a peer that closes the connection has done its duty."""
        w = Wire(self.host, self.port, self.tally)
        self.tally.sessions += 1
        try:
            kind = source.integer(0, 99)
            if kind < 5:
                linked_session(source, w)
            elif kind < 60:
                structured_session(source, w)
            elif kind < 80:
                graph_session(source, w, source.choice(self.recorded))
            else:
                bent_session(source, w, source.choice(self.sessions))
        except ConnectionError:
            self.tally.closed += 1
        finally:
            w.close()

    def run(self, seed: int, messages: int, restarts: Callable[[], int], report: Callable[[str], None]) -> list[str]:
        """Sessions 0, 1, … of a seed until so many messages are sent; the ones that restarted the worker."""
        number, guilty, before, checked = 0, [], restarts(), 0
        stop = self.tally.messages + messages
        while self.tally.messages < stop:
            with contextlib.suppress(TimeoutError):
                self.play(Random(seed, number))
            number += 1
            if number - checked >= 25 or self.tally.messages >= stop:
                now = restarts()
                if now > before:
                    guilty += self._name(seed, range(checked, number), restarts)
                    before = restarts()
                checked = number
                report(f"seed {seed}: {self.tally.messages} messages in {self.tally.sessions} sessions, restarts {now}")
        return guilty

    def _name(self, seed: int, numbers: range, restarts: Callable[[], int]) -> list[str]:
        """Which of these sessions it was: each again, alone, waiting for the worker in between."""
        found = []
        before = restarts()
        for number in numbers:
            with contextlib.suppress(OSError):
                self.play(Random(seed, number))
            time.sleep(0.3)
            now = restarts()
            if now > before:
                found.append(f"seed {seed} session {number}")
                before = now
                time.sleep(2.0)
        return found or [f"seed {seed} sessions {numbers.start} to {numbers.stop - 1}, not again when alone"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--session", type=int, default=None, help="only this session of the seed")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--log", action="store_true", help="show the peer's log")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else int.from_bytes(np.random.bytes(4), "little")
    started = time.monotonic()
    with start_peer(device=options.device, quiet=not options.log, **PEER) as process:
        fuzzer = Fuzzer(process.host, process.port)

        def restarts() -> int:
            return int(get_json(process.port, "/health")["restarts"])

        def report(line: str) -> None:
            sys.stderr.write(f"\r{line}")

        if options.session is not None:
            fuzzer.play(Random(seed, options.session))
            guilty = [f"seed {seed} session {options.session}"] * restarts()
        else:
            guilty = fuzzer.run(seed, options.messages, restarts, report)
        tally = fuzzer.tally
        sys.stderr.write("\n")
        print(
            f"seed {seed}: {tally.messages} messages ({tally.graphs} graphs) in {tally.sessions} sessions, {tally.closed} closed "
            f"by the peer, {restarts()} worker restarts, {time.monotonic() - started:.0f} s"
        )
        for line in guilty:
            print(line)
    return 1 if guilty else 0


if __name__ == "__main__":
    sys.exit(main())
