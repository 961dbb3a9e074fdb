"""The rules: every recorded graph of a real model passes, and no copy of one with a field bent does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hydra.errors import ProtocolError
from hydra.peer import op_rules, rules
from hydra.peer.ops import IS_VIEW_OP, OP, TYPE_NUMBERS, op_name
from hydra.peer.rules import (
    TensorTable,
    check_alloc_query,
    check_graph,
    check_tensor,
    check_tensors,
)
from tests.hostile import craft, fixtures
from tests.hostile.tables import parse_graph, table

BUFFERS = {1: (0x10000, 1 << 20), 2: (0x900000, 1 << 20)}
CONTEXT = craft.Context(1, 0x10000, 2, 0x900000)


def verdict(t: TensorTable) -> None:
    check_tensors(t)
    check_graph(t)


def graph(nodes: list[int], *rows: np.ndarray) -> TensorTable:
    return table(nodes, np.concatenate(rows), BUFFERS)


def leaf(
    id_: int, ne: tuple[int, ...] = (64,), type_: str | int = "f32", at: int | None = None, **fields: object
) -> np.ndarray:
    return craft.tensor(id_, type_, ne, (id_ - 1) * 65536 if at is None else at, c=CONTEXT, **fields)  # type: ignore[arg-type]


def copy(t: TensorTable) -> TensorTable:
    columns = {f.name: getattr(t, f.name) for f in dataclasses.fields(t)}
    arrays: dict[str, Any] = {name: column.copy() for name, column in columns.items() if isinstance(column, np.ndarray)}
    return dataclasses.replace(t, **arrays, layout=None)


@pytest.mark.parametrize("name", fixtures.names())
def test_a_real_graph_passes(name: str) -> None:
    verdict(fixtures.load(name).table())


def test_the_fixtures_cover_what_models_use() -> None:
    seen = {
        op_name(int(op)) for name in fixtures.names() for t in (fixtures.load(name).table(),) for op in t.op[t.nodes]
    }
    assert len(seen) >= 40
    assert {
        "MUL_MAT",
        "MUL_MAT_ID",
        "FLASH_ATTN_EXT",
        "SET_ROWS",
        "ROPE",
        "GATED_DELTA_NET",
        "SSM_SCAN",
        "RWKV_WKV6",
    } <= seen


def test_every_allowed_operation_has_a_rule_and_needs_no_more_than_it_takes() -> None:
    for number in np.flatnonzero(op_rules.ALLOWED):
        assert number in op_rules._RULES
        assert not (op_rules.REQUIRED[number] & ~op_rules.POSSIBLE[number]).any()


# Bending one field of a graph that is in order, in ways that no graph of ggml's own could show.

Bend = Callable[[TensorTable, int, np.random.Generator], None]


def _set(field: str, value: Callable[[TensorTable, int, np.random.Generator], object]) -> Bend:
    def bend(t: TensorTable, row: int, rng: np.random.Generator) -> None:
        getattr(t, field)[row] = value(t, row, rng)

    return bend


def _bend_use_count(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    assert t.use_count is not None
    t.use_count[:] = 0


BENDS: dict[str, Bend] = {
    "the type": _set("type", lambda t, r, g: g.choice([n for n in TYPE_NUMBERS.values() if n != t.type[r]])),
    "an unknown type": _set("type", lambda t, r, g: g.integers(43, 2**32 - 1)),
    "a removed type": _set("type", lambda t, r, g: g.choice([4, 5, 31, 32, 33, 36, 37, 38])),
    "an unknown operation": _set("op", lambda t, r, g: g.integers(101, 2**32 - 1)),
    "a custom operation": _set("op", lambda t, r, g: g.choice([OP["CUSTOM"], OP["MAP_CUSTOM1"], OP["MAP_CUSTOM3"]])),
    "the flags": _set("flags", lambda t, r, g: g.choice([-1, 32, 2**30])),
    "the address": _set("data", lambda t, r, g: int(t.buf_size[t.buf[r]]) + int(g.integers(1, 2**40))),
    "an address near 2^64": _set("data", lambda t, r, g: 2**64 - int(g.integers(1, 64))),
    "no buffer": _set("buf", lambda t, r, g: -1),
    "the use count": _bend_use_count,
}


def _bend_ne(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    t.ne[row, rng.integers(0, 4)] += int(rng.choice([1, 7, 2**20, 2**31]))


def _bend_nb(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    dim = int(np.argmax(t.ne[row]))
    t.nb[row, dim] += np.uint64(rng.choice([1, 2, 4, 2**31]))


def _bend_src(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    t.src[row, 0] = rng.choice([-1, -2, row, len(t)])


def _bend_view(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    t.view_src[row] = rng.choice([-2, row, len(t)])


def _extra_source(t: TensorTable, row: int, rng: np.random.Generator) -> None:
    t.src[row, 9] = t.nodes[0]


BENDS |= {
    "a dimension": _bend_ne,
    "a stride": _bend_nb,
    "a source": _bend_src,
    "the view": _bend_view,
    "a tenth source": _extra_source,
}


@pytest.mark.parametrize("what", BENDS)
def test_a_bent_graph_is_refused(what: str) -> None:
    rng = np.random.default_rng(20)
    passed = []
    for name in fixtures.names():
        t = fixtures.load(name).table()
        computing = [int(n) for n in t.nodes if not IS_VIEW_OP[t.op[n]] and t.ne[n].all() and t.src[n, 0] >= 0]
        for row in rng.choice(computing, min(len(computing), 12), replace=False):
            bent = copy(t)
            BENDS[what](bent, int(row), rng)
            try:
                verdict(bent)
                passed.append(
                    f"{name}: node {row} {op_name(int(t.op[row]))} {t.describe(int(row))} -> {bent.describe(int(row))}"
                )
            except ProtocolError as error:
                assert error.message.startswith(("Graph ", "A graph ")), error.message
    assert not passed, "\n".join(passed)


def test_nodes_out_of_order_are_refused() -> None:
    for name in fixtures.names():
        t = fixtures.load(name).table()
        if len(t.nodes) > 1:
            t.nodes = t.nodes[::-1].copy()
            with pytest.raises(ProtocolError, match="comes after it"):
                verdict(t)


def test_random_bytes_in_any_row_never_do_worse_than_a_refusal() -> None:
    """Whatever a row holds, the answer is a verdict: no other exception, no warning, no endless loop."""
    rng = np.random.default_rng(21)
    with np.errstate(all="raise"):
        for name in fixtures.names():
            recorded = fixtures.load(name)
            ids, rows = parse_graph(recorded.payload)
            raw = rows.view(np.uint8).reshape(len(rows), -1)
            for _ in range(30):
                bent = raw.copy()
                row, at = int(rng.integers(len(rows))), int(rng.integers(raw.shape[1] - 8))
                bent[row, at : at + 8] = rng.integers(0, 256, 8)
                try:
                    verdict(table(ids, bent.view(rows.dtype).ravel(), recorded.buffers))
                except ProtocolError:
                    pass


def test_an_error_names_the_node_the_operation_and_the_numbers() -> None:
    t = graph([3], leaf(1, (64,)), leaf(2, (48,)), leaf(3, (64,), op="ADD", src=(1, 2)))
    with pytest.raises(ProtocolError) as caught:
        verdict(t)
    message = caught.value.message
    assert "Graph node 0, ADD (tensor 2)" in message
    assert "f32[64,1,1,1]" in message and "f32[48,1,1,1]" in message and "does not repeat" in message


def test_a_cast_may_name_itself_and_nothing_else_may() -> None:
    verdict(graph([2], leaf(1), leaf(2, (64,), "f16", op="CPY", src=(1, 2))))
    with pytest.raises(ProtocolError, match="comes after it|its own source"):
        verdict(graph([2], leaf(1), leaf(2, (64,), op="ADD", src=(1, 2))))


def test_strides_that_the_wire_cut_to_32_bits_pass_where_nothing_steps_by_them() -> None:
    big = {1: (0x10000, 20 << 30)}
    # 5 GiB of f32: the natural nb[2] and nb[3] are above 2^32 and arrive cut
    row = craft.tensor(1, "f32", (1 << 20, 1280), 0, c=craft.Context(1, 0x10000, 0, 0))
    assert row["nb"][0][2] == (5 << 30) & 0xFFFFFFFF
    check_tensors(table([1], row, big))
    row["ne"][0] = (1 << 20, 640, 2, 1)
    row["nb"][0] = craft.strides(0, (1 << 20, 640, 2, 1))
    row["nb"][0][3] = 7
    with pytest.raises(ProtocolError, match="whole number"):
        check_tensors(table([1], row, big))


def test_a_state_whose_unused_stride_lies_is_refused() -> None:
    """SSM_SCAN steps through its result by the state's outermost stride, even where the state has one sequence."""
    sizes = [(16, 1, 8, 1), (1, 8, 1, 2), (8, 1, 2), (16, 8), (16, 1, 1, 2), (16, 1, 1, 2)]
    rows = [leaf(i + 1, ne) for i, ne in enumerate(sizes)]
    ids = leaf(7, (2,), "i32")
    out = leaf(8, (16 + 256,), op="SSM_SCAN", src=tuple(range(1, 8)), params=(1,))
    verdict(graph([8], *rows, ids, out))
    rows[0]["nb"][0][3] = 1 << 19
    with pytest.raises(ProtocolError, match="have gaps"):
        verdict(graph([8], *rows, ids, out))


def test_quantising_into_rows_of_another_length_is_refused() -> None:
    """The CPU kernel's work row is as long as the result's, not as the source's."""
    target = leaf(2, (32, 8), "q4_0")
    out = leaf(3, (32, 8), "q4_0", at=65536, op="CPY", src=(1, 2), view_src=2)
    verdict(graph([3], leaf(1, (32, 8)), target, out))
    with pytest.raises(ProtocolError, match="whole rows"):
        verdict(graph([3], leaf(1, (256,)), target, out))


@pytest.mark.parametrize(
    ("type_", "ne", "nb", "data", "ok"),
    [
        (0, (64, 1, 1, 1), (4, 256, 256, 256), 0, True),
        (0, (64, 1, 1, 1), (4, 256, 256, 256), 4096 - 256, True),
        (0, (64, 1, 1, 1), (4, 256, 256, 256), 4096 - 252, False),
        (0, (64, 1, 1, 1), (4, 256, 256, 256), 2**64 - 4, False),
        (0, (0, 1, 1, 1), (4, 0, 0, 0), 4096, True),
        (0, (2**32 - 1,) * 4, (2**32 - 1,) * 4, 0, False),
        (0, (2**31 - 1, 2, 1, 1), (4, 2**32 - 1, 1, 1), 0, False),
        (2, (32, 4, 1, 1), (18, 18, 72, 72), 0, True),
        (2, (33, 4, 1, 1), (18, 18, 72, 72), 0, False),
        (4, (32, 1, 1, 1), (4, 4, 4, 4), 0, False),
        (43, (32, 1, 1, 1), (4, 4, 4, 4), 0, False),
        (2**31, (32, 1, 1, 1), (4, 4, 4, 4), 0, False),
    ],
)
def test_one_tensor(type_: int, ne: tuple[int, ...], nb: tuple[int, ...], data: int, ok: bool) -> None:
    row = craft.tensor(1, type_, ne, nb=[n & 0xFFFFFFFF for n in nb])
    t = table([1], row, {})
    t.buf[0], t.data[0], t.buf_size = 0, data, np.array([4096], np.uint64)
    if ok:
        extent = check_tensor(type_, ne, nb, data, 4096)
        check_tensors(t)
        assert t.layout is not None and extent == t.layout.extent[0]
    else:
        with pytest.raises(ProtocolError):
            check_tensor(type_, ne, nb, data, 4096)
        with pytest.raises(ProtocolError):
            check_tensors(t)


def test_the_size_of_an_operation_is_asked_only_with_sources_that_fit() -> None:
    def query(*rows: np.ndarray) -> TensorTable:
        t = table([1], np.concatenate(rows), {})
        t.src[1:] = -1
        return t

    q, k = craft.tensor(2, "f32", (64, 1, 1)), craft.tensor(3, "f16", (64, 32, 1))
    attention = craft.tensor(1, "f32", (64, 1, 1), op="FLASH_ATTN_EXT", src=(2, 3, 4), params=(1.0,))
    check_alloc_query(query(attention, q, k, craft.tensor(4, "f16", (64, 32, 1))))
    with pytest.raises(ProtocolError, match="do not fit"):
        check_alloc_query(query(attention, q, k, craft.tensor(4, "f16", (64, 8, 1))))
    with pytest.raises(ProtocolError, match="source is missing"):
        check_alloc_query(query(craft.tensor(1, "f32", (64, 1, 1), op="FLASH_ATTN_EXT")))
    check_alloc_query(query(craft.tensor(1, "q4_0", (64, 4))))


def test_a_graph_stays_on_its_device() -> None:
    far = leaf(2)
    far["buffer"], far["data"] = 2, 0x900000
    t = graph([3], leaf(1), far, leaf(3, op="ADD", src=(1, 2)))
    verdict(t)
    rules.check_devices(t, np.array([True, True]))
    with pytest.raises(ProtocolError, match="its buffer 1 is another device's"):
        rules.check_devices(t, np.array([True, False]))
    t = graph([3], leaf(1), far, leaf(3, op="SQR", src=(1,)))  # described, but not used
    rules.check_devices(t, np.array([True, False]))


@pytest.mark.parametrize("name", fixtures.names()[:6])
def test_rows_that_moved_are_judged_as_the_whole_graph_is(name: str) -> None:
    """check_placement of the moved rows alone, after moves good and bad: the verdict of check_placement of all."""
    t = fixtures.load(name).table()
    verdict(t)
    assert t.layout is not None
    rng = np.random.default_rng(23)
    refused = 0
    for turn in range(120):
        moved = copy(t)
        rows = np.sort(rng.choice(len(t), int(rng.integers(1, 6)), replace=False))
        for row in rows:
            match int(rng.integers(0, 5)):
                case 0:
                    moved.data[row] += np.uint64(32)
                case 1:
                    moved.data[row] = moved.buf_size[moved.buf[row]] if moved.buf[row] >= 0 else 0
                case 2:
                    moved.data[row] = int(rng.integers(0, 2**62))
                case 3:
                    moved.data[row] ^= np.uint64(1)
                case 4:
                    moved.buf[row] = int(rng.integers(0, len(t.buf_size)))
        fails = []
        for which in (None, rows):
            try:
                rules.check_placement(moved, t.layout, which)
                fails.append("")
            except ProtocolError as error:
                fails.append(str(error))
        assert fails[0] == fails[1], turn
        refused += bool(fails[0])
    assert 10 < refused < 120


def test_every_change_gives_a_topology_another_name_but_a_change_of_place() -> None:
    t = fixtures.load(fixtures.names()[0]).table()
    verdict(t)
    assert t.layout is not None
    moved = copy(t)
    moved.data[int(t.nodes[-1])] = 2**60
    assert rules.topology_key(moved) == rules.topology_key(t)
    with pytest.raises(ProtocolError):
        rules.check_placement(moved, t.layout)  # where a tensor lies is looked at every time
    keys = {rules.topology_key(t)}
    rng = np.random.default_rng(22)
    for field in ("type", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "nodes", "use_count"):
        changed = copy(t)
        column = getattr(changed, field)
        column.flat[int(rng.integers(column.size))] += 1
        keys.add(rules.topology_key(changed))
    unplaced = copy(t)
    unplaced.buf[0] = -1 if t.buf[0] >= 0 else 0
    keys.add(rules.topology_key(unplaced))
    assert len(keys) == 13


def test_the_cost_of_a_new_graph(record_property: Callable[[str, object], None]) -> None:
    """Not a limit (no test asserts on speed): the figure for docs/security.md, printed with -rP."""
    t = fixtures.largest()
    verdict(t)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        verdict(t)
        times.append(time.perf_counter() - start)
    record_property("milliseconds", min(times) * 1e3)
    print(f"{len(t)} tensors, {len(t.nodes)} nodes: {min(times) * 1e3:.2f} ms")
    assert len(t) >= 2000
