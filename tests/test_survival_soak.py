"""One minute of random load and faults over real processes, as `hydra bench soak` runs it."""

from __future__ import annotations

import pytest

from hydra.bench import soak


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_everything() -> None:
    said: list[str] = []
    outcome = soak.soak(1.0, streams=4, seed=11, report=said.append)
    assert outcome.ok, (outcome.account.wrong[:5], outcome.left_open, said)
    # A slow box gets through fewer of them in the minute.
    assert len(outcome.account.faults) >= 5 and set(outcome.account.faults) <= set(soak.FAULTS), said
    assert outcome.restarts >= 2 and outcome.resumed > 0 and outcome.account.tokens > 500, said
    # The parent must not grow with what it survives: ten restarts are no reason for as many megabytes.
    assert outcome.rss_end_bytes - outcome.rss_begin_bytes < 32 << 20
