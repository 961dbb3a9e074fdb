"""The rules of what only describes, copies or moves memory: views, copies, rows picked and placed.

Same contract as op_rules.py; importing this module registers its rules.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/ops.cpp of llama.cpp as vendored by
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from hydra.peer.op_rules import MAX_SRC, Batch, Operand, can_repeat, divides, is_view_of, rule, same_shape
from hydra.peer.ops import DEQUANTIZABLE, F16, F32, FLOATS, I32, I64, QUANTIZABLE, QUANTIZED, type_set


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
