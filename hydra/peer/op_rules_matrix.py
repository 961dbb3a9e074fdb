"""The rules of matrix products and attention.

Same contract as op_rules.py; importing this module registers its rules.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/{ggml-cpu.c,ops.cpp} and ggml/src/ggml-cuda of llama.cpp as vendored by
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from hydra.peer.op_rules import Batch, Operand, divides, rule
from hydra.peer.ops import BF16, DEQUANTIZABLE, F16, F32, I32, QUANTIZABLE, QUANTIZED

ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_VISION, ROPE_IMROPE = 0, 2, 8, 24, 40
_PRECISIONS = (0, 10, 15, 20, 30, 40)  # enum ggml_prec
_HINT_HADAMARD = 1  # enum ggml_op_hint
_MAX_EXPERT_SLOTS = 2**28  # the CPU kernel allocates 8 bytes for each expert x selected expert x token


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
    fit = (a.ne[:, 0] == c.ne[:, 0]) & (a.ne[:, 0] > 0) & divides(c.ne[:, 2:], a.ne[:, 2:]).all(1)
    b.need(fit, "the shapes do not fit")
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
