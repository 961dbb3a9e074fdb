"""The hostile corpus against hydra's peer: every session is closed or answered, and the next client gets its sum.

``python -m tests.hostile.run`` plays the same against the stock server too; the table is in docs/security.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.corpus import CASES, Case
from tests.hostile.run import HydraTarget, play
from tests.peer_tools import get_json


@pytest.fixture(scope="module")
def target() -> Iterator[HydraTarget]:
    target = HydraTarget()
    yield target
    target.close()


def test_the_corpus_is_large_and_its_names_are_its_own() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert {"framing", "handles", "types", "offsets", "copies", "graphs", "operations", "shapes", "indices"} <= {
        case.kind for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}: {case.name}" for case in CASES])
def test_a_hostile_session(case: Case, target: HydraTarget) -> None:
    result = play(case, target)
    assert not result.ended, "the device worker restarted"
    assert result.served, result.note
    if case.end == "wait" and not (case.hold and case.then == "answered"):
        assert result.outcome == case.then


def test_nothing_of_it_restarted_the_worker_or_stayed(target: HydraTarget) -> None:
    health = get_json(target.port, "/health")
    assert health["state"] == "ok"
    assert health["restarts"] == 0
    assert health["connections"] == 0
