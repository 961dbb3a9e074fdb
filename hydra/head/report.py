"""What the supervisor is told and what it tells: its patience, its events, its sums. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SupervisorSettings:
    """How patient the supervisor is. The first nine are keys of [head] and [link] in hydra.toml."""

    queue_max: int = 64
    queue_wait_s: float = 600.0
    grace_s: float = 10.0
    peer_wait_s: float = 300.0
    step_deadline_s: float = 120.0
    silence_s: float = 15.0
    restart_limit: int = 5
    restart_window_s: float = 600.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 30.0
    heartbeat_s: float = 10.0
    """An engine process that says nothing at all for this long is stopped or dead; six times that while it loads."""
    suspect_s: float = 3.0
    """A step this long makes us look at the peers; nothing is ended for it."""
    probe_s: float = 5.0
    probe_timeout_s: float = 2.0


@dataclass(frozen=True)
class Event:
    """Something worth a log line or a progress bar. kind: state, progress, peer, failure, recovered, log."""

    kind: str
    message: str
    node: str | None = None
    level: str = "info"
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Totals:
    """Sums since start, for /metrics. ``draft_s``, ``verify_s``: seconds that drafts and verifications took."""

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    resumed_streams: int = 0
    last_prefill_tps: float = 0.0
    last_decode_tps: float = 0.0

    def count(self, outcome: str) -> None:
        self.requests[outcome] = self.requests.get(outcome, 0) + 1

    def add(self, stats: dict[str, Any]) -> None:
        """One answer's own figures, as its `done` frame has them."""
        self.prompt_tokens += int(stats.get("prompt_tokens") or 0)
        self.drafted += int(stats.get("drafted") or 0)
        self.accepted += int(stats.get("accepted") or 0)
        self.draft_rounds += int(stats.get("draft_rounds") or 0)
        self.draft_s += float(stats.get("draft_s") or 0.0)
        self.verify_s += float(stats.get("verify_s") or 0.0)
        self.last_prefill_tps = float(stats.get("prefill_tps") or self.last_prefill_tps)
        self.last_decode_tps = float(stats.get("decode_tps") or self.last_decode_tps)

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a verified draft, verification's own included."""
        return 1 + self.accepted / self.draft_rounds if self.draft_rounds else None


def percent(load: dict[str, Any]) -> float | None:
    """How far a load is, by its bytes, else by its layers."""
    for done, total in (("bytes_done", "bytes_total"), ("layers_done", "layers_total")):
        if load.get(total):
            return round(100.0 * float(load.get(done) or 0) / float(load[total]), 1)
    return None
