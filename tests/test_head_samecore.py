"""Threads that take turns with this one are recognised, share its core while it holds, and are the only ones."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from hydra.bench.stock import StockServer
from hydra.head.engine import Engine
from hydra.head.samecore import SameCore, partners
from hydra.head.spec import Endpoint
from tests.engine_support import ask, toy, toy_spec

pytestmark = pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _pid: {0})(0)) < 2,
                                reason="needs Linux and two cores")


class Partner:
    """A thread that does nothing but answer."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.id = self._thread.native_id or 0

    def _run(self) -> None:
        while self._asked.get(timeout=60):
            self._answered.put(True)

    def turn(self) -> None:
        self._asked.put(True)
        assert self._answered.get(timeout=60)

    def close(self) -> None:
        self._asked.put(False)
        self._thread.join(60)


@pytest.fixture
def two() -> Iterator[list[Partner]]:
    made = [Partner(), Partner()]
    yield made
    for partner in made:
        partner.close()


def test_partners_are_recognised(two: list[Partner]) -> None:
    assert partners([two[1].turn, two[0].turn]) == [two[1].id, two[0].id]
    assert partners([lambda: None]) == []  # who wakes nobody has no partner


def test_they_share_a_core_while_it_holds(two: list[Partner]) -> None:
    free = os.sched_getaffinity(0)
    core = SameCore([two[0].id])
    core.hold()
    try:
        mine = os.sched_getaffinity(0)
        assert len(mine) == 1
        assert os.sched_getaffinity(two[0].id) == mine
        assert os.sched_getaffinity(two[1].id) == free
    finally:
        core.release()
    assert os.sched_getaffinity(0) == free


def test_cores_taken_away_from_outside_are_left_alone(two: list[Partner], monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.sched_getaffinity(0)
    core = SameCore([two[0].id])

    def refused(_thread: int, _cores: set[int]) -> None:
        raise OSError("Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refused)
        core.hold()
        core.release()
    core.hold()
    assert os.sched_getaffinity(0) == free


def test_an_engine_shares_its_core_with_its_peers_client_and_with_nobody_else() -> None:
    free = os.sched_getaffinity(0)
    with StockServer(threads=1) as server:
        spec = toy_spec(toy(), "mtp", endpoints=(Endpoint("mini", server.endpoint),), layers={"mini": 2})
        with Engine(spec) as engine:
            assert engine._target._core is not None
            (client,) = engine._target._core._threads
            ask(engine, ["abc"], max_tokens=5)
            assert len(os.sched_getaffinity(client)) == 1
            pinned = [task for task in os.listdir("/proc/self/task") if len(os.sched_getaffinity(int(task))) == 1]
            assert pinned == [str(client)]
            assert os.sched_getaffinity(0) == free
    with Engine(toy_spec(toy(), "mtp")) as engine:
        assert engine._target._core is None
