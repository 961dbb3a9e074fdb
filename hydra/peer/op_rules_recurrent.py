"""The rules of the operations that carry a state from token to token, and of DeepSeek's mixing of residual streams.

Same contract as op_rules.py, which holds the rest; importing this module registers its rules. Their kernels index their
sources as flat rows of f32, so what is asked for here beyond the constructors is mostly that nothing has gaps and that
every source has the shape that the kernel's indices assume.

Source: ggml/src/ggml.c, ggml/src/ggml-cpu/ops.cpp and ggml/src/ggml-cuda/{ssm-*,wkv,gla,gated_delta_net,dsv4-hc}.cu of
llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from hydra.peer.op_rules import Batch, Operand, divides, rule
from hydra.peer.ops import F32, I32

_MAX_ITERATIONS = 10_000
_WKV_HEAD_SIZES = (64, 128)  # CUDA asserts these two; the CPU kernels run vectors past the end of other sizes


def _all_f32(b: Batch, *operands: Operand) -> None:
    for operand in operands:
        b.need(operand.type == F32, "a source is not f32")


@rule("SSM_CONV", sources=2)
def _ssm_conv(b: Batch) -> None:
    x, c = b.src(0), b.src(1)
    _all_f32(b, x, c)
    b.need(x.unit & (x.nb[:, 1] == x.ne[:, 0] * 4) & c.natural, "the rows or the kernel have gaps")
    b.need((x.ne[:, 3] == 1) & c.matrix & (c.ne[:, 1] == x.ne[:, 1]), "the shapes do not fit")
    tokens = x.ne[:, 0] - c.ne[:, 0] + 1
    b.need((tokens >= 0) & (c.ne[:, 0] > 0), "the kernel is longer than the rows")
    b.makes(F32, x.ne[:, 1], tokens, x.ne[:, 2])


@rule("SSM_SCAN", sources=7)
def _ssm_scan(b: Batch) -> None:
    s, x, dt, a, bb, c, ids = (b.src(slot) for slot in range(7))
    _all_f32(b, s, x, dt, a, bb, c)
    b.need((ids.type == I32) & ids.unit & ids.vector, "the sequence ids are not a row of i32")
    # the kernel steps through its *result* by the state's strides, those of dimensions of 1 included
    b.need(s.natural & dt.natural & a.natural, "the states, steps or decays have gaps")
    for operand in (x, bb, c):
        b.need(operand.unit & (operand.nb[:, 1] == operand.ne[:, 0] * 4), "rows have gaps")
    state, dim, heads, tokens, seqs = s.ne[:, 0], x.ne[:, 0], x.ne[:, 1], x.ne[:, 2], x.ne[:, 3]
    b.need((s.ne[:, 1] == dim) & (s.ne[:, 2] == heads), "the states do not fit")
    b.need(
        (dt.ne[:, 0] == heads) & (dt.ne[:, 1] == tokens) & (dt.ne[:, 2] == seqs) & (dt.ne[:, 3] == 1),
        "the steps do not fit",
    )
    b.need((bb.ne == c.ne).all(1) & (bb.ne[:, 0] == state), "B and C do not fit")
    b.need(
        divides(heads, bb.ne[:, 1]) & (bb.ne[:, 2] == tokens) & (bb.ne[:, 3] == seqs), "the groups do not fit the heads"
    )
    b.need((ids.ne[:, 0] == seqs) & a.matrix & (a.ne[:, 1] == heads), "the ids or the decays do not fit")
    snapshots = b.param(0)
    scalar = a.ne[:, 0] == 1
    b.need(scalar | ((a.ne[:, 0] == state) & (snapshots == 1)), "the decays do not fit the states")
    b.need(snapshots >= 1, "it keeps no snapshot")
    per_snapshot = state * dim * heads * seqs
    b.need(snapshots.astype(np.float64) * per_snapshot < 2**40, "it keeps too many snapshots")
    b.makes(F32, x.elements + snapshots * per_snapshot)


def _wkv(b: Batch, first: int, per_token: tuple[int, ...], state_slot: int) -> None:
    """RWKV and gated linear attention: [S, H, tokens] sources, a state of S x S x H for each sequence."""
    shape, state = b.src(first), b.src(state_slot)
    size, heads, tokens = shape.ne[:, 0], shape.ne[:, 1], shape.ne[:, 2]
    b.need(np.isin(size, _WKV_HEAD_SIZES), "the head size is not 64 or 128")
    for slot in per_token:
        operand = b.src(slot)
        b.need((operand.type == F32) & operand.contiguous & operand.unit, "a source is not f32 without gaps")
        b.need((operand.ne == shape.ne).all(1) & (operand.ne[:, 3] == 1), "the sources' shapes differ")
    b.need((state.type == F32) & state.contiguous & state.unit, "the state is not f32 without gaps")
    seqs = state.ne[:, 1]
    # the kernel divides the tokens by the sequences, and then by that
    b.need(
        (state.elements == size * size * heads * seqs) & divides(tokens, seqs) & (tokens > 0), "the state does not fit"
    )
    b.makes(F32, size * heads, tokens + size * seqs)


@rule("RWKV_WKV6", sources=6)
def _wkv6(b: Batch) -> None:
    _wkv(b, 0, (0, 1, 2, 4), 5)
    k, first = b.src(0), b.src(3)
    b.need(
        (first.type == F32) & first.contiguous & (first.elements == k.ne[:, 0] * k.ne[:, 1]), "the bonus does not fit"
    )


@rule("GATED_LINEAR_ATTN", sources=5)
def _gla(b: Batch) -> None:
    _wkv(b, 0, (0, 1, 2, 3), 4)


@rule("RWKV_WKV7", sources=7)
def _wkv7(b: Batch) -> None:
    _wkv(b, 2, (0, 1, 2, 3, 4, 5), 6)


@rule("GATED_DELTA_NET", sources=6)
def _gated_delta_net(b: Batch) -> None:
    q, k, v, gate, beta, state = (b.src(slot) for slot in range(6))
    _all_f32(b, q, k, v, gate, beta, state)
    b.need(q.unit & k.unit & v.unit, "rows have gaps")
    b.need(gate.natural & beta.natural & state.natural, "the gates or the state have gaps")
    size, heads, tokens, seqs = v.ne.T
    for operand in (q, k):
        b.need(
            (operand.ne[:, 0] == size)
            & divides(heads, operand.ne[:, 1])
            & (operand.ne[:, 2] == tokens)
            & divides(seqs, operand.ne[:, 3]),
            "queries, keys and values do not fit",
        )
    b.need((q.ne == k.ne).all(1) & (q.nb == k.nb).all(1), "queries and keys differ in shape or strides")
    b.need((gate.ne[:, 0] == 1) | (gate.ne[:, 0] == size), "the gates are neither one a head nor one an element")
    b.need((gate.ne[:, 1:] == v.ne[:, 1:]).all(1), "the gates do not fit")
    b.need((beta.ne[:, 0] == 1) & (beta.ne[:, 1:] == v.ne[:, 1:]).all(1), "beta does not fit")
    b.need(
        (state.ne[:, 0] == size) & (state.ne[:, 1] == size) & (state.ne[:, 2] == heads) & (state.ne[:, 3] == seqs),
        "the state does not fit",
    )
    snapshots = b.param(0)
    b.need(
        (snapshots >= 1) & (snapshots.astype(np.float64) * state.elements < 2**40), "it keeps no or too many snapshots"
    )
    b.makes(F32, size * heads, tokens * seqs + snapshots * size * seqs)


@rule("DSV4_HC_COMB", sources=3)
def _hc_comb(b: Batch) -> None:
    mixes, scale, base = b.src(0), b.src(1), b.src(2)
    _all_f32(b, mixes, scale, base)
    b.need((mixes.ne[:, 0] == 24) & mixes.matrix, "the mixes are not of 4 streams")
    b.need(
        (scale.ne[:, 0] >= 3) & scale.vector & (base.ne[:, 0] == 24) & base.vector, "the scale or the base do not fit"
    )
    iterations = b.param(1)
    b.need((iterations > 0) & (iterations <= _MAX_ITERATIONS), "the number of iterations is out of range")
    b.makes(F32, 4, 4, mixes.ne[:, 1])


@rule("DSV4_HC_PRE", sources=2)
def _hc_pre(b: Batch) -> None:
    x, weights, gated = b.src(0), b.src(1), b.param(1)
    _all_f32(b, x, weights)
    width, streams, tokens = x.ne[:, 0], x.ne[:, 1], x.ne[:, 2]
    b.need((streams > 0) & (x.ne[:, 3] == 1) & (weights.ne[:, 3] == 1), "there are no streams, or a fourth dimension")
    b.need((gated >= 0) & (gated <= 1), "it is neither gated nor not")
    by_gate = (weights.ne[:, 0] == width) & (weights.ne[:, 1] == streams) & (weights.ne[:, 2] == tokens)
    by_stream = (weights.ne[:, 0] == streams) & (weights.ne[:, 1] == tokens) & (weights.ne[:, 2] == 1)
    b.need(np.where(gated == 1, by_gate, by_stream), "the weights do not fit")
    b.makes(F32, width, tokens)


@rule("DSV4_HC_POST", sources=3, optional=(3,))
def _hc_post(b: Batch) -> None:
    x, residual, post = b.src(0), b.src(1), b.src(2)
    _all_f32(b, x, residual, post)
    width, tokens, streams = x.ne[:, 0], x.ne[:, 1], residual.ne[:, 1]
    b.need(x.matrix & (streams > 0), "there are no streams, or a third dimension")
    b.need(
        (residual.ne[:, 0] == width) & (residual.ne[:, 2] == tokens) & (residual.ne[:, 3] == 1),
        "the residual does not fit",
    )
    b.need((post.ne[:, 0] == streams) & (post.ne[:, 1] == tokens) & post.matrix, "the weights do not fit")
    b.makes(F32, width, streams, tokens)
    mixed = b.having(3)
    if mixed is not None:
        comb, hc = mixed.src(3), mixed.src(1).ne[:, 1]
        _all_f32(mixed, comb)
        mixed.need((comb.ne[:, 0] == hc) & (comb.ne[:, 1] == hc), "the mixing matrix does not fit")
        mixed.need((comb.ne[:, 2] == mixed.src(0).ne[:, 1]) & (comb.ne[:, 3] == 1), "the mixing matrix does not fit")
