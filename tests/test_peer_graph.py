"""Graphs rebuilt from the wire: as libggml would build them, whatever changed since the last one, and fused as much."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hydra.errors import ProtocolError
from hydra.ggml import abi, library
from hydra.ggml.backend import Backend, pick_device
from hydra.ggml.library import Ggml
from hydra.peer import rules
from hydra.peer.graph import Arena, GraphStore
from hydra.peer.handles import HandleTable
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from tests.peer_tools import COMPUTE, NODE, OP_ADD, OP_MUL, Vectors, peer

OP_RMS_NORM = 25
N = 64


class Local:
    """A device of this process, a buffer of vectors on it, and messages about them."""

    def __init__(self, private_layout: bool = True) -> None:
        self.ggml: Ggml = library.load()
        self.backend = Backend(self.ggml, pick_device(self.ggml, "CPU"), 1)
        self.handles = HandleTable()
        self.buffer = self.backend.alloc(64 * N * 4)
        assert self.buffer is not None
        self.handle = self.handles.add(self.buffer)
        self.base = self.handles.get(self.handle)[1]
        self.store = GraphStore(self.ggml, private_layout)

    def vector(self, slot: int) -> np.ndarray:
        assert self.buffer is not None
        return np.frombuffer(self.buffer.host_view(slot * N * 4, N * 4), dtype=np.float32)

    def rows(self, count: int) -> np.ndarray:
        """slot k + 2 = slot k + slot k + 1, for count nodes: ids 1…count + 2."""
        rows = np.zeros(count + 2, dtype=wire.RPC_TENSOR)
        at = np.arange(count + 2)
        rows["id"] = at + 1
        rows["buffer"] = self.handle
        rows["ne"] = (N, 1, 1, 1)
        rows["nb"] = (4, 4 * N, 4 * N, 4 * N)
        rows["data"] = self.base + at.astype(np.uint64) * np.uint64(4 * N)
        rows["op"][2:] = OP_ADD
        rows["flags"][2:] = COMPUTE
        rows["src"][2:, 0] = at[:-2] + 1
        rows["src"][2:, 1] = at[1:-1] + 1
        rows["use_count"] = 2
        rows["name"] = [f"t{k}".encode() for k in at]
        return rows

    def take(self, rows: np.ndarray, nodes: list[int] | None = None) -> Arena:
        nodes = rows["id"][2:].tolist() if nodes is None else nodes
        return self.store.take(memoryview(messages.GraphCompute(0, nodes, rows).pack()), self.handles)

    def compute(self, arena: Arena) -> None:
        assert self.ggml.ggml_backend_graph_compute_async(self.backend.handle, arena.graph) == 0

    def close(self) -> None:
        self.store.close()
        self.handles.close()
        self.backend.close()


@pytest.fixture(params=[True, False], ids=["private layout", "public API"])
def local(request: pytest.FixtureRequest) -> Iterator[Local]:
    here = Local(request.param)
    yield here
    here.close()


def test_a_rebuilt_graph_computes(local: Local) -> None:
    local.vector(0)[:] = 1
    local.vector(1)[:] = 1
    arena = local.take(local.rows(20))
    local.compute(arena)
    fibonacci = [1, 1]
    for _ in range(20):
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert [float(local.vector(k)[0]) for k in range(22)] == fibonacci
    assert local.ggml.ggml_graph_n_nodes(arena.graph) == 20
    assert local.ggml.ggml_graph_node(arena.graph, 19) == arena.address + 21 * abi.TENSOR_SIZE


def content(arena: Arena) -> bytes:
    """Everything of an arena that libggml sees, pointers between tensors as distances."""
    tensors = arena.tensors.copy()
    for name in ("src", "view_src"):
        column = tensors[name]
        column[column != 0] -= np.uint64(arena.address)
    slots = arena._slots
    counts = np.where(arena._keys[slots] != 0, arena._use_counts[slots], -1)
    order = (arena._node_addresses - np.uint64(arena.address)).tobytes()
    columns = b"".join(tensors[name].tobytes() for name in abi.TENSOR.names or ())  # padding is nobody's
    return columns + counts.tobytes() + order


def test_rewritten_rows_equal_a_rebuild() -> None:
    """Random changes, a few rows at a time: the arena must hold what a fresh one would, after each."""
    local = Local()
    rng = np.random.default_rng(7)
    rows = local.rows(40)
    arena = local.take(rows)
    rewritten = 0
    for _ in range(300):
        rows = rows.copy()
        for k in rng.integers(2, 42, rng.integers(0, 4)):
            match rng.integers(0, 7):
                case 0:
                    rows["data"][k] = local.base + int(rng.integers(0, 60)) * 4 * N
                case 1:
                    rows["op"][k] = rng.choice([OP_ADD, OP_MUL])
                case 2:
                    rows["src"][k, 1] = rng.integers(1, k + 1)
                case 3:
                    rows["op_params"][k, 3] = rng.integers(-9, 9)
                case 4:
                    rows["name"][k] = f"n{rng.integers(99)}".encode()
                case 5:
                    rows["use_count"][k] = rng.integers(0, 9)
                case 6:
                    rows["view_src"][k], rows["view_offs"][k] = rng.integers(1, 3), rng.integers(0, 9)
        arena = local.take(rows)
        rewritten += arena.changed is not None and len(arena.changed) > 0
        fresh = Local.__new__(Local)
        fresh.__dict__.update(local.__dict__, store=GraphStore(local.ggml, True))
        assert content(arena) == content(fresh.take(rows))
    assert rewritten > 150 and len(local.store.arenas) == 1
    local.close()


def test_addresses_stay_and_the_number_changes_with_the_content_only() -> None:
    local = Local()
    rows = local.rows(30)
    first = local.take(rows)
    number = first._cgraph.uid
    assert local.take(rows) is first and first._cgraph.uid == number
    moved = rows.copy()
    moved["data"][5] += np.uint64(4 * N)
    assert local.take(moved) is first and first.moved_only and first._cgraph.uid > number
    local.close()


def renamed(rows: np.ndarray, shift: int) -> np.ndarray:
    """The same graph under other ids."""
    result = rows.copy()
    for name in ("id", "src", "view_src"):
        result[name] = np.where(rows[name] > 0, rows[name] + np.uint64(shift), rows[name])
    return result


def known(arena: Arena, handles: HandleTable) -> Arena:
    """As a session leaves it once the rules have passed."""
    table = arena.table(handles)
    rules.check_tensors(table)
    arena.layout = table.layout
    return arena


def test_a_known_graph_under_other_ids_equals_a_rebuild() -> None:
    """Recognised in the arena that held it and in others, moved or not, and after a buffer was freed."""
    local = Local()
    rng = np.random.default_rng(11)
    rows = local.rows(40)
    rows["view_src"][9], rows["view_offs"][9], rows["data"][9] = 3, 64, rows["data"][2] + np.uint64(64)
    rows["ne"][9], rows["nb"][9] = (16, 1, 1, 1), (4, 64, 64, 64)
    first = known(local.take(rows), local.handles)
    for turn in range(40):
        if turn % 9 == 8:
            local.store.forget()
        now = renamed(rows, 1000 * (turn + 1))
        for k in rng.integers(20, 42, 30):
            now["data"][k] = local.base + int(rng.integers(0, 60)) * 4 * N
            now["name"][k] = f"n{rng.integers(99)}".encode()
        arena = local.take(now)
        assert arena.moved_only and arena.layout is first.layout and arena.changed is not None
        assert len(arena.changed) == len(rows)
        fresh = Local.__new__(Local)
        fresh.__dict__.update(local.__dict__, store=GraphStore(local.ggml, True))
        rebuilt = fresh.take(now)
        assert content(arena) == content(rebuilt)
        for name in ("src", "view_src", "nodes", "buf", "data"):
            assert np.array_equal(getattr(arena, name), getattr(rebuilt, name))
    local.close()


def test_a_graph_that_differs_in_anything_but_names_is_not_the_known_one() -> None:
    local = Local()
    rows = local.rows(40)
    known(local.take(rows), local.handles)
    fields = ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "use_count")
    for turn, name in enumerate(fields):
        other = renamed(rows, 1000 * (turn + 1))
        other[name][7] += 1
        arena = local.take(other)
        assert arena.layout is None and not arena.moved_only and arena.changed is None, name
    for turn, change in enumerate(("source", "no source", "view", "order", "no buffer")):
        other = renamed(rows, 1000 * (turn + 20))
        nodes = other["id"][2:].tolist()
        match change:
            case "source":
                other["src"][9, 0] = other["id"][0]
            case "no source":
                other["src"][9, 1] = 0
            case "view":
                other["view_src"][9] = other["id"][0]
            case "order":
                nodes[3], nodes[4] = nodes[4], nodes[3]
            case "no buffer":
                other["buffer"][0], other["data"][0] = 0, 0
        arena = local.take(other, nodes)
        assert arena.layout is None and not arena.moved_only, change
    same = renamed(rows, 999_000)
    same["id"][5] = same["id"][4]
    with pytest.raises(ProtocolError):
        local.take(same)
    local.close()


def test_a_head_that_alternates_keeps_its_graphs() -> None:
    """Decode and the widths of a verify batch: as many arenas as shapes, none moved, no more than the bound."""
    local = Local()

    def width(n: int) -> np.ndarray:
        rows = local.rows(30)
        rows["ne"] = (n, 1, 1, 1)
        rows["nb"] = (4, 4 * n, 4 * n, 4 * n)
        return rows

    seen = {n: local.take(width(n)).address for n in (1, 2, 3, 4)}
    assert len(set(seen.values())) == 4
    for n in (4, 1, 3, 2, 2, 1):
        arena = local.take(width(n))
        assert arena.address == seen[n] and arena.changed is not None and not len(arena.changed)
    for n in range(5, 60):
        local.take(width(n))
    assert len(local.store.arenas) == local.store.max_arenas
    local.close()


def test_ids_handles_and_addresses_must_resolve() -> None:
    local = Local()

    def broken(**change: object) -> np.ndarray:
        rows = local.rows(4)
        for name, value in change.items():
            rows[name][3] = value
        return rows

    far = local.base + 2**40
    for rows, words in (
        (broken(id=1), "same id"),
        (broken(id=0), "id 0"),
        (broken(src=[99] + [0] * 9), "source 0x63"),
        (broken(view_src=77), "view source 0x4d"),
        (broken(buffer=local.handle + 1), "not one of this connection's"),
        (broken(buffer=5), "not one of this connection's"),
        (broken(buffer=0), "no buffer"),
        (broken(data=far), "outside its"),
        (broken(data=local.base - 1), "outside its"),
        (broken(data=2**64 - 1), "outside its"),
    ):
        with pytest.raises(ProtocolError, match=words):
            local.take(rows)
    with pytest.raises(ProtocolError, match="node 0x37"):
        local.take(local.rows(4), nodes=[3, 55])
    assert local.take(local.rows(4)).built  # and the next one is served
    local.close()


@pytest.mark.parametrize("kind", ["stock", "hydra"])
def test_fusion_is_as_under_the_stock_server(kind: str) -> None:
    """RMS_NORM and the MUL after it are one kernel when the norm is used once: its own result is then never written.

    The use counts decide that, and they are those on the wire: with a second user announced it is written.
    """
    with peer(kind) as where, Client(*where) as client:
        vectors = Vectors(client)
        vectors.set(0, np.arange(1, 65))
        vectors.set(1, np.full(64, 2.0))
        epsilon = [int(np.float32(1e-6).view(np.int32))] + [0] * 15
        for uses, written in ((1, False), (2, True)):
            vectors.set(2, np.full(64, -7.0))
            rows = [
                vectors.row(0),
                vectors.row(1),
                vectors.op(2, OP_RMS_NORM, 0, op_params=epsilon, use_count=uses),
                vectors.op(3, OP_MUL, 2 + NODE, 1),
            ]
            vectors.compute([2, 3], rows)
            a = np.arange(1, 65, dtype=np.float64)
            assert np.allclose(vectors.get(3), 2 * a / np.sqrt((a * a).mean()), rtol=1e-5)
            assert bool((vectors.get(2) != -7).all()) is written
