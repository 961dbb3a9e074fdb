"""Indices are known before a kernel trusts them: where they come from, what they hold, what may have changed them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hydra.errors import ProtocolError
from hydra.peer import indices
from hydra.peer.indices import PLACE_SHIFT, IndexGuard, IndexPlan
from hydra.peer.rules import TensorTable, check_graph, check_tensors
from tests.hostile import craft, fixtures
from tests.hostile.tables import table

CONTEXT = craft.Context(1, 0x10000, 0, 0)
IDS_AT = 65536


def leaf(id_: int, ne: tuple[int, ...], type_: str = "f32", **fields: object) -> np.ndarray:
    return craft.tensor(id_, type_, ne, (id_ - 1) * 65536, c=CONTEXT, **fields)  # type: ignore[arg-type]


def planned(*rows: np.ndarray, nodes: list[int], beyond: dict[int, int] | None = None) -> IndexPlan:
    t = table(nodes, np.concatenate(rows), {1: (0x10000, 1 << 20)})
    check_tensors(t)
    check_graph(t)
    return plan_of(t, beyond)


def plan_of(t: TensorTable, beyond: dict[int, int] | None = None) -> IndexPlan:
    assert t.layout is not None
    return indices.plan(t, t.layout, beyond)


def picked(type_: str = "i32", count: int = 3) -> IndexPlan:
    """GET_ROWS (i32) or SET_ROWS (i64) by ``count`` indices at IDS_AT, of 8 rows."""
    if type_ == "i32":
        out = leaf(3, (64, count), op="GET_ROWS", src=(1, 2))
        return planned(leaf(1, (64, 8)), leaf(2, (count,), type_), out, nodes=[3])
    rows, target = leaf(1, (64, count)), leaf(3, (64, 8))
    out = craft.tensor(4, "f32", (64, 8), 2 * 65536, c=CONTEXT, op="SET_ROWS", src=(1, 2, 3), view_src=3)
    return planned(rows, leaf(2, (count,), type_), target, out, nodes=[4])


class Memory:
    """What the guard reads back, and how often it had to."""

    def __init__(self, *values: int, dtype: str = "<i4") -> None:
        self.data = np.array(values, dtype).tobytes()
        self.reads = 0

    def __call__(self, place: int, size: int) -> bytes:
        self.reads += 1
        at = place - IDS_AT
        return self.data[at : at + size]


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize("name", fixtures.names())
def test_a_real_graph_has_a_plan(name: str) -> None:
    t = fixtures.load(name).table()
    check_tensors(t)
    check_graph(t)
    plan = plan_of(t)
    for use in plan.uses:
        assert use.limit > 0 and use.size_bytes > 0
    starts, ends = plan.writes()
    assert (starts < ends).all() and (starts[1:] > ends[:-1]).all()


def test_what_the_client_wrote_is_known_without_asking_the_device() -> None:
    memory = Memory()
    guard = IndexGuard(memory)
    plan = picked()
    assert guard.note(IDS_AT, i32(0, 7, 3), 4) is True
    guard.check(plan)
    assert guard.note(IDS_AT, i32(1, 1, 1), 4) is False
    guard.check(plan)
    assert memory.reads == 0


@pytest.mark.parametrize("values", [(0, 8, 1), (-1, 0, 0), (2**31 - 1, 0, 0), (0, 0, -(2**31))])
def test_an_index_out_of_range_is_refused_with_its_numbers(values: tuple[int, ...]) -> None:
    guard = IndexGuard(Memory())
    guard.note(IDS_AT, i32(*values), 4)
    with pytest.raises(ProtocolError, match=r"Graph node 0, GET_ROWS: index -?\d+ of 8 rows"):
        guard.check(picked())


def test_wide_indices() -> None:
    guard = IndexGuard(Memory())
    plan = picked("i64")
    guard.note(IDS_AT, np.array([0, 7, 7], "<i8").tobytes(), 8)
    guard.check(plan)
    guard.note(IDS_AT, np.array([0, 2**32, 7], "<i8").tobytes(), 8)
    with pytest.raises(ProtocolError, match="SET_ROWS: index 4294967296"):
        guard.check(plan)


def test_only_the_part_that_is_used_counts() -> None:
    """One input of which each operation reads a part: the other part may hold anything."""
    guard = IndexGuard(Memory())
    plan = picked(count=2)
    guard.note(IDS_AT, i32(1, 2, 1000, -5), 4)
    guard.check(plan)
    guard.note(IDS_AT, i32(1, 1000, 2, 3), 4)
    with pytest.raises(ProtocolError):
        guard.check(plan)


def test_what_nobody_wrote_is_read_back() -> None:
    memory = Memory(0, 1, 2)
    IndexGuard(memory).check(picked())
    assert memory.reads == 1
    with pytest.raises(ProtocolError, match="index 99"):
        IndexGuard(Memory(0, 99, 2)).check(picked())


SPOILS: dict[str, Callable[[IndexGuard], object]] = {
    "another write over it": lambda g: g.wrote(IDS_AT + 4, IDS_AT + 8),
    "a write that ends in it": lambda g: g.wrote(0, IDS_AT + 1),
    "other integers over a part": lambda g: g.note(IDS_AT + 8, i32(1, 1), 4),
    "integers too many to keep": lambda g: g.note(IDS_AT, bytes(indices.MAX_NOTE_BYTES + 4), 4),
    "the buffer freed": lambda g: g.forget_buffer(0),
    "more notes than are kept": lambda g: [g.note(1 << 40 | i << 8, i32(0), 4) for i in range(indices.MAX_NOTES + 1)],
}


@pytest.mark.parametrize("what", SPOILS)
def test_what_may_have_changed_is_read_back(what: str) -> None:
    memory = Memory(99, 99, 99)
    guard = IndexGuard(memory)
    guard.note(IDS_AT, i32(0, 1, 2), 4)
    SPOILS[what](guard)
    with pytest.raises(ProtocolError, match="index 99"):
        guard.check(picked())
    assert memory.reads == 1


def test_writes_elsewhere_change_nothing() -> None:
    guard = IndexGuard(Memory())
    guard.note(IDS_AT, i32(0, 1, 2), 4)
    guard.wrote(IDS_AT - 64, IDS_AT)
    guard.wrote(IDS_AT + 12, IDS_AT + 4096)
    guard.note(IDS_AT + 12, i32(5), 4)
    guard.forget_buffer(1)
    guard.check(picked())
    assert guard.watches(IDS_AT, IDS_AT + 1) and not guard.watches(0, IDS_AT)
    assert not guard.watches((1 << PLACE_SHIFT) + IDS_AT, (1 << PLACE_SHIFT) + IDS_AT + 4)


def test_a_graph_that_writes_over_them_afterwards_makes_them_unknown() -> None:
    """The allocator gives an input's place away after its last use; the client then writes it again, or not."""
    memory = Memory(99, 99)
    guard = IndexGuard(memory)
    later = craft.tensor(4, "f32", (2,), IDS_AT, c=CONTEXT, op="SQR", src=(5,))
    out = leaf(3, (64, 2), op="GET_ROWS", src=(1, 2))
    plan = planned(leaf(1, (64, 8)), leaf(2, (2,), "i32"), out, leaf(5, (2,)), later, nodes=[3, 4])
    guard.note(IDS_AT, i32(0, 1), 4)
    guard.check(plan)
    guard.launched(plan)
    guard.note(IDS_AT, i32(0, 1), 4)
    guard.check(plan)
    guard.launched(plan)
    with pytest.raises(ProtocolError, match="index 99"):
        guard.check(plan)


def test_a_graph_that_writes_over_them_before_their_use_is_refused() -> None:
    first = craft.tensor(4, "f32", (2,), IDS_AT, c=CONTEXT, op="SQR", src=(5,))
    out = leaf(3, (64, 2), op="GET_ROWS", src=(1, 2))
    rows = (leaf(1, (64, 8)), leaf(2, (2,), "i32"), leaf(5, (2,)), first, out)
    with pytest.raises(ProtocolError, match="GET_ROWS: node 0 writes over its indices"):
        planned(*rows, nodes=[4, 3])
    # and so is one whose kernel writes there though its tensor does not
    beside = craft.tensor(4, "f32", (2,), IDS_AT - 256, c=CONTEXT, op="SQR", src=(5,))
    rows = (*rows[:3], beside, out)
    planned(*rows, nodes=[4, 3])
    with pytest.raises(ProtocolError, match="writes over its indices"):
        planned(*rows, nodes=[4, 3], beyond={3: 4096})


def experts(count: int, sorted_from: int) -> tuple[np.ndarray, ...]:
    order = leaf(2, (sorted_from, 3), "i32", op="ARGSORT", src=(1,), params=(1,))
    step = 4 * sorted_from
    ids = craft.tensor(
        3, "i32", (2, 3), IDS_AT, c=CONTEXT, op="VIEW", src=(2,), view_src=2, nb=(4, step, 3 * step, 3 * step)
    )
    out = leaf(6, (8, 2, 3), op="MUL_MAT_ID", src=(4, 5, 3))
    return leaf(1, (sorted_from, 3)), order, ids, leaf(4, (64, 8, count)), leaf(5, (64, 1, 3)), out


def test_sorted_indices_are_in_range_by_their_shape() -> None:
    assert planned(*experts(4, 4), nodes=[2, 3, 6]).uses == []
    with pytest.raises(ProtocolError, match="indices sorted from 5 for 4 rows"):
        planned(*experts(4, 5), nodes=[2, 3, 6])


def test_sorted_indices_may_not_be_written_over_either() -> None:
    rows = experts(4, 4)
    over = craft.tensor(7, "f32", (4, 3), IDS_AT, c=CONTEXT, op="SQR", src=(1,))
    with pytest.raises(ProtocolError, match="MUL_MAT_ID: node 2 writes over its indices"):
        planned(*rows, over, nodes=[2, 3, 7, 6])


def test_sorted_indices_are_only_known_if_the_sort_is_not_skipped() -> None:
    rows = experts(4, 4)
    rows[1]["flags"] = 0
    with pytest.raises(ProtocolError, match="node 0 makes its indices and is skipped"):
        planned(*rows, nodes=[2, 3, 6])
    rows[5]["flags"] = 0  # a branch that is not taken is not asked about
    planned(*rows, nodes=[2, 3, 6])


def test_experts_are_not_chosen_by_arithmetic() -> None:
    cast = leaf(2, (2, 3), "i32", op="CPY", src=(1, 2))
    out = leaf(6, (8, 2, 3), op="MUL_MAT_ID", src=(4, 5, 2))
    with pytest.raises(ProtocolError, match="computed by CPY; no model does that"):
        planned(leaf(1, (2, 3)), cast, leaf(4, (64, 8, 4)), leaf(5, (64, 1, 3)), out, nodes=[2, 6])


def test_copies_of_indices_lead_back_to_what_was_copied() -> None:
    copy = leaf(3, (3,), "i32", op="CONT", src=(2,))
    out = leaf(4, (64, 3), op="GET_ROWS", src=(1, 3))
    plan = planned(leaf(1, (64, 8)), leaf(2, (3,), "i32"), copy, out, nodes=[3, 4])
    assert [(use.place, use.limit) for use in plan.uses] == [(IDS_AT, 8)]


def test_nothing_is_asked_of_operations_that_compute_nothing() -> None:
    plan = planned(leaf(1, (64, 8)), leaf(2, (0,), "i32"), leaf(3, (64, 0), op="GET_ROWS", src=(1, 2)), nodes=[3])
    assert plan.uses == []
