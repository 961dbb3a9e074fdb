"""`hydra bench mtp --by-step`: three engines say the same, and what is reported is their times."""

from __future__ import annotations

from pathlib import Path

from hydra.bench import bystep
from tests.engine_support import toy


def test_what_adaptive_drafting_costs_is_measured() -> None:
    lines: list[str] = []
    cost = bystep.run(Path(toy(acceptance=0.0)), rounds=2, answers=2, tokens=24, n_max=2, threads=1,
                      report=lines.append)
    assert cost.same
    assert len(cost.first) == len(cost.later) == len(cost.idle) == len(lines) == 2
    assert all(0 < value < 10 for value in (*cost.first, *cost.later, *cost.idle))
    assert len(cost.drafted) == 4
    assert cost.drafted[0] > 0  # a new engine tries; what it learns is kept for the next answer
    assert [row[0] for row in cost.rows()] == ["adaptive, first answer", "adaptive, later answers", "never drafts"]
    assert {"first_median", "later_median", "idle_median"} <= set(cost.to_dict())
