"""What hydra's peer itself costs per message, apart from the arithmetic: graphs made to be almost free to compute.

A chain of 1,000 additions of 64 numbers, 2,000 tensors in all, is sent to a peer of its own on the CPU, new, with 50
rows moved or of another shape, and again; the peer's own clock times each message. Computing the chain takes some
hundred µs, the same for all of them, and GRAPH_RECOMPUTE of it is nothing else: what a GRAPH_COMPUTE takes beyond that
is the rebuild and the check. Knows the messages' layouts (hydra.rpc) and nothing of how the peer does it.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydra.bench.pairs import Peer, Setting, start
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command

N_TENSORS = 2000
CHANGED = 50
SET_BYTES = 1024
_F32, _ADD, _COMPUTE = 0, 2, 16
_VECTOR = 64
_REPEATS = 200
TARGETS_US = {"new graph": 1500.0, "50 rows changed": 300.0, "same graph again": 40.0, "small SET_TENSOR": 15.0}


@dataclass(frozen=True)
class OwnCosts:
    """Median µs in the peer for each kind of message, the arithmetic taken off; ``raw``: with it, median and p99."""

    us: dict[str, float]
    raw: dict[str, tuple[float, float]]

    def rows(self) -> list[list[str]]:
        return [
            [
                name,
                f"{value:.1f}",
                f"{TARGETS_US[name]:.0f}" if name in TARGETS_US else "–",
                f"{self.raw[name][0]:.1f}",
                f"{self.raw[name][1]:.1f}",
            ]
            for name, value in self.us.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"us": self.us, "raw_p50_p99_us": self.raw, "targets_us": TARGETS_US}


COLUMNS = ("message (2,000 tensors)", "own, median µs", "target", "with arithmetic", "p99")


def run() -> OwnCosts:
    """Measure; takes some seconds. Raises: HydraError when the peer does not come up or refuses a graph."""
    chain = _raw(Command.GRAPH_RECOMPUTE, _again)
    raw = {
        "new graph": _raw(Command.GRAPH_COMPUTE, _new),
        "new graph of a new topology": _raw(Command.GRAPH_COMPUTE, _new_topology),
        "50 rows changed": _raw(Command.GRAPH_COMPUTE, _changed),
        "50 rows reshaped": _raw(Command.GRAPH_COMPUTE, _reshaped),
        "same graph again": _raw(Command.GRAPH_RECOMPUTE, _again_small),
        "small SET_TENSOR": _raw(Command.SET_TENSOR, _small_sets),
    }
    us = {name: times[0] for name, times in raw.items()}
    for name in ("new graph", "new graph of a new topology", "50 rows changed", "50 rows reshaped"):
        us[name] = max(0.0, us[name] - chain[0])
    return OwnCosts(us, raw)


def _raw(command: Command, play: Callable[[_Chain], None]) -> tuple[float, float]:
    """Median and p99 in µs of ``command`` in a fresh peer while ``play`` sends."""
    with start("hydra", Setting("CPU", 1), timings=True) as peer:
        host, _, port = peer.endpoint.rpartition(":")
        with Client(host, int(port), timeout_s=30.0) as client:
            play(_Chain(client))
        row = _stats(peer)[command.name]
        return float(row["p50_us"]), float(row["p99_us"])


def _stats(peer: Peer) -> dict[str, dict[str, float]]:
    with urllib.request.urlopen(f"http://{peer.endpoint}/stats?timings", timeout=10) as answer:
        commands: dict[str, dict[str, float]] = json.load(answer)["commands"]
        return commands


class _Chain:
    """The chain as one connection sees it: leaves at even rows, sums at odd ones, each in a slot of its own."""

    def __init__(self, client: Client, n_tensors: int = N_TENSORS) -> None:
        self.client = client
        self._bytes = 4 * _VECTOR
        # Twice the room, so that a tensor can move.
        self.handle, _ = client.alloc(2 * n_tensors * self._bytes)
        self.base = client.base(self.handle)
        self.rows = self._build(n_tensors)

    def _build(self, count: int) -> np.ndarray:
        rows = np.zeros(count, dtype=wire.RPC_TENSOR)
        number = np.arange(count, dtype=np.uint64)
        size = self._bytes
        rows["id"] = number + np.uint64(1)
        rows["type"], rows["buffer"] = _F32, self.handle
        rows["ne"], rows["nb"] = (_VECTOR, 1, 1, 1), (4, size, size, size)
        rows["data"] = np.uint64(self.base) + number * np.uint64(size)
        sums = number[1::2]
        rows["op"][1::2], rows["flags"][1::2], rows["use_count"] = _ADD, _COMPUTE, 1
        rows["src"][1::2, 0] = sums  # the leaf before it: row n - 1 has id n
        rows["src"][1::2, 1] = np.where(sums >= 3, sums - 1, sums)  # the sum before that
        return rows

    def compute(self, rows: np.ndarray) -> None:
        nodes = [int(node) for node in rows["id"][1::2]]
        self.client.send(messages.GraphCompute(0, nodes, rows))

    def recompute(self) -> None:
        self.client.send(messages.DeviceRequest(Command.GRAPH_RECOMPUTE))

    def wait(self) -> None:
        """As a head does at the end of every step."""
        self.client.call(messages.GetTensor(self.rows[:1].tobytes(), 0, self._bytes))

    def moved(self, rows: np.ndarray, chosen: slice, far: bool) -> np.ndarray:
        """``rows`` with the data of the chosen ones in the other half of the buffer, or back."""
        result = rows.copy()
        if far:
            result["data"][chosen] += np.uint64(len(rows) * self._bytes)
        return result


def _new(chain: _Chain) -> None:
    for repeat in range(_REPEATS):
        rows = chain.moved(chain.rows, slice(None), far=bool(repeat % 2))
        shift = np.uint64(repeat << 20)
        rows["id"] += shift
        rows["src"] = np.where(rows["src"] > 0, rows["src"] + shift, rows["src"])
        chain.compute(rows)
        chain.wait()


def _new_topology(chain: _Chain) -> None:
    for repeat in range(_REPEATS // 4):
        rows = chain.rows.copy()
        # A sum takes another leaf: a different graph each time, which must be checked whole.
        rows["src"][2 * repeat + 1, 0] = 1
        rows["src"][3::2, 0] = rows["src"][3::2, 0] if repeat % 2 else np.uint64(1)
        rows["id"] += np.uint64(repeat << 20)
        rows["src"] = np.where(rows["src"] > 0, rows["src"] + np.uint64(repeat << 20), rows["src"])
        chain.compute(rows)
        chain.wait()


def _changed(chain: _Chain) -> None:
    step = N_TENSORS // CHANGED
    chain.compute(chain.rows)
    for repeat in range(_REPEATS):
        chain.compute(chain.moved(chain.rows, slice(0, None, step), far=bool(repeat % 2)))
        chain.wait()


def _reshaped(chain: _Chain) -> None:
    """As where a conversation grows: a stride of some leaves, over which no kernel steps as there is one row."""
    chain.compute(chain.rows)
    for repeat in range(_REPEATS):
        rows = chain.rows.copy()
        rows["nb"][0 :: N_TENSORS // CHANGED, 3] *= 2 + repeat % 2
        chain.compute(rows)
        chain.wait()


def _again(chain: _Chain) -> None:
    chain.compute(chain.rows)
    for _ in range(_REPEATS):
        chain.recompute()
        chain.wait()


def _again_small(chain: _Chain) -> None:
    chain.compute(chain.rows[:2])
    for _ in range(_REPEATS):
        chain.recompute()
        chain.wait()


def _small_sets(chain: _Chain) -> None:
    data = bytes(min(SET_BYTES, chain._bytes))
    for _ in range(_REPEATS):
        for row in range(10):
            chain.client.send(messages.SetTensor(chain.rows[row : row + 1].tobytes(), 0, data))
        chain.wait()
