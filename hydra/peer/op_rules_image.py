"""The rules of convolutions, pooling, padding and resizing: vision and audio encoders, and a few text models that pool.

Same contract as op_rules.py; importing this module registers its rules. Every parameter that a kernel divides by must
be positive, and every size that a constructor computes is computed here again.

Source: ggml/src/ggml.c and ggml/src/ggml-cpu/ops.cpp of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from hydra.peer.op_rules import Batch, Ints, Mask, Operand, rule
from hydra.peer.ops import BF16, F16, F32, TYPE_SIZE

_MAX_STEP = 1 << 16  # strides, paddings, dilations and kernel sizes; the kernels multiply them as C ints
_MAX_RESIZED = 1 << 20  # beyond this the kernel's float arithmetic can step past the last pixel
_CONV_WORK_BYTES = 16 << 20  # GGML_IM2COL_WORK_SIZE: one patch must fit
_SCALE_MODES = 3
_ALIGN_CORNERS, _ANTIALIAS, _BILINEAR = 1 << 8, 1 << 9, 1


def _out_size(size: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Ints:
    """ggml_calc_conv_output_size; below 1 where the kernel does not fit."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    return np.where(room >= 0, room // np.maximum(stride, 1) + 1, 0)


def _steps(b: Batch, strides: tuple[int, ...], paddings: tuple[int, ...], dilations: tuple[int, ...]) -> None:
    for word in strides + dilations:
        b.need((b.param(word) > 0) & (b.param(word) <= _MAX_STEP), "a stride or a dilation is not above 0")
    for word in paddings:
        b.need((b.param(word) >= 0) & (b.param(word) <= _MAX_STEP), "a padding is below 0")


@rule("IM2COL", sources=2)
def _im2col(b: Batch) -> None:
    kernel, image, two = b.src(0), b.src(1), b.param(6)
    b.need((two == 0) | (two == 1), "it is neither of one nor of two dimensions")
    b.need(
        ((b.dst.type == F32) & (image.type == F32)) | ((b.dst.type == F16) & image.is_type(F16, F32)),
        "there is no kernel for these types",
    )
    b.need(image.unit & (image.nb < 2**31).all(1), "the image's rows have gaps")
    flat = two == 1
    tight = (image.ne[:, 1] == 1) | (image.nb[:, 1] == image.ne[:, 0] * image.nb[:, 0])
    b.need(~flat | tight, "the image's planes have gaps")
    _steps(b, (0,), (2,), (4,))
    planes = b.where(flat) if flat.any() else None
    if planes is not None:
        _steps(planes, (1,), (3,), (5,))
    same = np.where(
        flat, kernel.ne[:, 2] == image.ne[:, 2], (kernel.ne[:, 1] == image.ne[:, 1]) & (image.ne[:, 3] == 1)
    )
    b.need(same, "the channels differ")
    width = _out_size(image.ne[:, 0], kernel.ne[:, 0], b.param(0), b.param(2), b.param(4))
    height = _out_size(image.ne[:, 1], kernel.ne[:, 1], b.param(1), b.param(3), b.param(5))
    b.need((width > 0) & (~flat | (height > 0)), "the kernel is larger than the image")
    patch = kernel.ne[:, 0] * kernel.ne[:, 1] * np.where(flat, kernel.ne[:, 2], 1)
    b.makes(b.dst.type, patch, width, np.where(flat, height, image.ne[:, 2]), np.where(flat, image.ne[:, 3], 1))


@rule("CONV_2D", sources=2)
def _conv_2d(b: Batch) -> None:
    kernel, image = b.src(0), b.src(1)
    b.need(kernel.is_type(F16, F32) & kernel.contiguous & kernel.unit & (image.type == F32), "the types do not fit")
    _steps(b, (0, 1), (2, 3), (4, 5))
    b.need(kernel.ne[:, 2] == image.ne[:, 2], "the channels differ")
    width = _out_size(image.ne[:, 0], kernel.ne[:, 0], b.param(0), b.param(2), b.param(4))
    height = _out_size(image.ne[:, 1], kernel.ne[:, 1], b.param(1), b.param(3), b.param(5))
    b.need((width > 0) & (height > 0) & (kernel.elements > 0), "the kernel is larger than the image, or empty")
    patch = kernel.ne[:, 0] * kernel.ne[:, 1] * kernel.ne[:, 2] * TYPE_SIZE[kernel.type] + 4 * kernel.ne[:, 3]
    b.need(patch <= _CONV_WORK_BYTES, "one patch does not fit the kernel's working memory")
    b.makes(image.type, width, height, kernel.ne[:, 3], image.ne[:, 3])


def _channels_first(t: Operand, order: tuple[int, int, int, int]) -> Mask:
    """Strides without gaps when the dimensions are laid out in this order, fastest first."""
    step = TYPE_SIZE[t.type]
    ok = np.ones(len(step), np.bool_)
    for dim in order:
        ok &= (t.nb[:, dim] == step) | (t.ne[:, dim] == 1)
        step = step * t.ne[:, dim]
    return ok


@rule("CONV_2D_DW", sources=2)
def _conv_2d_dw(b: Batch) -> None:
    kernel, image, dst = b.src(0), b.src(1), b.dst
    b.need(kernel.is_type(F16, F32) & (image.type == F32) & (dst.type == F32), "the types do not fit")
    _steps(b, (0, 1), (2, 3), (4, 5))
    b.need((kernel.ne[:, 2] == 1) & (kernel.ne[:, 3] == image.ne[:, 2]), "the channels differ")
    width = _out_size(image.ne[:, 0], kernel.ne[:, 0], b.param(0), b.param(2), b.param(4))
    height = _out_size(image.ne[:, 1], kernel.ne[:, 1], b.param(1), b.param(3), b.param(5))
    shape = (dst.ne[:, 0] == width) & (dst.ne[:, 1] == height) & (dst.ne[:, 2:] == image.ne[:, 2:]).all(1)
    b.need((width > 0) & (height > 0) & shape, "the result's shape is not what this operation makes")
    plain = image.contiguous & image.unit & kernel.contiguous & kernel.unit & dst.fresh
    channels = image.nb[:, 2] == 4
    last = (
        channels
        & _channels_first(image, (2, 0, 1, 3))
        & _channels_first(kernel, (3, 0, 1, 2))
        & _channels_first(dst, (2, 0, 1, 3))
    )
    # an image whose layout is both (one channel, one pixel) takes the first kernel
    b.need(plain | (last & ~image.contiguous), "the layouts of image, kernel and result do not fit")


@rule("COL2IM_1D", sources=1)
def _col2im(b: Batch) -> None:
    a, stride, channels, crop = b.src(0), b.param(0), b.param(1), b.param(2)
    b.need(a.is_type(F32, F16, BF16) & a.contiguous & a.unit & a.matrix, "the source is not a matrix without gaps")
    b.need((stride > 0) & (stride <= _MAX_STEP) & (channels > 0) & (crop >= 0), "a parameter is out of range")
    width = a.ne[:, 0] // np.maximum(channels, 1)
    length = (a.ne[:, 1] - 1) * stride + width - 2 * crop
    b.need((width * channels == a.ne[:, 0]) & (width > 0) & (length > 0), "the columns do not fit the channels")
    b.makes(a.type, length, channels)


def _pooled(size: Ints, kernel: Ints, stride: Ints, padding: Ints) -> Ints:
    room = size + 2 * padding - kernel
    return np.where(room >= 0, room // np.maximum(stride, 1) + 1, 0)


@rule("POOL_1D", sources=1)
def _pool_1d(b: Batch) -> None:
    a, which, kernel = b.src(0), b.param(0), b.param(1)
    b.need((which >= 0) & (which <= 1), "its kind is unknown")
    b.need(a.is_type(F32, F16) & a.contiguous & a.unit, "the source is not f32 or f16 without gaps")
    _steps(b, (1, 2), (3,), ())
    width = _pooled(a.ne[:, 0], kernel, b.param(2), b.param(3))
    b.need(width > 0, "the window is larger than the source")
    b.makes(F32, width, a.ne[:, 1], a.ne[:, 2], a.ne[:, 3])


@rule("POOL_2D", sources=1)
def _pool_2d(b: Batch) -> None:
    a, which = b.src(0), b.param(0)
    b.need((which >= 0) & (which <= 1), "its kind is unknown")
    # the kernel goes through the source's bytes plane by plane, and writes a plane for each
    b.need(a.is_type(F32, F16) & a.natural, "the source is not f32 or f16 without gaps")
    _steps(b, (1, 2, 3, 4), (5, 6), ())
    width = _pooled(a.ne[:, 0], b.param(1), b.param(3), b.param(5))
    height = _pooled(a.ne[:, 1], b.param(2), b.param(4), b.param(6))
    b.need((width > 0) & (height > 0), "the window is larger than the source")
    b.makes(F32, width, height, a.ne[:, 2], a.ne[:, 3])


@rule("UPSCALE", sources=1)
def _upscale(b: Batch) -> None:
    a, dst, mode = b.src(0), b.dst, b.param(0)
    b.need((mode >= 0) & ((mode & 0xFF) < _SCALE_MODES), "its mode is unknown")
    b.need((mode & ~(0xFF | _ALIGN_CORNERS | _ANTIALIAS)) == 0, "its mode has unknown flags")
    b.need(((mode & _ANTIALIAS) == 0) | ((mode & 0xFF) == _BILINEAR), "only bilinear resizing smooths")
    b.need(a.type == F32, "the source is not f32")
    b.need((a.elements > 0) & (a.ne <= _MAX_RESIZED).all(1) & (dst.ne <= _MAX_RESIZED).all(1), "a size is out of range")
    b.makes(F32, *dst.ne.T)


@rule("PAD", sources=1)
def _pad(b: Batch) -> None:
    a, circular = b.src(0), b.param(8)
    b.need(a.type == F32, "the source is not f32")
    b.need((circular == 0) | (circular == 1), "it is neither circular nor not")
    edges = b.t.op_params[b.rows, :8].astype(np.int64).reshape(-1, 4, 2)
    b.need((edges >= 0).all((1, 2)), "a padding is below 0")
    around = (edges <= a.ne[:, :, None]).all((1, 2)) & (a.elements > 0)
    b.need((circular == 0) | around, "it goes round more than once")
    b.makes(F32, *(a.ne + edges.sum(2)).T)


@rule("PAD_REFLECT_1D", sources=1)
def _pad_reflect(b: Batch) -> None:
    a, left, right = b.src(0), b.param(0), b.param(1)
    b.need((a.type == F32) & a.contiguous & a.unit, "the source is not f32 without gaps")
    inside = (left >= 0) & (right >= 0) & (left < a.ne[:, 0]) & (right < a.ne[:, 0])
    b.need(inside, "it reflects more than there is")
    b.makes(F32, a.ne[:, 0] + left + right, a.ne[:, 1], a.ne[:, 2], a.ne[:, 3])


@rule("ROLL", sources=1)
def _roll(b: Batch) -> None:
    a = b.src(0)
    b.need((a.type == F32) & a.unit, "the source is not rows of f32")
    shifts = b.t.op_params[b.rows, :4].astype(np.int64)
    b.need((np.abs(shifts) < np.maximum(a.ne, 1)).all(1), "it shifts further than the source is long")
    b.makes_like(a, inplace=False)
