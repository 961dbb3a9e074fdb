"""From a GRAPH_COMPUTE payload to the columns that hydra.peer.rules checks, without the peer's own code.

The peer has a fast way of its own (hydra.peer.graph); the tests of the rules must not depend on it.
"""

from __future__ import annotations

import struct

import numpy as np

from hydra.peer.rules import TensorTable
from hydra.rpc import wire


def parse_graph(payload: bytes) -> tuple[list[int], np.ndarray]:
    """(node ids, rpc_tensor rows) of a payload."""
    _, n_nodes = struct.unpack_from("<II", payload)
    ids = list(struct.unpack_from(f"<{n_nodes}Q", payload, 8))
    (n_tensors,) = struct.unpack_from("<I", payload, 8 + 8 * n_nodes)
    rows = np.frombuffer(payload, wire.RPC_TENSOR, n_tensors, 12 + 8 * n_nodes).copy()
    return ids, rows


def build_graph(node_ids: list[int], rows: np.ndarray, device: int = 0) -> bytes:
    """The payload of a graph; the inverse of parse_graph."""
    head = struct.pack("<II", device, len(node_ids)) + struct.pack(f"<{len(node_ids)}Q", *node_ids)
    return head + struct.pack("<I", len(rows)) + rows.tobytes()


def table(node_ids: list[int], rows: np.ndarray, buffers: dict[int, tuple[int, int]]) -> TensorTable:
    """buffers: remote_ptr -> (base, size). Ids that do not resolve become -2, which no rule accepts."""
    index = {int(row["id"]): i for i, row in enumerate(rows)}
    handles = {handle: i for i, handle in enumerate(buffers)}
    bases = [base for base, _ in buffers.values()]
    buf = np.array([handles.get(int(handle), -1) for handle in rows["buffer"]], np.int64)
    data = np.array(
        [(int(d) - bases[b]) & (2**64 - 1) if b >= 0 else int(d) for d, b in zip(rows["data"], buf, strict=True)],
        np.uint64,
    )

    def resolve(ids: np.ndarray) -> np.ndarray:
        flat = [-1 if i == 0 else index.get(int(i), -2) for i in ids.ravel()]
        return np.array(flat, np.int64).reshape(ids.shape)

    return TensorTable(
        type=rows["type"].copy(),
        ne=rows["ne"].astype(np.int64),
        nb=rows["nb"].astype(np.uint64),
        op=rows["op"].copy(),
        op_params=rows["op_params"].copy(),
        flags=rows["flags"].copy(),
        src=resolve(rows["src"]),
        view_src=resolve(rows["view_src"]),
        view_offs=rows["view_offs"].copy(),
        buf=buf,
        data=data,
        buf_size=np.array([size for _, size in buffers.values()], np.uint64),
        nodes=resolve(np.array(node_ids, np.uint64)),
        use_count=rows["use_count"].copy(),
    )
