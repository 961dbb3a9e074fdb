"""What recheck says of a graph in which a few shapes changed is what the whole of the rules says of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hydra.errors import PeerError, ProtocolError
from hydra.peer import indices
from hydra.peer.ops import OP
from hydra.peer.recheck import recheck
from hydra.peer.rules import Layout, TensorTable, sizes_to_ask
from hydra.rpc.client import Client
from tests.hostile import fixtures
from tests.peer_tools import NODE, OP_ADD, Vectors, peer
from tests.test_peer_rules import copy, verdict


def whole(t: TensorTable) -> Layout | None:
    """The layout that everything asked anew gives, or None where it is refused."""
    fresh = copy(t)
    try:
        verdict(fresh)
    except ProtocolError:
        return None
    return fresh.layout


def assert_same(found: Layout, expected: Layout) -> None:
    for column in dataclasses.fields(Layout):
        if column.name != "memo":
            assert np.array_equal(getattr(found, column.name), getattr(expected, column.name)), column.name


def accepted(name: str) -> tuple[TensorTable, Layout]:
    t = fixtures.load(name).table()
    layout = whole(t)
    assert layout is not None
    indices.plan(t, layout)
    layout.memo["sizes"] = sizes_to_ask(t, layout)
    return t, layout


@pytest.mark.parametrize("name", fixtures.names())
def test_random_changes_get_the_verdict_of_the_whole_graph(name: str) -> None:
    t, layout = accepted(name)
    rng = np.random.default_rng(31)
    passed = 0
    for turn in range(60):
        bent = copy(t)
        rows = np.sort(rng.choice(len(t), min(len(t), int(rng.integers(1, 4))), replace=False))
        for row in rows:
            dim = int(rng.integers(0, 4))
            match int(rng.integers(0, 10)):
                case 0:
                    bent.ne[row, dim] += int(rng.choice([-1, 1, 32, 2**31]))
                case 1:
                    bent.nb[row, dim] += np.uint64(rng.choice([1, 4, 32, 2**31]))
                case 2:
                    bent.op_params[row, int(rng.integers(0, 4))] += int(rng.choice([-1, 1, 4]))
                case 3:
                    bent.view_offs[row] += np.uint64(rng.choice([1, 4, 64]))
                case 4:
                    bent.ne[row] = 0
                case 5:  # a stride that nothing steps by
                    bent.nb[row, 3] *= np.uint64(1 + (bent.ne[row, 3] == 1))
                case _:
                    pass
        expected = whole(bent)
        found = recheck(bent, layout, rows)
        if found is not None:
            assert expected is not None, turn
            assert_same(found[0], expected)
            passed += 1
        elif expected is not None:  # only where a tensor became empty, or stopped being empty
            assert ((expected.elements == 0) != (layout.elements == 0)).any(), turn
    assert 3 < passed < 60


def grown(t: TensorTable) -> tuple[TensorTable, np.ndarray] | None:
    """A graph whose attention sees half of the cells: what a longer or shorter conversation changes."""
    bent = copy(t)
    for node in t.nodes[t.op[t.nodes] == OP["FLASH_ATTN_EXT"]].tolist():
        cells = int(t.ne[t.src[node, 1], 1])
        for slot in (1, 2, 3):
            row = int(t.src[node, slot])
            while row >= 0:
                at = np.flatnonzero(t.ne[row] == cells)
                if not len(at) or (t.op[row] == OP["NONE"] and slot < 3):
                    break  # the cache itself
                whole_rows = bent.nb[row, 1] == np.uint64(t.ne[row, 0] * 2) and slot == 3
                bent.ne[row, at[0]] = cells // 2
                if whole_rows:
                    bent.nb[row, 1:] = bent.ne[row, 0] * 2
                    bent.nb[row, 2:] *= np.uint64(bent.ne[row, 1])
                    bent.nb[row, 3] *= np.uint64(bent.ne[row, 2])
                row = int(t.src[row, 0])
    changed = np.flatnonzero((bent.ne != t.ne).any(1) | (bent.nb != t.nb).any(1))
    return (bent, changed) if len(changed) else None


def test_a_conversation_that_grew() -> None:
    seen = 0
    for name in fixtures.names():
        t, layout = accepted(name)
        pair = grown(t)
        if pair is None:
            continue
        bent, changed = pair
        expected = whole(bent)
        if expected is None:
            continue
        found = recheck(bent, layout, changed)
        assert found is not None, name
        assert_same(found[0], expected)
        assert "indices" in found[0].memo, "where its indices come from was found before"
        old, new = indices.plan(bent, found[0]), indices.plan(bent, expected)
        assert old.uses == new.uses
        assert np.array_equal(old.start, new.start) and np.array_equal(old.end, new.end)
        attention = t.nodes[t.op[t.nodes] == OP["FLASH_ATTN_EXT"]]
        assert np.isin(attention, found[1]).all(), "the device is asked about what uses them"
        assert len(found[1]) < len(t.nodes) / 2
        sizes = sizes_to_ask(bent, expected)
        asked = found[0].memo["sizes"]
        assert np.array_equal(asked < 0, sizes < 0)
        layout.memo["sizes"][:] = np.where(layout.memo["sizes"] < 0, 7, 0)  # the device has answered
        again = recheck(bent, layout, changed)
        assert again is not None
        told = np.flatnonzero(again[0].memo["sizes"] == 7)
        assert len(told) and not np.isin(found[1], told).any(), "only what may be another size is asked again"
        seen += 1
    assert seen >= 6


def test_indices_that_are_read_otherwise_are_looked_up_again() -> None:
    for name in fixtures.names():
        t, layout = accepted(name)
        for node in t.nodes[t.op[t.nodes] == OP["GET_ROWS"]].tolist():
            table = int(t.src[node, 0])
            if t.op[table] != OP["NONE"] or t.view_src[table] >= 0 or t.ne[table, 1] < 2 or t.ne[table, 2] > 1:
                continue
            bent = copy(t)
            bent.ne[table, 1] -= 1
            bent.nb[table, 2:] -= bent.nb[table, 1]
            found = recheck(bent, layout, np.array([table]))
            if found is None:
                continue
            assert "indices" not in found[0].memo
            limits = {use.limit for use in indices.plan(bent, found[0]).uses}
            assert int(bent.ne[table, 1]) in limits
            return
    pytest.fail("no recorded graph has a table that may be shorter")


def test_through_a_peer_shapes_change_and_a_wrong_one_is_refused() -> None:
    with peer("hydra") as (host, port), Client(host, port) as client:
        vectors = Vectors(client, slots=64)
        for slot in range(64):
            vectors.set(slot, np.full(64, slot))

        def rows(n: int, result: int) -> list[np.ndarray]:
            """Twenty sums of slots 3k and 3k + 1; in the last one n numbers are added, to ``result`` numbers."""
            shapes = {57: n, 58: n, 59: result}

            def fields(slot: int) -> dict[str, object]:
                size = shapes.get(slot, 64)
                return {"ne": (size, 1, 1, 1), "nb": (4, 4 * size, 4 * size, 4 * size)}

            leaves = [vectors.row(3 * k + i, **fields(3 * k + i)) for k in range(20) for i in (0, 1)]
            sums = [vectors.op(3 * k + 2, OP_ADD, 3 * k, 3 * k + 1, **fields(3 * k + 2)) for k in range(20)]
            return [*leaves, *sums]

        nodes = [3 * k + 2 for k in range(20)]
        assert NODE > 64
        for n in (64, 32, 16, 64):
            vectors.set(59, np.full(64, 59))
            vectors.compute(nodes, rows(n, n))
            assert (vectors.get(59) == np.where(np.arange(64) < n, 57 + 58, 59)).all()
            assert (vectors.get(56) == 54 + 55).all()
        vectors.compute(nodes, rows(32, 64))
        with pytest.raises(PeerError):
            vectors.get(59)
