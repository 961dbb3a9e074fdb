"""Counters of the compute path: messages and bytes by command, and where asked the time that each took.

Written by one connection thread without a lock and read by another: each number is replaced whole, and a reading that
is one message old does no harm. Times are of the handling alone: from the message being there to its reply being
handed to the kernel.
"""

from __future__ import annotations

import numpy as np

from hydra.rpc import wire

N_COMMANDS = 32
KEPT_TIMINGS = 1 << 16


class CommandStats:
    """count, bytes_in, bytes_out by command number; timings: ns of the last 65,536 messages of each, where kept."""

    def __init__(self, timings: bool = False) -> None:
        self.count = [0] * N_COMMANDS
        self.bytes_in = [0] * N_COMMANDS
        self.bytes_out = [0] * N_COMMANDS
        self.timings: list[list[int]] | None = [[] for _ in range(N_COMMANDS)] if timings else None

    def add_time(self, cmd: int, ns: int) -> None:
        if self.timings is not None:
            kept = self.timings[cmd]
            if len(kept) >= KEPT_TIMINGS:
                del kept[: KEPT_TIMINGS // 2]
            kept.append(ns)

    def absorb(self, other: CommandStats) -> None:
        """Adds a closed connection's counters to these."""
        for mine, theirs in (
            (self.count, other.count),
            (self.bytes_in, other.bytes_in),
            (self.bytes_out, other.bytes_out),
        ):
            for cmd, value in enumerate(theirs):
                mine[cmd] += value
        if self.timings is not None and other.timings is not None:
            for cmd, times in enumerate(other.timings):
                self.timings[cmd] = (self.timings[cmd] + times)[-KEPT_TIMINGS:]


def summary(parts: list[CommandStats]) -> dict[str, dict[str, float]]:
    """By command name: count, bytes_in, bytes_out and (with timings) p50_us, p99_us, total_ms."""
    result: dict[str, dict[str, float]] = {}
    for cmd in wire.Command:
        count = sum(p.count[cmd] for p in parts)
        if not count:
            continue
        row: dict[str, float] = {
            "count": count,
            "bytes_in": sum(p.bytes_in[cmd] for p in parts),
            "bytes_out": sum(p.bytes_out[cmd] for p in parts),
        }
        times = np.array([ns for p in parts if p.timings is not None for ns in p.timings[cmd]], dtype=np.float64)
        if len(times):
            row["p50_us"] = round(float(np.percentile(times, 50)) / 1e3, 2)
            row["p99_us"] = round(float(np.percentile(times, 99)) / 1e3, 2)
            row["total_ms"] = round(float(times.sum()) / 1e6, 3)
        result[cmd.name] = row
    return result
