"""What a model and its contexts take on each node: llama.cpp's own accounting, before anything is allocated.

llama.cpp can load with ``no_alloc``: tensors get sizes and places but no memory, and contexts plan their graphs. What
it then accounts for is what the real load takes. Running out is so found before the load, with numbers, and not after
minutes of it.

Knows devices and sizes; does not know requests. ``llama_get_memory_breakdown`` returns a C++ ``std::map``; it is read
here as libstdc++ lays it out, checked for plausibility, and given up with a clear error where it is not so.

Source: src/llama-ext.h, common/fit.cpp of the pinned llama.cpp; libstdc++'s bits/stl_tree.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from hydra.errors import DeviceError, LibraryError
from hydra.ggml import library

from .llama import DEVICE_CPU, Context, Device, api

MARGIN_BYTES = 256 << 20  # of a GPU: cuBLAS work space, captured graphs, and what the desktop takes meanwhile
_MAX_BUFFER_TYPES = 64
_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"


class _TreeHeader(ctypes.Structure):
    """std::map as libstdc++ has it: comparator, then the header node (colour, root, first, last) and the count."""

    _fields_ = [("compare", ctypes.c_size_t), ("colour", ctypes.c_size_t), ("root", ctypes.c_void_p),
                ("first", ctypes.c_void_p), ("last", ctypes.c_void_p), ("count", ctypes.c_size_t)]


class _TreeNode(ctypes.Structure):
    """One node: links, then pair<buffer type, {model, context, compute}>."""

    _fields_ = [("colour", ctypes.c_size_t), ("parent", ctypes.c_void_p), ("left", ctypes.c_void_p),
                ("right", ctypes.c_void_p), ("buffer_type", ctypes.c_void_p), ("model", ctypes.c_size_t),
                ("context", ctypes.c_size_t), ("compute", ctypes.c_size_t)]


@dataclass
class Use:
    """Bytes on one node by what for: weights, KV and recurrent state, compute buffers; the same of the draft context;
    the copies of recurrent states that the engine keeps.
    """

    model: int = 0
    context: int = 0
    compute: int = 0
    draft_context: int = 0
    draft_compute: int = 0
    checkpoints: int = 0

    @property
    def total(self) -> int:
        return (self.model + self.context + self.compute + self.draft_context + self.draft_compute
                + self.checkpoints)

    def describe(self) -> str:
        parts = [("weights", self.model), ("KV and state", self.context), ("compute", self.compute),
                 ("draft KV", self.draft_context), ("draft compute", self.draft_compute),
                 ("kept states", self.checkpoints)]
        return ", ".join(f"{name} {size / (1 << 30):.2f} GiB" for name, size in parts if size)

    def to_dict(self) -> dict[str, int]:
        return {"model": self.model, "context": self.context, "compute": self.compute,
                "draft_context": self.draft_context, "draft_compute": self.draft_compute,
                "checkpoints": self.checkpoints, "total": self.total}


@dataclass
class Estimate:
    """``by_device``: by ggml device name (``CPU`` = the head's memory); ``by_node``: the same summed by node."""

    by_device: dict[str, Use] = field(default_factory=dict)
    by_node: dict[str, Use] = field(default_factory=dict)

    def add(self, device: str, node: str, sizes: tuple[int, int, int], draft: bool) -> None:
        for use in (self.by_device.setdefault(device, Use()), self.by_node.setdefault(node, Use())):
            if draft:  # the model's weights are the same ones
                use.draft_context += sizes[1]
                use.draft_compute += sizes[2]
            else:
                use.model += sizes[0]
                use.context += sizes[1]
                use.compute += sizes[2]


def kept_states(context: Context) -> dict[str, int]:
    """Bytes of one kept copy of every slot's recurrent state, by buffer type name.

    The memory holds 1 + n_rs_seq copies of each; its sizes are taken from the log, for the accounting does not tell
    state from KV.
    """
    copies = 1 + context.n_rs_seq
    return {name: size // copies for name, size in context.log.by_device(("RS",)).items()}


def breakdown(context: Context) -> dict[str, tuple[int, int, int]]:
    """Bytes of weights, memory and compute buffers by buffer type name, for one context.

    Raises: LibraryError when the C++ map does not look as it should.
    """
    function = api().c._lib[_SYMBOL]
    function.argtypes, function.restype = [ctypes.c_void_p], _TreeHeader
    header = function(context.handle)
    if header.count > _MAX_BUFFER_TYPES or bool(header.root) != bool(header.count):
        raise LibraryError("llama.cpp's memory accounting cannot be read: its C++ library is laid out differently.")
    name_of = library.load().base["ggml_backend_buft_name"]
    name_of.argtypes, name_of.restype = [ctypes.c_void_p], ctypes.c_char_p
    result: dict[str, tuple[int, int, int]] = {}
    waiting, seen = [header.root], 0
    while waiting:
        address = waiting.pop()
        if not address:
            continue
        seen += 1
        if seen > header.count:
            raise LibraryError("llama.cpp's memory accounting cannot be read: more nodes than it counts.")
        node = _TreeNode.from_address(address)
        result[str(name_of(node.buffer_type).decode())] = (int(node.model), int(node.context), int(node.compute))
        waiting += [node.left, node.right]
    return result


def check(estimate: Estimate, devices: Mapping[str, Device], node_of: Mapping[str, str]) -> None:
    """Compare with what is free now. The head's main memory is not checked: weights there are mapped, not allocated.

    Raises: DeviceError naming node, device and numbers.
    """
    for name, use in estimate.by_device.items():
        device = devices.get(name)
        if device is None or device.kind == DEVICE_CPU:
            continue
        free, total = device.memory()
        if not total or use.total + MARGIN_BYTES <= free:
            continue
        node = node_of.get(name, name)
        gib = 1 << 30
        raise DeviceError(
            f"{node}: {device.description or name} has {free / gib:.2f} of {total / gib:.2f} GiB free; this needs "
            f"{use.total / gib:.2f} ({use.describe()}) and {MARGIN_BYTES / gib:.2f} to spare.",
            f"Give {node} fewer layers, use a smaller ctx_size or a quantised KV cache (cache_type_k/v = \"q8_0\"), or "
            "end other programs on that card.")
