"""The tables of hydra.peer.ops against the libggml that is installed: a new release that moves a number fails here."""

from __future__ import annotations

import ctypes

import pytest

from hydra.errors import HydraError
from hydra.ggml.library import load
from hydra.peer import op_rules, ops


@pytest.fixture(scope="module")
def base() -> ctypes.CDLL:
    try:
        directory = load().directory
    except HydraError as error:
        pytest.skip(str(error))
    library = ctypes.CDLL(str(directory / "libggml-base.so.0"))
    for name in ("ggml_op_name", "ggml_type_name", "ggml_unary_op_name", "ggml_glu_op_name"):
        getattr(library, name).restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    return library


def test_types(base: ctypes.CDLL) -> None:
    for number in range(ops.TYPE_COUNT):
        block = base.ggml_blck_size(number)
        assert ops.BLOCK_SIZE[number] == block
        assert ops.TYPE_SIZE[number] == base.ggml_type_size(number)
        if block:
            assert ops.TYPE_NAMES[number] == base.ggml_type_name(number).decode()
            assert bool(ops.QUANTIZED[number]) == bool(base.ggml_is_quantized(number))
        else:
            assert number not in ops.TYPE_NAMES


def test_operations(base: ctypes.CDLL) -> None:
    for number, name in enumerate(ops.OP_NAMES):
        assert base.ggml_op_name(number).decode() == name
    assert [base.ggml_unary_op_name(n).decode() for n in range(len(ops.UNARY_NAMES))] == list(ops.UNARY_NAMES)
    assert [base.ggml_glu_op_name(n).decode() for n in range(len(ops.GLU_NAMES))] == list(ops.GLU_NAMES)


def test_conversions(base: ctypes.CDLL) -> None:
    """A type that the rules call readable has a to_float, one that they call writable a from_float_ref."""

    class Traits(ctypes.Structure):
        _fields_ = [
            ("type_name", ctypes.c_char_p),
            ("blck_size", ctypes.c_int64),
            ("blck_size_interleave", ctypes.c_int64),
            ("type_size", ctypes.c_size_t),
            ("is_quantized", ctypes.c_bool),
            ("to_float", ctypes.c_void_p),
            ("from_float_ref", ctypes.c_void_p),
        ]

    base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    for number, name in ops.TYPE_NAMES.items():
        traits = base.ggml_get_type_traits(number).contents
        assert traits.type_size == ops.TYPE_SIZE[number], "the layout of ggml_type_traits has changed"
        if name != "f32":
            assert bool(ops.DEQUANTIZABLE[number]) == bool(traits.to_float), name
        if ops.QUANTIZABLE[number]:
            assert traits.from_float_ref, name


def test_nothing_that_carries_a_pointer_is_allowed() -> None:
    for name in ("MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM"):
        assert not op_rules.ALLOWED[ops.OP[name]]


def test_training_is_not_served() -> None:
    for name in ops.OP_NAMES:
        if name.startswith(("OPT_STEP", "CROSS_ENTROPY")) or (name.endswith("_BACK") and name != "ROPE_BACK"):
            assert not op_rules.ALLOWED[ops.OP[name]], name
