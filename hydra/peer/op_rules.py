"""One rule for each operation: what ggml's constructor for it accepts and what its kernels take for granted.

A rule sees all nodes of its operation in one graph at once (a Batch) and never a pointer, an offset into a buffer or a
byte of data. It asks for what the constructor asserts, for the result that the constructor would have made, and for
whatever the CPU and CUDA kernels assume without asserting it: those are noted with the reason. An operation without a
rule is refused: all that carry a pointer (CUSTOM, MAP_CUSTOM*), and those of training.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/{ggml-cpu.c,ops.cpp,binary-ops.cpp,unary-ops.cpp} and ggml/src/ggml-cuda of
llama.cpp as vendored by llama-cpp-python 0.3.36.

This module is what a rule is made of. The rules are in op_rules_memory.py, op_rules_math.py, op_rules_matrix.py
(attention too), op_rules_recurrent.py and op_rules_image.py; hydra.peer.rules imports them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from hydra.errors import ProtocolError
from hydra.peer.ops import (
    OP,
    OP_COUNT,
    op_name,
)

if TYPE_CHECKING:
    from hydra.peer.rules import Layout, TensorTable

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Verdict = NDArray[np.bool_] | np.bool_
MAX_SRC = 10

ALLOWED: Mask = np.zeros(OP_COUNT, np.bool_)
REQUIRED: Mask = np.zeros((OP_COUNT, MAX_SRC), np.bool_)
POSSIBLE: Mask = np.zeros((OP_COUNT, MAX_SRC), np.bool_)
_RULES: dict[int, Callable[[Batch], None]] = {}

# Operations whose device buffer may be larger than the tensor, so that GET_ALLOC_SIZE is asked with their sources.
# Source: ggml-backend.cpp ggml_op_alloc_size_may_expand.
SIZED_BY_SOURCES = frozenset(
    OP[name] for name in ("FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID", "CUMSUM", "ARGSORT", "TOP_K")
)


class Operand:
    """One tensor of each node of a batch: m rows of the graph's columns."""

    def __init__(self, t: TensorTable, layout: Layout, rows: Ints) -> None:
        self._t, self._layout, self.rows = t, layout, rows

    @cached_property
    def type(self) -> Ints:
        return self._layout.type[self.rows]

    @cached_property
    def ne(self) -> Ints:  # [m, 4]
        return self._t.ne[self.rows]

    @cached_property
    def nb(self) -> Ints:  # [m, 4]
        return self._layout.nb[self.rows]

    @cached_property
    def elements(self) -> Ints:
        return self._layout.elements[self.rows]

    @property
    def extent(self) -> Ints:
        return self._layout.extent[self.rows]

    @property
    def contiguous(self) -> Mask:
        return self._layout.contiguous[self.rows]

    @property
    def contiguous_1(self) -> Mask:
        return self._layout.contiguous_1[self.rows]

    @property
    def contiguous_rows(self) -> Mask:
        return self._layout.contiguous_rows[self.rows]

    @property
    def unit(self) -> Mask:
        """nb[0] is the type's size."""
        return self._layout.unit[self.rows]

    @property
    def natural(self) -> Mask:
        return self._layout.natural[self.rows]

    @property
    def fresh(self) -> Mask:
        """What ggml_new_tensor makes: memory of its own, no gaps."""
        return self.natural & (self._t.view_src[self.rows] < 0)

    @property
    def root(self) -> Ints:
        return self._layout.root[self.rows]

    @property
    def root_offs(self) -> Ints:
        return self._layout.root_offs[self.rows]

    @property
    def vector(self) -> Mask:
        return (self.ne[:, 1:] == 1).all(1)

    @property
    def matrix(self) -> Mask:
        return (self.ne[:, 2:] == 1).all(1)

    def is_type(self, *types: int) -> Mask:
        ok = self.type == types[0]
        for type_ in types[1:]:
            ok |= self.type == type_
        return ok

    def among(self, types: Mask) -> Mask:
        return types[self.type]


class Batch:
    """All nodes of one operation in a graph: rows i64[m] of its columns, positions i64[m] in the execution order."""

    def __init__(self, t: TensorTable, layout: Layout, op: int, rows: Ints, positions: Ints) -> None:
        self.t, self.layout, self.op, self.rows, self.positions = t, layout, op, rows, positions
        self.dst = Operand(t, layout, rows)

    def src(self, slot: int) -> Operand:
        """A source that every node of the batch has."""
        return Operand(self.t, self.layout, self.t.src[self.rows, slot])

    def having(self, slot: int) -> Batch | None:
        """The nodes that have this optional source, or None where none does."""
        mask = self.t.src[self.rows, slot] >= 0
        return self.where(mask) if mask.any() else None

    def where(self, mask: Mask) -> Batch:
        return self if mask.all() else Batch(self.t, self.layout, self.op, self.rows[mask], self.positions[mask])

    def param(self, word: int) -> Ints:
        return self.t.op_params[self.rows, word].astype(np.int64)

    def fparam(self, word: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.t.op_params[self.rows, word]).view(np.float32)

    def need(self, ok: Verdict, why: str) -> None:
        if not ok.all():
            self._fail(int(np.argmin(ok)), why)

    def _fail(self, at: int, why: str) -> NoReturn:
        row = int(self.rows[at])
        t = self.t
        parts = [f"result {t.describe(row)}"]
        parts += [f"source {slot} {t.describe(int(s))}" for slot, s in enumerate(t.src[row]) if s >= 0]
        params = t.op_params[row].tolist()
        while params and params[-1] == 0:
            params.pop()
        raise ProtocolError(
            f"Graph node {int(self.positions[at])}, {op_name(self.op)} (tensor {row}): {why}; "
            + "; ".join(parts)
            + f"; parameters {params}.",
            "Close this connection; its client is not a working ggml-RPC client of this release.",
        )

    def needs_type(self, operand: Operand, types: Mask, what: str) -> None:
        self.need(operand.among(types), f"{what} has a type that this operation does not take")

    def makes(self, type_: Ints | int, *ne: Ints | int) -> None:
        """The result is a new tensor of this type and shape (missing dimensions are 1)."""
        dst = self.dst
        self.need(dst.type == type_, "the result's type is not what this operation makes")
        ok = np.ones(len(self.rows), np.bool_)
        for dim in range(4):
            ok &= dst.ne[:, dim] == (ne[dim] if dim < len(ne) else 1)
        self.need(ok, "the result's shape is not what this operation makes")
        self.need(dst.fresh, "the result is not a new tensor without gaps")

    def makes_like(self, a: Operand, inplace: bool = True) -> None:
        """The result is a new tensor like ``a``, or (ggml_view_tensor) ``a`` itself."""
        dst = self.dst
        self.need(dst.type == a.type, "the result's type is not its source's")
        self.need(same_shape(dst, a), "the result's shape is not its source's")
        ok = dst.fresh
        if inplace:
            ok = ok | is_view_of(dst, a)
        self.need(ok, "the result is neither a new tensor without gaps nor its source in place")


def same_shape(a: Operand, b: Operand) -> Mask:
    ok: Mask = (a.ne == b.ne).all(1)
    return ok


def is_view_of(dst: Operand, a: Operand) -> Mask:
    """dst is ggml_view_tensor(a): the same memory, shape and strides."""
    ok: Mask = (dst.root == a.root) & (dst.root_offs == a.root_offs) & (dst.ne == a.ne).all(1) & (dst.nb == a.nb).all(1)
    return ok


def divides(whole: Ints, part: Ints) -> Mask:
    """part > 0 and whole is a multiple of it: a kernel divides by it."""
    ok: Mask = (part > 0) & (whole % np.maximum(part, 1) == 0)
    return ok


def can_repeat(small: Operand, big: Operand) -> Mask:
    ok: Mask = divides(big.ne, small.ne).all(1) | ((small.elements == 0) & (big.elements == 0))
    return ok


def check(batch: Batch) -> None:
    """Raises: ProtocolError for the first node of the batch that its rule refuses."""
    _RULES[batch.op](batch)


def rule(
    *names: str, sources: int, optional: tuple[int, ...] = ()
) -> Callable[[Callable[[Batch], None]], Callable[[Batch], None]]:
    """Registers the rule of operations that take ``sources`` tensors and may take those of the ``optional`` slots."""

    def register(function: Callable[[Batch], None]) -> Callable[[Batch], None]:
        for name in names:
            number = OP[name]
            _RULES[number] = function
            ALLOWED[number] = True
            REQUIRED[number, :sources] = True
            POSSIBLE[number, :sources] = True
            POSSIBLE[number, list(optional)] = True
        return function

    return register
