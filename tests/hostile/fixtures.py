"""Graphs that real models made, recorded from llama.cpp's own client: what the rules must accept; the fuzzer's seeds.

Each file of tests/data/graphs is zlib over: header length u32 | JSON {"model", "buffers": [[handle, base, bytes], …]} |
a GRAPH_COMPUTE payload. Ids, handles and addresses are renumbered; names are dropped. They were recorded (record.py)
from models of small size and random weights, made with llama.cpp's own ``llama_model_init_from_user`` and the
hyperparameters of its tests/test-llama-archs.cpp.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydra.peer.rules import TensorTable
from tests.hostile.tables import build_graph, parse_graph, table

_COLUMNS = ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "data", "buf_size", "use_count")
DIRECTORY = Path(__file__).parent.parent / "data" / "graphs"


@dataclass(frozen=True)
class Recorded:
    """One recorded graph. buffers: handle -> (base, bytes)."""

    model: str
    payload: bytes
    buffers: dict[int, tuple[int, int]]

    def table(self) -> TensorTable:
        return table(*parse_graph(self.payload), self.buffers)


def names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.z"))


def load(name: str) -> Recorded:
    data = zlib.decompress((DIRECTORY / f"{name}.z").read_bytes())
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    return Recorded(header["model"], data[4 + size :], {h: (base, n) for h, base, n in header["buffers"]})


def pack(model: str, payload: bytes, buffers: dict[int, tuple[int, int]]) -> bytes:
    """The file of a recorded graph, renumbered."""
    node_ids, rows = parse_graph(payload)
    numbers = {int(row["id"]): i + 1 for i, row in enumerate(rows)}
    used = [handle for handle in buffers if handle in set(rows["buffer"].tolist())]
    places = {handle: (i + 1, (i + 1) << 40) for i, handle in enumerate(used)}
    for row in rows:
        row["id"] = numbers[int(row["id"])]
        row["src"] = [numbers.get(int(i), 0) for i in row["src"]]
        row["view_src"] = numbers.get(int(row["view_src"]), 0)
        row["name"] = b""
        if int(row["buffer"]):
            old = int(row["buffer"])
            row["buffer"], base = places[old]
            row["data"] = int(row["data"]) - buffers[old][0] + base
    header = {"model": model, "buffers": [[*places[h], buffers[h][1]] for h in used]}
    text = json.dumps(header).encode()
    graph = build_graph([numbers[i] for i in node_ids], rows)
    return zlib.compress(struct.pack("<I", len(text)) + text + graph, 9)


def largest() -> TensorTable:
    """The recorded graphs joined into one of at least 2,000 tensors: for measuring."""
    parts, count = [], 0
    for name in names() * 8:
        recorded = load(name)
        parts.append(recorded.table())
        count += len(parts[-1])
        if count >= 2000:
            break
    return join(parts)


def join(parts: list[TensorTable]) -> TensorTable:
    """Several graphs side by side as one."""
    starts = np.cumsum([0] + [len(p) for p in parts])
    buffers = np.cumsum([0] + [len(p.buf_size) for p in parts])

    def shift(arrays: list[np.ndarray], by: np.ndarray) -> np.ndarray:
        return np.concatenate([np.where(a >= 0, a + by[i], a) for i, a in enumerate(arrays)])

    def stack(field: str) -> Any:
        return np.concatenate([getattr(p, field) for p in parts])

    columns: dict[str, Any] = {f: stack(f) for f in _COLUMNS}
    return TensorTable(
        **columns,
        src=shift([p.src for p in parts], starts),
        view_src=shift([p.view_src for p in parts], starts),
        buf=shift([p.buf for p in parts], buffers),
        nodes=shift([p.nodes for p in parts], starts),
    )
