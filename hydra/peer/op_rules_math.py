"""The rules of arithmetic element by element, and of sums, norms and orders.

Same contract as op_rules.py; importing this module registers its rules.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/{ops,binary-ops,unary-ops}.cpp of llama.cpp as vendored by
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from hydra.peer.op_rules import Batch, Operand, can_repeat, divides, is_view_of, rule, same_shape
from hydra.peer.ops import BF16, F16, F32, FLOATS, GLU_NAMES, I32, TYPE_COUNT, UNARY_NAMES

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
