"""/metrics for Prometheus: read from the supervisor when asked, so that nothing is counted twice.

Source: https://prometheus.io/docs/practices/naming/ (base units, `_total`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hydra.api.state import HeadState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("waiting", "loading", "ready", "stopping", "stopped", "failed")


def totals(head: HeadState) -> dict[str, Any]:
    """The sums as plain numbers."""
    sums = head.supervisor.totals
    return {
        "requests": dict(sums.requests),
        "prompt_tokens": sums.prompt_tokens,
        "generated_tokens": sums.generated_tokens,
        "drafted": sums.drafted,
        "accepted": sums.accepted,
        "acceptance_rate": sums.acceptance_rate,
        "mean_acceptance_length": sums.mean_acceptance_length,
        "draft_s": sums.draft_s,
        "verify_s": sums.verify_s,
        "prefill_tps": sums.last_prefill_tps,
        "decode_tps": sums.last_decode_tps,
        "resumed_streams": sums.resumed_streams,
    }


def render(head: HeadState) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Head(head))
    return generate_latest(registry)


class _Head(Collector):
    def __init__(self, head: HeadState) -> None:
        self._head = head

    def collect(self) -> Iterator[Metric]:
        supervisor = self._head.supervisor
        sums, board, status = supervisor.totals, supervisor.board, supervisor.status()
        yield _counter("hydra_prompt_tokens", "Tokens of prompts that were read.", sums.prompt_tokens)
        yield _counter("hydra_generated_tokens", "Tokens of answers.", sums.generated_tokens)
        yield _counter("hydra_drafted_tokens", "Tokens guessed ahead.", sums.drafted)
        yield _counter("hydra_accepted_tokens", "Guessed tokens that the model agreed with.", sums.accepted)
        yield _gauge("hydra_acceptance_ratio", "Accepted of drafted tokens since start.", sums.acceptance_rate or 0.0)
        yield _gauge("hydra_acceptance_length_mean", "Tokens that a verified draft gives, verification's own included.",
                     sums.mean_acceptance_length or 0.0)
        yield _counter("hydra_draft_seconds", "Time in drafts.", sums.draft_s)
        yield _counter("hydra_verify_seconds", "Time in verifications, and in steps without a draft.", sums.verify_s)
        yield _gauge("hydra_prompt_tokens_per_second", "Prompt rate of the last request.", sums.last_prefill_tps)
        yield _gauge("hydra_generated_tokens_per_second", "Decode rate of the last request.", sums.last_decode_tps)
        yield _counter("hydra_resumed_streams", "Answers continued by a new engine.", sums.resumed_streams)
        yield _counter("hydra_engine_restarts", "Engines that died or stalled.", status["restarts"])
        yield _gauge("hydra_slots", "Requests served at once.", board.parallel)
        yield _gauge("hydra_slots_busy", "Requests being served.", len(board.active))
        yield _gauge("hydra_queue_length", "Requests waiting for a slot.", len(board.waiting))
        yield _gauge("hydra_uptime_seconds", "Since the head was started.", status["uptime_s"])
        requests = CounterMetricFamily("hydra_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in sorted(sums.requests.items()):
            requests.add_metric([outcome], count)
        yield requests
        state = GaugeMetricFamily("hydra_state", "1 for the state that the head is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status["state"] == name))
        yield state
        yield from _peers(status["peers"])


def _peers(peers: list[dict[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("hydra_peer_up", "1 when the peer can compute.", labels=["peer"])
    trip = GaugeMetricFamily("hydra_peer_round_trip_seconds", "A health request to the peer.", labels=["peer"])
    restarts = CounterMetricFamily("hydra_peer_restarts", "Restarts of the peer's device worker.", labels=["peer"])
    moved = CounterMetricFamily("hydra_peer_bytes", "Bytes of the compute protocol.", labels=["peer", "direction"])
    messages = CounterMetricFamily("hydra_peer_messages", "Messages of the compute protocol.", labels=["peer"])
    for peer in peers:
        name = [peer["name"]]
        up.add_metric(name, float(peer["state"] == "up"))
        if peer.get("rtt_ms") is not None:
            trip.add_metric(name, peer["rtt_ms"] / 1e3)
        if (peer.get("health") or {}).get("restarts") is not None:
            restarts.add_metric(name, peer["health"]["restarts"])
        commands = (peer.get("stats") or {}).get("commands") or {}
        if commands:
            moved.add_metric([*name, "to_peer"], sum(row.get("bytes_in", 0) for row in commands.values()))
            moved.add_metric([*name, "from_peer"], sum(row.get("bytes_out", 0) for row in commands.values()))
            messages.add_metric(name, sum(row.get("count", 0) for row in commands.values()))
    yield from (up, trip, restarts, moved, messages)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
