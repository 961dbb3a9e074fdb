"""One rule for each operation: what ggml's constructor for it accepts and what its kernels take for granted.

A rule sees all nodes of its operation in one graph at once (a Batch) and never a pointer, an offset into a buffer or a
byte of data. It asks for what the constructor asserts, for the result that the constructor would have made, and for
whatever the CPU and CUDA kernels assume without asserting it: those are noted with the reason. An operation without a
rule is refused: all that carry a pointer (CUSTOM, MAP_CUSTOM*), and those of training.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/{ggml-cpu.c,ops.cpp,binary-ops.cpp,unary-ops.cpp} and ggml/src/ggml-cuda of
llama.cpp as vendored by llama-cpp-python 0.3.36. The rules of convolutions and images are in op_rules_image.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from hydra.errors import ProtocolError
from hydra.peer.ops import (
    BF16,
    DEQUANTIZABLE,
    F16,
    F32,
    FLOATS,
    GLU_NAMES,
    I32,
    I64,
    OP,
    OP_COUNT,
    QUANTIZABLE,
    QUANTIZED,
    TYPE_COUNT,
    UNARY_NAMES,
    op_name,
    type_set,
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

ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_VISION, ROPE_IMROPE = 0, 2, 8, 24, 40
_PRECISIONS = (0, 10, 15, 20, 30, 40)  # enum ggml_prec
_HINT_HADAMARD = 1  # enum ggml_op_hint
_MAX_EXPERT_SLOTS = 2**28  # the CPU kernel allocates 8 bytes for each expert x selected expert x token


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
    def nrows(self) -> Ints:
        return self.ne[:, 1] * self.ne[:, 2] * self.ne[:, 3]

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
    def contiguous_2(self) -> Mask:
        return self._layout.contiguous_2[self.rows]

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


# ---- memory: what only describes, copies or moves it


@rule("NONE", sources=0, optional=tuple(range(MAX_SRC)))
def _none(b: Batch) -> None:
    pass


@rule("RESHAPE", sources=1)
def _reshape(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    b.need(a.contiguous, "its source has gaps")
    b.need((dst.type == a.type) & (dst.elements == a.elements), "the result has another type or number of elements")
    b.need((dst.root == a.root) & (dst.root_offs == a.root_offs) & dst.natural, "the result does not lie on its source")


@rule("VIEW", sources=1)
def _view(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    b.need((dst.type == a.type) & dst.unit, "the result has another type or element stride")
    low, high = b.t.op_params[b.rows, 0].astype(np.uint32), b.t.op_params[b.rows, 1].astype(np.uint32)
    offset = low.astype(np.int64) | (high.astype(np.int64) << 32)
    b.need((dst.root == a.root) & (dst.root_offs == a.root_offs + offset), "the offset is not the view's")


@rule("PERMUTE", sources=1)
def _permute(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    axes = b.t.op_params[b.rows, :4].astype(np.int64)
    b.need((np.sort(axes, 1) == np.arange(4)).all(1), "the axes are not an order of 0 to 3")
    at = np.arange(len(b.rows))[:, None]
    b.need((dst.ne[at, axes] == a.ne).all(1) & (dst.nb[at, axes] == a.nb).all(1), "the result is not so permuted")
    b.need(
        (dst.type == a.type) & (dst.root == a.root) & (dst.root_offs == a.root_offs), "the result is another tensor's"
    )


@rule("TRANSPOSE", sources=1)
def _transpose(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    swapped = [1, 0, 2, 3]
    b.need((dst.ne == a.ne[:, swapped]).all(1) & (dst.nb == a.nb[:, swapped]).all(1), "the result is not so transposed")
    b.need(
        (dst.type == a.type) & (dst.root == a.root) & (dst.root_offs == a.root_offs), "the result is another tensor's"
    )


def _copies(b: Batch, a: Operand, dst: Operand) -> None:
    """The copy kernels: which conversions exist, and where their rows must be whole.

    Source: ops.cpp ggml_compute_forward_dup*. The quantising kernel's work row is as long as the *result's* first
    dimension; the byte copy of quantised tensors with gaps walks rows as if a block were one element.
    """
    b.need(a.elements == dst.elements, "the source and the result have different numbers of elements")
    same = a.type == dst.type
    to_quantized = a.among(FLOATS) & dst.among(QUANTIZABLE)
    from_quantized = a.among(QUANTIZED & DEQUANTIZABLE) & (dst.type == F32)
    numbers = (a.among(FLOATS) & dst.among(FLOATS)) | (a.is_type(F32, I32) & dst.is_type(F32, I32))
    b.need(same | to_quantized | from_quantized | numbers, "there is no conversion between these types")
    whole = (a.contiguous & dst.contiguous) | (same_shape(a, dst) & a.unit & dst.unit)
    b.need(~(same & a.among(QUANTIZED)) | whole, "blocks with gaps are copied only to the same shape")
    whole = a.unit & dst.unit & (a.ne[:, 0] == dst.ne[:, 0])
    whole &= dst.contiguous if b.t.is_cpu else same_shape(a, dst) | dst.contiguous
    b.need(~(to_quantized & ~same) | whole, "quantising needs whole rows and a result without gaps")
    # one block after the other is written as a run of floats, so no run may cross a row of the result
    blocks = dst.contiguous | (dst.ne[:, 0] % 256 == 0) | (dst.ne[:, 0] == a.ne[:, 0])
    b.need(~(from_quantized & ~same) | (dst.unit & blocks), "dequantising needs whole rows in the result")


@rule("CPY", sources=2)
def _cpy(b: Batch) -> None:
    a, target, dst = b.src(0), b.src(1), b.dst
    cast = b.t.src[b.rows, 1] == b.rows  # ggml_cast: its own second source
    b.need(np.where(cast, dst.fresh, is_view_of(dst, target)), "the result is not the tensor that is copied to")
    b.need(dst.type == target.type, "the result's type is not the target's")
    b.need(~cast | same_shape(a, dst), "a cast keeps the shape")
    _copies(b, a, dst)


@rule("CONT", sources=1)
def _cont(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    b.need(dst.type == a.type, "the result's type is not its source's")
    b.need(dst.fresh, "the result is not a new tensor without gaps")
    _copies(b, a, dst)


@rule("DUP", sources=1)
def _dup(b: Batch) -> None:
    a = b.src(0)
    b.makes_like(a)
    _copies(b, a, b.dst)


_REPEATABLE = type_set("f32", "f16", "bf16", "i16", "i32")


@rule("REPEAT", sources=1)
def _repeat(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    b.needs_type(a, _REPEATABLE, "the source")
    b.need(a.unit, "the source's rows have gaps")
    b.need((dst.type == a.type) & dst.fresh, "the result is not a new tensor of its source's type")
    b.need(can_repeat(a, dst), "the result is not a whole number of copies")


@rule("CONCAT", sources=2)
def _concat(b: Batch) -> None:
    a, c, dst, dim = b.src(0), b.src(1), b.dst, b.param(0)
    b.need((dim >= 0) & (dim < 4), "the dimension is not 0 to 3")
    b.need((a.type == c.type) & (dst.type == a.type), "the types differ")
    joined = np.arange(4) == dim[:, None]
    b.need((joined | (a.ne == c.ne)).all(1), "the other dimensions differ")
    b.need((dst.ne == np.where(joined, a.ne + c.ne, a.ne)).all(1) & dst.fresh, "the result is not the two joined")
    # types without a kernel of their own are copied by rows
    by_element = a.among(_REPEATABLE | type_set("i8"))
    b.need(by_element | (a.contiguous_rows & c.contiguous_rows), "rows of this type may have no gaps")


@rule("SET", sources=2)
def _set(b: Batch) -> None:
    a, c = b.src(0), b.src(1)
    b.need(a.is_type(F32, I32) & (c.type == a.type), "the types are not the same of f32 and i32")
    b.makes_like(a)
    b.need(a.contiguous & b.dst.contiguous & c.unit, "a tensor has gaps")
    params = b.t.op_params[b.rows, :4].astype(np.int64)
    b.need((params >= 0).all(1), "a stride or the offset is negative")
    reach = params[:, 3] + 4 * c.ne[:, 0] + ((c.ne[:, 1:] - 1).clip(0) * params[:, :3]).sum(1)
    b.need((reach <= b.dst.extent) | (c.elements == 0), "it writes outside its result")


_ROW_SOURCES = DEQUANTIZABLE | type_set("i32")


@rule("GET_ROWS", sources=2)
def _get_rows(b: Batch) -> None:
    a, ids = b.src(0), b.src(1)
    b.needs_type(a, _ROW_SOURCES, "the table")
    b.need((ids.type == I32) & ids.unit, "the indices are not rows of i32")
    b.need(a.unit, "the table's rows have gaps")
    b.need(
        (a.ne[:, 2] == ids.ne[:, 1]) & (a.ne[:, 3] == ids.ne[:, 2]) & (ids.ne[:, 3] == 1),
        "the indices do not fit the table",
    )
    b.makes(np.where(a.type == I32, I32, F32), a.ne[:, 0], ids.ne[:, 0], ids.ne[:, 1], ids.ne[:, 2])


_ROW_TARGETS = FLOATS | QUANTIZABLE


@rule("SET_ROWS", sources=3)
def _set_rows(b: Batch) -> None:
    rows, ids, target, dst = b.src(0), b.src(1), b.src(2), b.dst
    b.need(rows.is_type(F32, F16), "the rows are neither f32 nor f16")
    b.needs_type(target, _ROW_TARGETS, "the target")
    b.need(ids.is_type(I32, I64) & ids.unit, "the indices are not rows of i32 or i64")
    b.need(rows.unit & target.unit, "rows have gaps")
    b.need((dst.type == target.type) & is_view_of(dst, target), "the result is not its target in place")
    b.need((target.ne[:, [0, 2, 3]] == rows.ne[:, [0, 2, 3]]).all(1), "the rows do not fit the target")
    b.need(
        (rows.ne[:, 1] == ids.ne[:, 0])
        & divides(rows.ne[:, 2], ids.ne[:, 1])
        & divides(rows.ne[:, 3], ids.ne[:, 2])
        & (ids.ne[:, 3] == 1),
        "the indices do not fit the rows",
    )


# ---- arithmetic, element by element

_BINARY_TYPES = np.zeros((TYPE_COUNT, TYPE_COUNT, TYPE_COUNT), np.bool_)  # [source 0, source 1, result]
for _types in (
    (F32, F32, F32),
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (BF16, F32, BF16),
    (BF16, F32, F32),
    (F16, F32, F16),
    (F16, F32, F32),
):
    _BINARY_TYPES[_types] = True


@rule("ADD", "SUB", "MUL", "DIV", sources=2)
def _binary(b: Batch) -> None:
    a, c, dst = b.src(0), b.src(1), b.dst
    b.need(_BINARY_TYPES[a.type, c.type, dst.type], "there is no kernel for these types")
    b.need(a.unit, "source 0's rows have gaps")
    b.need(can_repeat(c, a), "source 1 does not repeat over source 0")
    b.need(same_shape(dst, a), "the result's shape is not source 0's")
    b.need(dst.fresh | ((dst.type == a.type) & is_view_of(dst, a)), "the result is neither new nor source 0 in place")


@rule("ADD_ID", sources=3)
def _add_id(b: Batch) -> None:
    a, c, ids = b.src(0), b.src(1), b.src(2)
    b.need((a.type == F32) & (c.type == F32) & (ids.type == I32), "the types are not f32, f32 and i32")
    b.need(a.unit & c.unit & ids.unit, "rows have gaps")
    b.need(
        (a.ne[:, 0] == c.ne[:, 0]) & (a.ne[:, 1] == ids.ne[:, 0]) & (a.ne[:, 2] == ids.ne[:, 1]),
        "the shapes do not fit",
    )
    b.makes_like(a, inplace=False)


def _unary_types(b: Batch, a: Operand) -> None:
    dst = b.dst
    b.needs_type(a, FLOATS, "the source")
    b.need(a.unit, "the source's rows have gaps")
    b.makes_like(a)
    b.need(dst.unit, "the result's rows have gaps")


@rule("SQR", "SQRT", "LOG", "SIN", "COS", sources=1)
def _function(b: Batch) -> None:
    _unary_types(b, b.src(0))


@rule("UNARY", sources=1)
def _unary(b: Batch) -> None:
    which = b.param(0)
    b.need((which >= 0) & (which < len(UNARY_NAMES)), "its function is unknown")
    a = b.src(0)
    _unary_types(b, a)
    b.need((which != UNARY_NAMES.index("XIELU")) | a.contiguous_1, "XIELU's source has gaps between its rows")


_GLU_F32_ONLY = GLU_NAMES.index("SWIGLU_OAI")
_GLU_NO_BF16 = GLU_NAMES.index("SWIGLU_CLAMP")


@rule("GLU", sources=1, optional=(1,))
def _glu(b: Batch) -> None:
    a, which, swapped = b.src(0), b.param(0), b.param(1)
    b.need((which >= 0) & (which < len(GLU_NAMES)), "its function is unknown")
    b.need((swapped >= 0) & (swapped <= 1), "its order is neither 0 nor 1")
    b.needs_type(a, FLOATS, "the source")
    b.need((which != _GLU_F32_ONLY) | (a.type == F32), "this function takes f32 only")
    b.need((which != _GLU_NO_BF16) | (a.type != BF16), "this function does not take bf16")
    b.need(a.contiguous_1 & a.unit, "the source has gaps")
    alone = b.t.src[b.rows, 1] < 0
    width = np.where(alone, a.ne[:, 0] // 2, a.ne[:, 0])
    b.makes(a.type, width, a.ne[:, 1], a.ne[:, 2], a.ne[:, 3])
    pair = b.having(1)
    if pair is not None:
        first, second = pair.src(0), pair.src(1)
        pair.need((first.type == second.type) & same_shape(first, second), "the two sources differ")
        pair.need(second.contiguous_1 & second.unit, "source 1 has gaps")


@rule("SCALE", sources=1)
def _scale(b: Batch) -> None:
    a = b.src(0)
    b.need(a.is_type(F32, BF16), "the source is neither f32 nor bf16")
    b.makes_like(a)
    b.need(a.contiguous & b.dst.contiguous, "a tensor has gaps")


@rule("CLAMP", sources=1)
def _clamp(b: Batch) -> None:
    a = b.src(0)
    b.need(a.is_type(F32, F16), "the source is neither f32 nor f16")
    b.makes_like(a)
    # the kernel steps through all rows by nb[1] alone
    b.need(a.unit & a.contiguous_1 & b.dst.unit & b.dst.contiguous_1, "a tensor has gaps")


@rule("FILL", sources=1)
def _fill(b: Batch) -> None:
    a = b.src(0)
    b.need(a.is_type(F32, F16) & a.contiguous, "the source is not f32 or f16 without gaps")
    b.makes_like(a)


@rule("ARANGE", sources=0)
def _arange(b: Batch) -> None:
    start, stop, step = b.fparam(0), b.fparam(1), b.fparam(2)
    with np.errstate(all="ignore"):
        steps = np.ceil((stop - start) / step)
    sane = np.isfinite(steps) & (stop > start) & (step > 0) & (steps < 2**31)
    b.need(sane, "start, stop and step make no range")
    b.makes(F32, steps.astype(np.int64))


# ---- sums, norms, order


@rule("SUM", sources=1)
def _sum(b: Batch) -> None:
    a = b.src(0)
    b.needs_type(a, FLOATS, "the source")
    b.need(a.unit, "the source's rows have gaps")
    b.makes(a.type, 1)


@rule("SUM_ROWS", "MEAN", sources=1)
def _sum_rows(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.unit, "the source is not rows of f32")
    b.makes(F32, 1, a.ne[:, 1], a.ne[:, 2], a.ne[:, 3])


@rule("CUMSUM", sources=1)
def _cumsum(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.unit, "the source is not rows of f32")
    b.makes_like(a, inplace=False)


@rule("ARGMAX", sources=1)
def _argmax(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.contiguous & a.unit & a.matrix, "the source is not a matrix of f32 without gaps")
    b.makes(I32, a.ne[:, 1])


@rule("ARGSORT", sources=1)
def _argsort(b: Batch) -> None:
    a, order = b.src(0), b.param(0)
    b.need((order >= 0) & (order <= 1), "its order is neither 0 nor 1")
    # the kernel steps through all rows by nb[1] alone
    b.need((a.type == F32) & a.unit & a.contiguous_1, "the source is not f32 without gaps")
    b.makes(I32, *a.ne.T)


@rule("TOP_K", sources=1)
def _top_k(b: Batch) -> None:
    a, dst = b.src(0), b.dst
    b.need((a.type == F32) & a.unit & a.contiguous_1, "the source is not f32 without gaps")
    b.need(dst.ne[:, 0] <= a.ne[:, 0], "it asks for more than there are")
    b.makes(I32, dst.ne[:, 0], a.ne[:, 1], a.ne[:, 2], a.ne[:, 3])


@rule("NORM", "RMS_NORM", "L2_NORM", sources=1)
def _norm(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.unit, "the source is not rows of f32")
    b.need(b.fparam(0) >= 0, "epsilon is negative")
    b.makes_like(a)


@rule("GROUP_NORM", sources=1)
def _group_norm(b: Batch) -> None:
    a, groups = b.src(0), b.param(0)
    b.need((a.type == F32) & a.unit & a.contiguous, "the source is not f32 without gaps")
    b.need((groups > 0) & (groups <= np.maximum(a.ne[:, 2], 1)), "there are more groups than channels, or none")
    b.makes_like(a)


@rule("SOFT_MAX", sources=1, optional=(1, 2))
def _soft_max(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.contiguous & a.unit, "the source is not f32 without gaps")
    b.makes_like(a)
    b.need(b.dst.contiguous, "the result has gaps")
    b.need(~(b.fparam(1) > 0) | (b.t.src[b.rows, 1] >= 0), "a bias needs a mask")
    masked = b.having(1)
    if masked is not None:
        first, mask = masked.src(0), masked.src(1)
        masked.need(mask.is_type(F16, F32) & mask.contiguous & mask.unit, "the mask is not f16 or f32 without gaps")
        masked.need((mask.ne[:, 0] == first.ne[:, 0]) & (mask.ne[:, 1] >= first.ne[:, 1]), "the mask is too small")
        masked.need(divides(first.ne[:, 2:], mask.ne[:, 2:]).all(1), "the mask does not repeat over its source")
    sunk = b.having(2)
    if sunk is not None:
        sinks = sunk.src(2)
        sunk.need((sinks.type == F32) & sinks.unit & (sinks.ne[:, 0] == sunk.src(0).ne[:, 2]), "the sinks do not fit")


@rule("DIAG_MASK_INF", sources=1)
def _diag_mask(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.contiguous & a.unit, "the source is not f32 without gaps")
    b.need(b.param(0) >= 0, "the number of past positions is negative")
    b.makes_like(a)


@rule("DIAG", sources=1)
def _diag(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.contiguous & a.unit & (a.ne[:, 1] == 1), "the source is not one row of f32")
    b.makes(F32, a.ne[:, 0], a.ne[:, 0], a.ne[:, 2], a.ne[:, 3])


@rule("TRI", sources=1)
def _tri(b: Batch) -> None:
    a, which = b.src(0), b.param(0)
    b.need((a.type == F32) & a.contiguous & a.unit & (a.ne[:, 0] == a.ne[:, 1]), "the source is not square f32")
    b.need((which >= 0) & (which <= 3), "its triangle is unknown")
    b.makes_like(a, inplace=False)


@rule("SOLVE_TRI", sources=2)
def _solve_tri(b: Batch) -> None:
    a, c = b.src(0), b.src(1)
    b.need((a.type == F32) & (c.type == F32) & a.natural & c.natural, "the sources are not f32 without gaps")
    b.need((a.ne[:, 0] == a.ne[:, 1]) & (a.ne[:, 1:] == c.ne[:, 1:]).all(1), "the shapes do not fit")
    b.makes(F32, *c.ne.T)


# ---- matrices

_MATRIX_TYPES = DEQUANTIZABLE


def _matrix_pair(b: Batch, a: Operand, c: Operand) -> None:
    b.needs_type(a, _MATRIX_TYPES, "the matrix")
    b.need(a.unit & c.unit, "rows have gaps")
    # rows that run into each other are what ggml_is_transposed refuses
    b.need(a.nb[:, 0] <= a.nb[:, 1], "the matrix is transposed")
    for word in (0, 3):
        b.need(np.isin(b.param(word), _PRECISIONS), "its precision is unknown")


@rule("MUL_MAT", sources=2)
def _mul_mat(b: Batch) -> None:
    a, c, hint = b.src(0), b.src(1), b.param(1)
    _matrix_pair(b, a, c)
    hadamard = hint == _HINT_HADAMARD
    b.need((hint == 0) | hadamard, "its hint is unknown")
    same = (c.type == a.type) & c.is_type(F16, BF16)
    widened = (c.type == BF16) & (a.type == F32)
    transform = hadamard & (a.type == F32) & (c.type == F16)
    b.need((c.type == F32) | same | widened | transform, "there is no kernel for these types")
    b.need((a.ne[:, 0] == c.ne[:, 0]) & divides(c.ne[:, 2:], a.ne[:, 2:]).all(1), "the shapes do not fit")
    # the transform never reads the matrix: it takes a power of two for granted and writes as many as it reads
    power = (c.ne[:, 0] > 0) & (c.ne[:, 0] & (c.ne[:, 0] - 1) == 0)
    square = (a.ne[:, 1] == a.ne[:, 0]) & (a.ne[:, 2:] == 1).all(1)
    b.need(~hadamard | (power & square & c.is_type(F32, F16)), "the Hadamard transform is not of a power of two")
    b.makes(F32, a.ne[:, 1], c.ne[:, 1], c.ne[:, 2], c.ne[:, 3])


@rule("MUL_MAT_ID", sources=3)
def _mul_mat_id(b: Batch) -> None:
    experts, c, ids = b.src(0), b.src(1), b.src(2)
    _matrix_pair(b, experts, c)
    b.need((c.type == F32) | ((c.type == experts.type) & c.is_type(F16, BF16)), "there is no kernel for these types")
    b.need((ids.type == I32) & ids.unit & ids.matrix, "the indices are not a matrix of i32")
    b.need((experts.ne[:, 3] == 1) & (c.ne[:, 3] == 1), "the experts or the rows have a fourth dimension")
    b.need(
        (ids.ne[:, 1] == c.ne[:, 2]) & (experts.ne[:, 0] == c.ne[:, 0]) & divides(ids.ne[:, 0], c.ne[:, 1]),
        "the shapes do not fit",
    )
    slots = experts.ne[:, 2].astype(np.float64) * ids.ne[:, 0] * ids.ne[:, 1]
    b.need((experts.ne[:, 2] > 0) & (slots <= _MAX_EXPERT_SLOTS), "there are too many experts, or none")
    b.makes(F32, experts.ne[:, 1], ids.ne[:, 0], c.ne[:, 2], 1)


# ---- attention


@rule("ROPE", "ROPE_BACK", sources=2, optional=(2,))
def _rope(b: Batch) -> None:
    a, pos = b.src(0), b.src(1)
    n_dims, mode, n_offs = b.param(1), b.param(2), b.param(15)
    b.need(a.is_type(F32, F16) & a.unit, "the source is not rows of f32 or f16")
    b.makes_like(a)
    b.need(np.isin(mode, (ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_VISION, ROPE_IMROPE)), "its mode is unknown")
    width = a.ne[:, 0]
    # n_dims = 0 never ends in the CPU kernel, and an odd width writes one element past the row
    b.need((n_dims > 0) & (n_dims % 2 == 0) & (width % 2 == 0), "the width or the rotated part is odd or empty")
    b.need((n_offs >= 0) & (n_offs % 2 == 0) & (n_offs + n_dims <= width), "the rotated part is outside the row")
    many = (mode & ROPE_MROPE) != 0
    sections = b.t.op_params[b.rows, 11:15].astype(np.int64)
    in_range = ((sections >= 0) & (sections <= width[:, None])).all(1) & (sections.sum(1) <= width)
    b.need(~many | (in_range & (sections[:, :3] > 0).any(1)), "its sections do not fit the row")
    b.need((mode != ROPE_VISION) | ((n_dims * 2 == width) & (n_offs == 0)), "vision rotates half the row")
    b.need((pos.type == I32) & pos.unit & pos.vector, "the positions are not a row of i32")
    b.need(pos.ne[:, 0] == a.ne[:, 2] * np.where(many, 4, 1), "the positions do not fit the tokens")
    scaled = b.having(2)
    if scaled is not None:
        factors = scaled.src(2)
        scaled.need((factors.type == F32) & factors.unit, "the frequency factors are not a row of f32")
        scaled.need(factors.ne[:, 0] * 2 >= scaled.param(1), "there are too few frequency factors")


@rule("FLASH_ATTN_EXT", sources=3, optional=(3, 4))
def _flash_attn(b: Batch) -> None:
    q, k, v = b.src(0), b.src(1), b.src(2)
    b.need(q.type == F32, "the queries are not f32")
    b.needs_type(k, DEQUANTIZABLE, "the keys")
    b.needs_type(v, DEQUANTIZABLE, "the values")
    b.need(~k.among(QUANTIZED) | k.among(QUANTIZABLE), "queries cannot be converted to the keys' type")
    b.need(q.unit & k.unit & v.unit, "rows have gaps")
    b.need((q.ne[:, 0] == k.ne[:, 0]) & (k.ne[:, 1] == v.ne[:, 1]), "queries, keys and values do not fit")
    b.need(
        divides(q.ne[:, 2], k.ne[:, 2]) & divides(q.ne[:, 2], v.ne[:, 2]), "the heads do not repeat over the queries'"
    )
    b.need((q.ne[:, 3] == k.ne[:, 3]) & (q.ne[:, 3] == v.ne[:, 3]) & (q.ne[:, 3] > 0), "the streams differ")
    b.need(np.isin(b.param(3), (0, 10)), "its precision is unknown")
    b.need(b.param(4) >= 0, "the number of keys is negative")
    b.need(~(b.fparam(1) > 0) | (b.t.src[b.rows, 3] >= 0), "a bias needs a mask")
    b.makes(F32, v.ne[:, 0], q.ne[:, 2], q.ne[:, 1], q.ne[:, 3])
    masked = b.having(3)
    if masked is not None:
        queries, keys, mask = masked.src(0), masked.src(1), masked.src(3)
        masked.need((mask.type == F16) & mask.contiguous & mask.unit, "the mask is not f16 without gaps")
        masked.need((mask.ne[:, 0] >= keys.ne[:, 1]) & (mask.ne[:, 1] >= queries.ne[:, 1]), "the mask is too small")
        masked.need(divides(queries.ne[:, 2:], mask.ne[:, 2:]).all(1), "the mask does not repeat over the queries")
    sunk = b.having(4)
    if sunk is not None:
        sinks = sunk.src(4)
        sunk.need((sinks.type == F32) & sinks.unit & (sinks.ne[:, 0] == sunk.src(0).ne[:, 2]), "the sinks do not fit")


@rule("LIGHTNING_INDEXER", sources=4)
def _lightning_indexer(b: Batch) -> None:
    q, k, w, mask = b.src(0), b.src(1), b.src(2), b.src(3)
    b.need((q.type == F32) & (w.type == F32) & (mask.type == F16), "the types are not f32, f32 and f16")
    b.needs_type(k, DEQUANTIZABLE, "the keys")
    b.need(q.unit & k.unit & w.unit & mask.unit, "rows have gaps")
    b.need((q.ne[:, 0] == k.ne[:, 0]) & (k.ne[:, 1] == 1) & (q.ne[:, 3] == k.ne[:, 3]), "queries and keys do not fit")
    b.need(
        (w.ne[:, 0] == q.ne[:, 1]) & (w.ne[:, 1] == q.ne[:, 2]) & (w.ne[:, 2] == 1) & (w.ne[:, 3] == k.ne[:, 3]),
        "the weights do not fit",
    )
    b.need(
        (mask.ne[:, 0] == k.ne[:, 2])
        & (mask.ne[:, 1] == q.ne[:, 2])
        & (mask.ne[:, 2] == 1)
        & divides(w.ne[:, 3], mask.ne[:, 3]),
        "the mask does not fit",
    )
    b.makes(F32, k.ne[:, 2], q.ne[:, 2], 1, q.ne[:, 3])
