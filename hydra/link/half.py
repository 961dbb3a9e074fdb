"""Which tensors may cross the network in half precision, where ``link.activations = "f16"``: activations alone.

By name, as llama.cpp's scheduler and graphs give them: float32 that is handed from one device's layers to the next's,
or the final hidden state. Everything else (masks, positions, rotation matrices, states, weights) is carried as it is.

Source: llama-graph.cpp and ggml-backend.cpp (ggml_backend_sched_split_graph) of the pinned llama.cpp.
"""

from __future__ import annotations

import re
import struct

from hydra.rpc import wire

_TYPE_F32 = 0
_HEADER = wire.HEADER.size
_TYPE = struct.Struct(f"<{_HEADER + 8}x I")
_NAME_AT = _HEADER + 228
# Copies of a device's results are named "DEVICE#NAME#COPY" by the scheduler.
_EMBEDDINGS = rb"embd|inp_embd|model\.input_embed|inp_scaled"
_NAMES = rb"l_out|ffn_inp|attn_norm|norm|result_norm|result_embd|h_nextn|" + _EMBEDDINGS
_ACTIVATION, _EMBEDDING = (
    re.compile(rb"^(?:.*#)?(?:" + names + rb")(?:-\d+)?(?: \(.*\))?(?:#\d+)?$") for names in (_NAMES, _EMBEDDINGS)
)


def is_activation(message: memoryview, total: int) -> bool:
    """Whether a SET_TENSOR (at least its head; total: its length in bytes) carries activations."""
    (kind,) = _TYPE.unpack_from(message)
    at = _HEADER + wire.TENSOR_SIZE
    if kind != _TYPE_F32 or message[at] or (total - at - 9) % 4:
        return False
    return named(bytes(message[_NAME_AT : _NAME_AT + wire.MAX_NAME]))


def is_embedding(message: memoryview) -> bool:
    """Whether a SET_TENSOR (at least its head) carries tokens' embeddings: deltas say those shorter, and exactly."""
    return _EMBEDDING.match(bytes(message[_NAME_AT : _NAME_AT + wire.MAX_NAME]).split(b"\0")[0]) is not None


def is_activation_request(message: memoryview) -> bool:
    """Whether a whole GET_TENSOR asks for activations."""
    (kind,) = _TYPE.unpack_from(message)
    offset, size = wire.OFFSET_SIZE.unpack_from(message, _HEADER + wire.TENSOR_SIZE)
    if kind != _TYPE_F32 or size % 4 or offset % 4:
        return False
    return named(bytes(message[_NAME_AT : _NAME_AT + wire.MAX_NAME]))


def named(name: bytes) -> bool:
    return _ACTIVATION.match(name.split(b"\0")[0]) is not None
