"""Runs the head against one peer after another and compares pair by pair.

A comparison is A B, B A, A B …: the order alternates so that a machine that warms up, or is busy for a while, favours
nobody, and each ratio is of two runs that were neighbours in time. Knows how to start each kind of peer and how to
weigh it while a head runs; does not know what is printed.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.bench.link import Link
from hydra.bench.process import Child, MemoryWatch, cpu_seconds, process_tree, worker_command
from hydra.bench.run_head import HeadResult, HeadSpec
from hydra.bench.sink import Sink
from hydra.bench.stock import StockServer
from hydra.errors import HydraError

Report = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """A running peer: where the head reaches it, and the process whose tree is weighed."""

    endpoint: str
    pid: int


@dataclass
class Weighed:
    """What the peer was seen to use in one run, by phase of the head: bytes and CPU seconds."""

    idle_bytes: int = 0
    peak_bytes: int = 0
    loaded_bytes: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all peers of a comparison have in common."""

    device: str = "CPU"
    threads: int = 2
    link: Link | None = None


@contextmanager
def start(kind: str, setting: Setting, cache_dir: Path | None = None, timings: bool = False) -> Iterator[Peer]:
    """A peer of ``kind``: "stock", "hydra", "sink" or "sink-found" (the sink that has every weight already).

    Raises: HydraError when it does not come up.
    """
    link = setting.link
    host = link.peer_address if link else "127.0.0.1"
    netns = link.peer_netns if link else None
    with contextlib.ExitStack() as stack:
        if kind == "stock":
            stock = stack.enter_context(
                StockServer(host, device=setting.device, threads=setting.threads, cache_dir=cache_dir, netns=netns)
            )
            port, pid = stock.port, stock.pid
        elif kind in ("sink", "sink-found"):
            sink = stack.enter_context(Sink(host, found=kind == "sink-found", netns=netns))
            port, pid = sink.port, sink.pid
        elif kind == "hydra":
            from hydra.peer.launch import start_peer

            peer = stack.enter_context(
                start_peer(
                    host,
                    device=setting.device,
                    threads=setting.threads,
                    prefix=("ip", "netns", "exec", netns) if netns else (),
                    allow=(link.head_address, link.peer_address) if link else (),
                    cache_dir=str(cache_dir or ""),
                    timings=timings,
                )
            )
            port, pid = peer.port, peer.pid
        else:
            raise ValueError(kind)
        endpoint = f"{host}:{port}"
        if link:
            endpoint = stack.enter_context(link.relayed(host, port))
        yield Peer(endpoint, pid)


def run_head(
    spec: HeadSpec, peer: Peer | None, netns: str | None = None, timeout_s: float = 900.0
) -> tuple[HeadResult, Weighed]:
    """One run of the head in a process of its own, the peer weighed meanwhile.

    Raises: HydraError with the head's own words when it fails or takes longer than ``timeout_s``.
    """
    if peer is not None:
        spec = HeadSpec(**{**spec.__dict__, "peer": peer.endpoint})
    weighed = Weighed()
    scale = PeerScale(peer.pid, weighed) if peer is not None else None
    with Child(worker_command("run_head", [spec.to_json()]), netns=netns, pipe=True) as child:
        deadline = threading.Timer(timeout_s, child.process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            assert child.process.stdout is not None
            for line in child.process.stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if "result" in message:
                        return HeadResult(**message["result"]), weighed
                    if "error" in message:
                        raise HydraError(f"The head failed: {message['error']}", message.get("hint", ""))
                    if scale is not None and "phase" in message:
                        scale.edge(message["phase"], message["edge"])
        finally:
            deadline.cancel()
            if scale is not None:
                scale.close()
        child.process.wait(10)
        raise HydraError(f"The head ended with status {child.process.returncode}:\n{child.log_tail()}")


class PeerScale:
    """Weighs the peer at the edges of the head's phases."""

    def __init__(self, pid: int, into: Weighed) -> None:
        self._pid = pid
        self._into = into
        self._watch: MemoryWatch | None = None
        self._cpu_began: dict[str, float] = {}

    def edge(self, phase: str, edge: str) -> None:
        pids = process_tree(self._pid)
        if edge == "begin":
            self._cpu_began[phase] = cpu_seconds(pids)
            if phase == "load":
                self._watch = MemoryWatch(self._pid)
                self._watch.__enter__()
            return
        self._into.cpu_s[phase] = cpu_seconds(pids) - self._cpu_began.get(phase, 0.0)
        if phase == "load":
            self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.__exit__()
            self._into.idle_bytes = self._watch.before.rss_bytes
            self._into.peak_bytes = self._watch.peak_bytes
            self._into.loaded_bytes = self._watch.after.rss_bytes
            self._watch = None


@dataclass(frozen=True)
class Ratio:
    """One figure over all pairs: both medians, and ours over theirs (above 1 = ours is better) per pair."""

    name: str
    unit: str
    stock: float
    hydra: float
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    def row(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        return [
            self.name,
            f"{_figure(self.stock)} {self.unit}",
            f"{_figure(self.hydra)} {self.unit}",
            f"{self.median:.3f}",
            f"{low:.3f} … {high:.3f}",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "stock": self.stock,
            "hydra": self.hydra,
            "ratio": self.median,
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "ratios": list(self.ratios),
            "unit": self.unit,
        }


def compare(
    name: str, unit: str, stock: Sequence[float], hydra: Sequence[float], *, smaller_is_better: bool = False
) -> Ratio | None:
    """Ours against theirs, pair by pair; None when either was not measured."""
    pairs = [(s, h) for s, h in zip(stock, hydra, strict=True) if s > 0 and h > 0]
    if not pairs:
        return None
    ratios = tuple(s / h if smaller_is_better else h / s for s, h in pairs)
    return Ratio(name, unit, statistics.median(s for s, _ in pairs), statistics.median(h for _, h in pairs), ratios)


def order(pair: int) -> tuple[str, str]:
    """Who goes first in the pair: A B, B A, A B, …"""
    return ("stock", "hydra") if pair % 2 == 0 else ("hydra", "stock")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def settle(seconds: float = 0.3) -> None:
    """Let the last run's processes leave the caches and the run queue."""
    time.sleep(seconds)


def _figure(value: float) -> str:
    for least, form in ((1000, ",.0f"), (10, ".1f"), (0.1, ".3f")):
        if value >= least:
            return format(value, form)
    return f"{value:.6f}"
