"""Memory layouts of ggml_tensor (public) and ggml_cgraph (private), and the proof that this library has them.

    ggml_tensor, 336 bytes (ggml/include/ggml.h)
      0 type i32 (+4)   8 buffer ptr   16 ne i64[4]   48 nb u64[4]   80 op i32   84 op_params i32[16]
    148 flags i32 (+0) 152 src ptr[10] 232 view_src  240 view_offs  248 data    256 name char[64]
    320 extra ptr      328 padding

    ggml_cgraph (ggml/src/ggml-impl.h)
      0 size i32   4 n_nodes   8 n_leafs (+4)   16 nodes**  24 grads**  32 grad_accs**  40 leafs**  48 use_counts i32*
     56 hash: size u64, used u32*, keys**      80 order i32 (+4)   88 uid u64

The second is in no public header. ``verify_layout`` compares it with a graph that the library itself built; where it
does not match, hydra.peer.graph falls back to ggml_graph_add_node (slower: no use counts, so no fusion).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int32, c_uint64, c_void_p

import numpy as np

from hydra.ggml.library import Ggml

TENSOR = np.dtype(
    {
        "names": [
            "type", "buffer", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "data",
            "name", "extra",
        ],
        "formats": [
            "<i4", "<u8", ("<i8", (4,)), ("<u8", (4,)), "<i4", ("<i4", (16,)), "<i4", ("<u8", (10,)), "<u8", "<u8",
            "<u8",
            "S64", "<u8",
        ],
        "offsets": [0, 8, 16, 48, 80, 84, 148, 152, 232, 240, 248, 256, 320],
        "itemsize": 336,
    }
)  # fmt: skip
TENSOR_SIZE = 336
HASH_UNIT = TENSOR_SIZE // 16  # ggml hashes address / 16

TYPE_F32 = 0
TYPE_I8 = 24
OP_NONE = 0
FLAG_COMPUTE = 16


class HashSet(ctypes.Structure):
    _fields_ = [("size", c_uint64), ("used", c_void_p), ("keys", c_void_p)]


class CGraph(ctypes.Structure):
    _fields_ = [
        ("size", c_int),
        ("n_nodes", c_int),
        ("n_leafs", c_int),
        ("nodes", c_void_p),
        ("grads", c_void_p),
        ("grad_accs", c_void_p),
        ("leafs", c_void_p),
        ("use_counts", c_void_p),
        ("hash_set", HashSet),
        ("order", c_int32),
        ("uid", c_uint64),
    ]


def aligned_bytes(size: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8[size] whose first byte lies at a multiple of alignment."""
    raw = np.zeros(size + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


def verify_layout(ggml: Ggml) -> str:
    """Empty when this library's ggml_cgraph is laid out as CGraph; else what differs.

    Builds (a + b) * a with the library and reads the graph back through CGraph, public accessors beside it.
    """
    ctx = ggml.context(1 << 20)
    try:
        a = ggml.ggml_new_tensor_1d(ctx, TYPE_F32, 8)
        b = ggml.ggml_new_tensor_1d(ctx, TYPE_F32, 8)
        total = ggml.ggml_add(ctx, a, b)
        product = ggml.ggml_mul(ctx, total, a)
        address = ggml.ggml_new_graph_custom(ctx, 64, False)
        ggml.ggml_build_forward_expand(address, product)
        graph = CGraph.from_address(address)
        n_nodes = ggml.ggml_graph_n_nodes(address)
        if (graph.size, graph.n_nodes, n_nodes) != (ggml.ggml_graph_size(address), 2, 2):
            return f"size {graph.size}, n_nodes {graph.n_nodes}"
        nodes = (c_uint64 * n_nodes).from_address(graph.nodes)
        if list(nodes) != [ggml.ggml_graph_node(address, i) for i in range(n_nodes)] or list(nodes) != [total, product]:
            return "the node list"
        if graph.hash_set.size != ggml.ggml_hash_size(2 * 64):
            return f"the hash set's size {graph.hash_set.size}"
        if graph.order != 0 or graph.uid != 0 or graph.grads or graph.grad_accs:
            return f"order {graph.order}, uid {graph.uid}"
        keys = (c_uint64 * graph.hash_set.size).from_address(graph.hash_set.keys)
        counts = (c_int32 * graph.hash_set.size).from_address(graph.use_counts)
        used = (ctypes.c_uint32 * ((graph.hash_set.size + 31) // 32)).from_address(graph.hash_set.used)
        for tensor, uses in ((a, 2), (b, 1), (total, 1), (product, 0)):
            slot = (tensor >> 4) % graph.hash_set.size
            while keys[slot] != tensor and used[slot >> 5] >> (slot & 31) & 1:
                slot = (slot + 1) % graph.hash_set.size
            if keys[slot] != tensor or not used[slot >> 5] >> (slot & 31) & 1 or counts[slot] != uses:
                return f"use count {counts[slot]} where {uses} is due"
        row = np.frombuffer(ctypes.string_at(product, TENSOR_SIZE), dtype=TENSOR)[0]
        if row["src"][0] != total or row["src"][1] != a or row["ne"][0] != 8 or row["nb"][1] != 32:
            return "ggml_tensor"
        return ""
    finally:
        ggml.ggml_free(ctx)
