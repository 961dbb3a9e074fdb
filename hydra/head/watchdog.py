"""Decides from an engine's signs of life that it will not go on by itself.

A child may be dead silent (stopped, deadlocked), busy with one step for ever (it waits for a peer that says nothing:
the stock client has no time-out), idle with a peer that was started anew, or merely slow. A long step alone is no
proof: it makes us look at the peers first, and a link that was cut and came back needs no restart at all, because TCP
carries on where it was. Knows nothing of processes or frames; it is told what was heard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from hydra.head.probe import PeerReport
from hydra.head.report import SupervisorSettings

TICK_S = 0.25


class Pulse:
    """What was last heard of the engine, and when (time.monotonic)."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.loading = True
        self.busy = False
        self.step = 0
        self.heard_at = now
        self.moved_at = now

    def heard(self) -> None:
        self.heard_at = time.monotonic()

    def moved(self) -> None:
        self.moved_at = time.monotonic()

    def beat(self, step: int, busy: bool) -> None:
        """A heartbeat. An idle engine makes no steps, so it counts as moving; a loading one has to show progress."""
        if step != self.step or not (busy or self.loading):
            self.moved()
        self.step, self.busy = step, busy


class Watchdog:
    """`wait_for_stall` returns the reason once the engine has to be ended.

    Of its patience: step_deadline_s bounds one step, or one stretch of loading without progress; silence_s a peer that
    does not answer while a step waits; heartbeat_s a child that sends no frame at all; suspect_s is when to look.
    """

    def __init__(
        self, pulse: Pulse, patience: SupervisorSettings, look: Callable[[], Awaitable[list[PeerReport]]]
    ) -> None:
        self.pulse = pulse
        self.patience = patience
        self._look = look
        self._instances: dict[str, str] = {}
        self._bad_since: dict[str, float] = {}

    async def wait_for_stall(self) -> str:
        for report in await self._look():
            self._remember(report)
        looked_at = 0.0
        while True:
            await asyncio.sleep(min(TICK_S, self.patience.heartbeat_s / 4))
            pulse, now = self.pulse, time.monotonic()
            quiet, stuck = now - pulse.heard_at, now - pulse.moved_at
            if quiet > self.patience.heartbeat_s * (6 if pulse.loading else 1):
                return f"gave no sign of life for {quiet:.1f} s"
            waits = (pulse.busy or pulse.loading) and stuck >= self.patience.suspect_s
            doing = "a stretch of loading" if pulse.loading else f"step {pulse.step}"
            if waits and stuck > self.patience.step_deadline_s:
                return f"stalled: {doing} takes {stuck:.1f} s"
            if not waits and (pulse.busy or pulse.loading):
                self._bad_since.clear()  # it moves: whatever the peers were, they are there
                continue
            # An idle engine would find out with the next request; it is restarted now, so that this one need not wait.
            if now - looked_at >= (min(1.0, self.patience.silence_s / 4) if waits else self.patience.probe_s):
                looked_at = now
                words = self._judge(await self._look())
                if words:
                    return (
                        f"stalled: {doing} waits for {words}" if waits else f"was idle and lost its connection: {words}"
                    )

    def _judge(self, reports: list[PeerReport]) -> str:
        now = time.monotonic()
        for report in reports:
            name = report.target.name
            if report.usable:
                self._bad_since.pop(name, None)
                if self._remember(report):
                    return f"{report.words}, but was started anew"
                continue
            since = self._bad_since.setdefault(name, now)
            # A refused connection is an answer: the box is there and the program is not. The rest may be the network.
            if report.state in ("refused", "mismatch") or now - since >= self.patience.silence_s:
                return report.words
        return ""

    def _remember(self, report: PeerReport) -> bool:
        """True when the peer is another instance than the one this engine began with."""
        if report.instance is None:
            return False
        return self._instances.setdefault(report.target.name, report.instance) != report.instance
