"""The peers of a head, as the supervisor sees them: who they are, what the last probe said, what they have counted.

Knows how to look (head/probe.py) and nothing of when or why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hydra.head import probe
from hydra.head.probe import PeerReport, PeerTarget


class Peers:
    """timeout_s: of one probe."""

    def __init__(self, targets: Sequence[PeerTarget], timeout_s: float) -> None:
        self.targets = tuple(targets)
        self.timeout_s = timeout_s
        self._reports: dict[str, PeerReport] = {}
        self._stats: dict[str, dict[str, Any]] = {}

    def replace(self, targets: Sequence[PeerTarget]) -> None:
        """Other peers, or the same at other addresses: what was known of them is forgotten."""
        self.targets = tuple(targets)
        self._reports.clear()
        self._stats.clear()

    async def look(self, *, engine_connected: bool) -> list[PeerReport]:
        """One probe of each, side by side, in the order of the targets."""
        reports = await asyncio.gather(
            *(probe.probe(target, self.timeout_s, engine_connected=engine_connected) for target in self.targets)
        )
        self._reports.update((report.target.name, report) for report in reports)
        return list(reports)

    async def count(self) -> None:
        """Their counters, for /metrics and `hydra ps`."""
        for target in self.targets:
            self._stats[target.name] = await probe.stats(target, self.timeout_s)

    def rows(self) -> list[dict[str, Any]]:
        """What is known of each, as plain values."""
        return [self._row(target) for target in self.targets]

    def _row(self, target: PeerTarget) -> dict[str, Any]:
        row: dict[str, Any] = {"name": target.name, "endpoint": target.endpoint, "state": "unknown"}
        report = self._reports.get(target.name)
        if report is not None:
            row |= {
                "state": report.state,
                "detail": report.detail,
                "rtt_ms": report.rtt_ms,
                "stock": report.stock,
                "health": report.health,
                "stats": self._stats.get(target.name, {}),
            }
        return row
