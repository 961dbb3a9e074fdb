"""What the peer's tests share: a client that writes small graphs, and the peers (ours, stock) that it asks."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np

from hydra.bench.stock import StockServer
from hydra.peer.launch import start_peer
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command

F32 = 0
OP_ADD, OP_MUL = 2, 7
COMPUTE = 16
NODE = 1000


@contextlib.contextmanager
def peer(kind: str, **settings: Any) -> Iterator[tuple[str, int]]:
    """(host, port) of a CPU peer: "hydra" or "stock"."""
    if kind == "stock":
        with StockServer() as server:
            yield server.host, server.port
    else:
        with start_peer(device="CPU", threads=1, **settings) as process:
            yield process.host, process.port


def get_json(port: int, path: str) -> dict[str, Any]:
    """The JSON that a peer answers on its port, whatever the status."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


class Vectors:
    """float32 vectors of n elements in one buffer of a connection, and graphs over them."""

    def __init__(self, client: Client, n: int = 64, slots: int = 8) -> None:
        self.client = client
        self.n = n
        self.bytes = 4 * n
        self.handle, self.size = client.alloc(slots * self.bytes)
        self.base = client.base(self.handle)

    def row(self, slot: int, **fields: Any) -> np.ndarray:
        """The rpc_tensor of a slot; its id is slot + 1."""
        row = np.zeros(1, dtype=wire.RPC_TENSOR)
        n, size = self.n, self.bytes
        values: dict[str, Any] = {
            "id": slot + 1, "type": F32, "buffer": self.handle, "ne": (n, 1, 1, 1), "nb": (4, size, size, size),
            "data": self.base + slot * size, "name": f"v{slot}".encode(), **fields,
        }  # fmt: skip
        for name, value in values.items():
            row[name][0] = value
        return row

    def op(self, slot: int, op: int, *sources: int, **fields: Any) -> np.ndarray:
        """A node that writes a slot; its id is slot + NODE, and so is a source's that is a node."""
        src = [s + 1 if s < NODE else s for s in sources] + [0] * (wire.MAX_SRC - len(sources))
        return self.row(slot, op=op, src=src, flags=COMPUTE, **{"id": slot + NODE, "use_count": 0, **fields})

    def set(self, slot: int, values: np.ndarray) -> None:
        self.client.send(messages.SetTensor(self.row(slot).tobytes(), 0, values.astype(np.float32).tobytes()))

    def get(self, slot: int) -> np.ndarray:
        data = self.client.call(messages.GetTensor(self.row(slot).tobytes(), 0, self.bytes))
        return np.frombuffer(data, dtype=np.float32)

    def compute(self, nodes: list[int], rows: list[np.ndarray]) -> None:
        self.client.send(messages.GraphCompute(0, [slot + NODE for slot in nodes], np.concatenate(rows)))

    def add(self, to: int, a: int, b: int) -> None:
        """Computes slot to = a + b."""
        self.compute([to], [*(self.row(slot) for slot in {a, b}), self.op(to, OP_ADD, a, b)])

    def recompute(self) -> None:
        self.client.send(messages.DeviceRequest(Command.GRAPH_RECOMPUTE))
