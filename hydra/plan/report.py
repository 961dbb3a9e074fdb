"""One plan, whole: what each node needs and has, the split, what limits it, how fast, and what would help.

Ties the arithmetic of this package together; knows nothing of hydra.toml's file or of devices that are really there
(hydra/commands/plan.py finds those out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.plan import speed, split
from hydra.plan.memory import NodeBytes, Place, Setting, all_nodes
from hydra.plan.shape import Shape

NEAR_DEPTH = 2048


@dataclass(frozen=True)
class Plan:
    """counts: layers by node. chosen: the split was worked out here, not given. near, far: speed at 2,048 tokens of
    context and with the context full, None where a bandwidth is not known. context_here, context_best: the largest
    ctx_size with this split and with the best one; 0 = none fits, -1 = not known.
    """

    shape: Shape
    setting: Setting
    places: tuple[Place, ...]
    counts: dict[str, int]
    chosen: bool
    nodes: dict[str, NodeBytes]
    lacking: dict[str, int]
    near: speed.Speed | None
    far: speed.Speed | None
    context_here: int
    context_best: int
    changes: tuple[split.Change, ...] = ()
    best: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return not self.lacking

    @property
    def limit(self) -> str:
        """The node that has the least room left, in words."""
        known = [place for place in self.places if place.memory_bytes]
        if not known:
            return "nothing that is known: no node's memory is"
        tightest = min(known, key=lambda p: p.memory_bytes - self.nodes[p.name].total)
        left = tightest.memory_bytes - self.nodes[tightest.name].total
        return f"memory of {tightest.name} ({abs(left) / 2**30:.2f} GiB {'left' if left >= 0 else 'too little'})"

    def to_dict(self) -> dict[str, Any]:
        """Everything in bytes, seconds and tokens."""
        def pace(found: speed.Speed | None) -> dict[str, Any] | None:
            if found is None:
                return None
            return {"depth": found.depth, "step_ms": round(found.step_s * 1e3, 3),
                    "tokens_per_s": round(found.tokens_per_s, 2),
                    "mtp_step_ms": round(found.mtp_step_s * 1e3, 3) or None,
                    "mtp_tokens_per_s": round(found.mtp_tokens_per_s, 2) or None,
                    "nodes": {name: asdict(node) for name, node in found.nodes.items()}}

        return {
            "fits": self.fits,
            "model": {"name": self.shape.name, "architecture": self.shape.arch, "layers": self.shape.n_layer,
                      "mtp_blocks": self.shape.n_nextn, "file_bytes": self.shape.file_bytes},
            "ctx_size": self.setting.context(self.shape),
            "split": self.counts, "split_chosen": self.chosen, "best_split": self.best, "limit": self.limit,
            "nodes": [{"name": place.name, "layers": self.counts[place.name], **asdict(self.nodes[place.name]),
                       "total": self.nodes[place.name].total, "memory_bytes": place.memory_bytes or None,
                       "lacking": self.lacking.get(place.name, 0),
                       "bandwidth_bytes_s": place.bandwidth_bytes_s or None} for place in self.places],
            "largest_ctx_size": self.context_here, "largest_ctx_size_best_split": self.context_best,
            "speed": [pace(self.near), pace(self.far)],
            "changes": [{"change": change.words, "split": change.counts} for change in self.changes],
            "notes": list(self.shape.notes),
        }


def make(shape: Shape, setting: Setting, places: Sequence[Place], counts: dict[str, int] | None, *,
         acceptance: float = speed.ACCEPTANCE, link_s: float = speed.LINK_S,
         wire_bytes_s: float = speed.WIRE_BYTES_S) -> Plan:
    """The plan for these nodes (peers in order, the head last). counts: the split, None = the best one.

    Raises: ModelError when there is no head among the places.
    """
    best = split.best_split(shape, setting, places)
    given = counts if counts is not None else best
    nodes = all_nodes(shape, setting, places, given)
    missing = split.lacking(nodes, places)
    known = any(place.memory_bytes for place in places)
    full = setting.context(shape)

    def at(depth: int) -> speed.Speed | None:
        return speed.predict(shape, setting, places, given, depth=depth, acceptance=acceptance, link_s=link_s,
                             wire_bytes_s=wire_bytes_s)

    return Plan(
        shape, setting, tuple(places), dict(given), counts is None, nodes, missing, at(min(NEAR_DEPTH, full)), at(full),
        split.largest_context(shape, setting, places, given) if known else -1,
        split.largest_context(shape, setting, places, None) if known else -1,
        tuple(split.changes(shape, setting, places, given)) if missing else (), best)
