"""The numbers of ggml's types and operations, as arrays that a whole graph can be looked up in at once.

Knows no rules and loads no library: tests/test_peer_rules_tables.py holds these tables against the real libggml.

Source: ggml/include/ggml.h, ggml/src/ggml.c (type_traits, GGML_OP_NAME) and ggml/src/ggml-cpu/ggml-cpu.c
(type_traits_cpu) of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# number, name, elements per block, bytes per block
_TYPES: tuple[tuple[int, str, int, int], ...] = (
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_K", 256, 84),
    (11, "q3_K", 256, 110),
    (12, "q4_K", 256, 144),
    (13, "q5_K", 256, 176),
    (14, "q6_K", 256, 210),
    (15, "q8_K", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
)
TYPE_COUNT = 43

TYPE_NAMES: dict[int, str] = {number: name for number, name, _, _ in _TYPES}
TYPE_NUMBERS: dict[str, int] = {name: number for number, name in TYPE_NAMES.items()}

F32, F16, BF16 = TYPE_NUMBERS["f32"], TYPE_NUMBERS["f16"], TYPE_NUMBERS["bf16"]
I32, I64 = TYPE_NUMBERS["i32"], TYPE_NUMBERS["i64"]

# One row for each type number; a block size of 0 is a number that is no type (removed from ggml, or never given out).
BLOCK_SIZE: NDArray[np.int64] = np.zeros(TYPE_COUNT, np.int64)
TYPE_SIZE: NDArray[np.int64] = np.zeros(TYPE_COUNT, np.int64)
for _number, _name, _block, _size in _TYPES:
    BLOCK_SIZE[_number], TYPE_SIZE[_number] = _block, _size
QUANTIZED: NDArray[np.bool_] = BLOCK_SIZE > 1


def type_set(*names: str) -> NDArray[np.bool_]:
    """A mask over type numbers, so that ``mask[types]`` asks membership for a whole column."""
    mask = np.zeros(TYPE_COUNT, np.bool_)
    mask[[TYPE_NUMBERS[name] for name in names]] = True
    return mask


FLOATS = type_set("f32", "f16", "bf16")
# q8_1 and q8_K exist only as working formats of the kernels: nothing can read rows of them back.
_WORKING_FORMATS = type_set("q8_1", "q8_K")
DEQUANTIZABLE = (QUANTIZED & ~_WORKING_FORMATS) | FLOATS  # ggml_type_traits.to_float, or f32 itself
_NOT_WRITABLE = type_set("iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq3_s", "iq2_s", "iq1_m")  # no from_float
QUANTIZABLE = QUANTIZED & ~_WORKING_FORMATS & ~_NOT_WRITABLE

_OP_NAMES = """
NONE DUP ADD ADD_ID ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS CUMSUM MEAN ARGMAX COUNT_EQUAL REPEAT
REPEAT_BACK CONCAT SILU_BACK NORM RMS_NORM RMS_NORM_BACK GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID OUT_PROD SCALE SET CPY
CONT RESHAPE VIEW PERMUTE TRANSPOSE GET_ROWS GET_ROWS_BACK SET_ROWS DIAG DIAG_MASK_INF DIAG_MASK_ZERO SOFT_MAX
SOFT_MAX_BACK ROPE ROPE_BACK CLAMP CONV_TRANSPOSE_1D IM2COL IM2COL_BACK IM2COL_3D COL2IM_1D CONV_2D CONV_3D CONV_2D_DW
CONV_TRANSPOSE_2D POOL_1D POOL_2D POOL_2D_BACK UPSCALE PAD PAD_REFLECT_1D ROLL ARANGE TIMESTEP_EMBEDDING ARGSORT TOP_K
LEAKY_RELU TRI FILL FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART WIN_UNPART GET_REL_POS ADD_REL_POS
RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET LIGHTNING_INDEXER DSV4_HC_COMB DSV4_HC_PRE DSV4_HC_POST
UNARY MAP_CUSTOM1 MAP_CUSTOM2 MAP_CUSTOM3 CUSTOM CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD
GLU
"""
OP_NAMES: tuple[str, ...] = tuple(_OP_NAMES.split())
OP_COUNT = len(OP_NAMES)
OP: dict[str, int] = {name: number for number, name in enumerate(OP_NAMES)}

_UNARY_NAMES = """
ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP EXPM1 SOFTPLUS GELU_ERF XIELU
FLOOR CEIL ROUND TRUNC
"""
UNARY_NAMES: tuple[str, ...] = tuple(_UNARY_NAMES.split())
_GLU_NAMES = "REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK SWIGLU_CLAMP"
GLU_NAMES: tuple[str, ...] = tuple(_GLU_NAMES.split())

# These only describe memory that is already there: no kernel runs for them, so they may stand on no buffer.
IS_VIEW_OP: NDArray[np.bool_] = np.isin(OP_NAMES, ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))


def op_name(number: int) -> str:
    return OP_NAMES[number] if 0 <= number < OP_COUNT else f"op {number}"


def type_name(number: int) -> str:
    return TYPE_NAMES.get(number, f"type {number}")
