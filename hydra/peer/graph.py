"""A graph from the wire to a ggml_cgraph, column by column, without a Python loop over tensors.

A GRAPH_COMPUTE message is an array of 296-byte rpc_tensors; libggml wants an array of 336-byte ggml_tensors with
pointers between them, and a ggml_cgraph over it. Both are numpy structured arrays here: columns are copied whole, ids
become addresses with one sort and one searchsorted.

Each ``Arena`` holds one graph in memory of its own that never moves: the CUDA backend keys its captured graphs by the
address of the first node. A message like an arena's last one is compared with it, and only the rows that differ are
written; addresses and use counts stay. A graph that some arena held before under other ids and at other places is
recognised by comparison, and neither its ids are looked up again nor its operations checked. Several arenas are kept
per device, so that the few graphs a head alternates between (decode, the widths of a verify batch, a prefill ubatch)
each keep theirs, and a bound on them is a bound on captured graphs.

The use counts are those on the wire, never recounted: a tensor may be used by another part of the split graph, and
without them the backends do not fuse operations. Whether a graph is one that a backend may be given is for
hydra.peer.rules.

Layouts: hydra.rpc.wire, hydra.ggml.abi. Source: ggml-rpc.cpp (graph_compute, create_node), ggml-impl.h (ggml_cgraph).
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import numpy as np

from hydra.errors import ProtocolError
from hydra.ggml import abi
from hydra.ggml.library import Ggml
from hydra.peer.handles import HandleTable
from hydra.peer.indices import IndexPlan
from hydra.peer.rules import Layout, TensorTable
from hydra.rpc import wire

MAX_ARENAS = 8
# A message that differs from an arena's last one in more rows than this part is built anew, elsewhere if there is room.
REWRITE_PART = 0.25
# Of graphs so large every 16th row is looked at first. With more than that part of them different, it is another graph.
_SAMPLED_FROM = 256
_SAMPLE = 16
_ANOTHER_PART = 0.5

_SHAPE_FIELDS = ("ne", "nb", "op_params", "type", "op", "flags")

# The 64-bit fields of an rpc_tensor lie at multiples of 4 bytes, where numpy reads them one by one. Copied out as pairs
# of 32-bit words they are aligned: the columns of each, in a table of n rows and 74 words.
_WORDS = wire.TENSOR_SIZE // 4


_COLUMNS = {
    name: slice(offset // 4, (offset + field.itemsize) // 4)
    for name, (field, offset, *_) in wire.RPC_TENSOR.fields.items()  # type: ignore[union-attr]
}


def _all_but(*names: str) -> np.ndarray:
    """bool[74]: the columns of every other field."""
    rest = np.ones(_WORDS, dtype=bool)
    for name in names:
        rest[_COLUMNS[name]] = False
    return rest


# What a tensor is among those of a message whose ids are those of the message before: all but where it lies and its
# name; the same but for its shape; and what it is under whatever ids.
_SHAPE = _all_but("buffer", "data", "name")
_ROLE = _SHAPE & _all_but("ne", "nb", "op_params", "view_offs")
_KIND = _SHAPE & _all_but("id", "src", "view_src")


def _u64(words: np.ndarray, at: slice | np.ndarray, name: str) -> np.ndarray:
    """A 64-bit field of some rows as an aligned copy: u64[m] or u64[m, k]. words: u64, 37 a row."""
    rows = words.view(np.uint32).reshape(-1, _WORDS)
    copy = np.ascontiguousarray(rows[at, _COLUMNS[name]]).view(np.uint64)
    return copy if copy.shape[1] > 1 else copy[:, 0]


class Message:
    """A GRAPH_COMPUTE as it lies in the receive buffer, and its columns, each read when it is first asked for.

    node_ids: u64[k]; words: the n tensors, 37 u64 each.
    """

    def __init__(self, node_ids: np.ndarray, words: np.ndarray, n_tensors: int) -> None:
        self.node_ids, self.words = node_ids, words
        self.shape = (len(node_ids), n_tensors)

    @cached_property
    def halves(self) -> np.ndarray:
        """The tensors as u32[n, 74]."""
        return self.words.view(np.uint32).reshape(-1, _WORDS)

    @cached_property
    def ids(self) -> np.ndarray:
        """u64[n + 1]; the position -1 finds the id 0."""
        return np.append(_u64(self.words, slice(None), "id"), np.uint64(0))

    @cached_property
    def sources(self) -> tuple[np.ndarray, np.ndarray]:
        return _u64(self.words, slice(None), "src"), _u64(self.words, slice(None), "view_src")

    @cached_property
    def unplaced(self) -> np.ndarray:
        return _u64(self.words, slice(None), "buffer") == 0


class Arena:
    """Memory for one graph of n tensors and k nodes, and the graph in it.

    What the last message changed is in ``changed``: None for everything, else the rows that were rewritten;
    ``moved_only`` when those differ in nothing but where their data lies. ``layout`` is what the rules found the
    tensors to be, while that holds; ``reshaped`` what they found them to be before, when the last message changed no
    more than shapes: what is computed from what is as it was.
    """

    def __init__(self, ggml: Ggml, n_nodes: int, n_tensors: int, private_layout: bool) -> None:
        self.ggml = ggml
        self.shape = (n_nodes, n_tensors)
        self._private_layout = private_layout
        self._received = abi.aligned_bytes(n_tensors * wire.TENSOR_SIZE)
        self._words = self._received.view(np.uint64)
        self.rows = self._received.view(wire.RPC_TENSOR)
        self._node_ids = np.zeros(n_nodes, dtype=np.uint64)
        self._memory = abi.aligned_bytes(n_tensors * abi.TENSOR_SIZE)
        self.tensors = self._memory.view(abi.TENSOR)
        self.address = int(self._memory.ctypes.data)
        self._addresses = np.uint64(self.address) + np.arange(n_tensors, dtype=np.uint64) * np.uint64(abi.TENSOR_SIZE)
        self.src = np.full((n_tensors, wire.MAX_SRC), -1, dtype=np.int64)
        self.view_src = np.full(n_tensors, -1, dtype=np.int64)
        self.buf = np.full(n_tensors, -1, dtype=np.int64)
        self.data = np.zeros(n_tensors, dtype=np.uint64)
        self.nodes = np.zeros(n_nodes, dtype=np.int64)
        self._sorted_ids: np.ndarray = np.zeros(0, dtype=np.uint64)
        self._order: np.ndarray = np.zeros(0, dtype=np.int64)
        self._all_rows = np.arange(n_tensors)
        self.changed: np.ndarray | None = None
        self.indices: IndexPlan | None = None
        self.built = False
        self.moved_only = False
        self.layout: Layout | None = None
        self.reshaped: Layout | None = None
        self._table = self._make_table()
        self._ctx = 0
        self._make_graph(n_nodes, n_tensors)

    def _make_graph(self, n_nodes: int, n_tensors: int) -> None:
        if not self._private_layout:
            self._ctx = self.ggml.context(self.ggml.ggml_graph_overhead_custom(n_nodes, False) + 1024)
            self.graph = int(self.ggml.ggml_new_graph_custom(self._ctx, n_nodes, False))
            return
        # The hash of a tensor is address / 16 modulo a prime. Tensors lie 336 = 21 * 16 bytes apart and the prime is
        # at least as large as their number and does not divide 21, so no two meet in a slot and probing is never
        # needed.
        size = self.ggml.ggml_hash_size(max(2 * n_tensors, 16))
        self._slots = ((self.address >> 4) + np.arange(n_tensors, dtype=np.int64) * abi.HASH_UNIT) % size
        self._node_addresses = np.zeros(n_nodes, dtype=np.uint64)
        self._use_counts = np.zeros(size, dtype=np.int32)
        self._keys = np.zeros(size, dtype=np.uint64)
        self._used = np.zeros((size + 31) // 32 * 4, dtype=np.uint8)
        self._cgraph = abi.CGraph(
            size=n_nodes,
            n_nodes=n_nodes,
            nodes=self._node_addresses.ctypes.data,
            use_counts=self._use_counts.ctypes.data,
            hash_set=abi.HashSet(size, self._used.ctypes.data, self._keys.ctypes.data),
        )
        self.graph = ctypes.addressof(self._cgraph)

    def difference(self, message: Message) -> np.ndarray | None:
        """Rows in which a message differs from the last one here; None when it is another graph altogether."""
        if not self.built or not np.array_equal(message.node_ids, self._node_ids):
            return None
        if self.shape[1] >= _SAMPLED_FROM:
            # A batch of another width differs in nearly every row. To see that, some are enough.
            new, old = (rows.reshape(-1, wire.TENSOR_WORDS)[::_SAMPLE] for rows in (message.words, self._words))
            if (new != old).any(1).mean() > _ANOTHER_PART:
                return None
        at = np.flatnonzero(self._words != message.words)
        if not len(at):
            return at
        rows = at // wire.TENSOR_WORDS
        return rows[np.flatnonzero(np.diff(rows, prepend=-1))]

    def held(self, message: Message) -> bool:
        """Whether a message is the graph that was last here, but for its ids, its places and its names.

        It is then as right as that one in all that the rules ask of a topology.
        """
        if self.layout is None:
            return False
        new, old = message.halves, self._words.view(np.uint32).reshape(-1, _WORDS)
        ids, (src, view_src) = message.ids, message.sources
        # A batch of another width is another graph: some rows show that as well as all.
        for some in (slice(0, None, _SAMPLE), slice(None)):
            if not np.array_equal(ids[self.src[some]], src[some]) or (new[some] != old[some]).any(0)[_KIND].any():
                return False
        return (
            np.array_equal(ids[self.nodes], message.node_ids)
            and np.array_equal(ids[self.view_src], view_src)
            and np.array_equal(message.unplaced, self.buf < 0)
        )

    def update(
        self,
        message: Message,
        changed: np.ndarray | None,
        handles: HandleTable,
        like: Arena | None = None,
    ) -> None:
        """Writes a message in: the rows ``changed``, or (None) all of them.

        like: an arena whose graph this is, but for ids, places and names (``held``); it may be this one.
        Raises: ProtocolError for ids, handles or addresses that do not resolve; the arena is then not to be used again.
        """
        if changed is not None and len(changed):
            new = message.words.reshape(-1, wire.TENSOR_WORDS)[changed]
            kept = self._words.reshape(-1, wire.TENSOR_WORDS)
            old = kept[changed]
            if (new[:, 0] != old[:, 0]).any():
                changed = None  # other ids
            else:
                differs = (new.view(np.uint32) != old.view(np.uint32)).any(0)
                as_placed = not differs[_COLUMNS["buffer"]].any() or np.array_equal(
                    _u64(old, slice(None), "buffer") == 0, _u64(new, slice(None), "buffer") == 0
                )
                self.moved_only = as_placed and not differs[_SHAPE].any()
                self.reshaped = self.layout if as_placed and not differs[_ROLE].any() else None
                kept[changed] = new
                if not self.moved_only:
                    self.layout = None
        if changed is None:
            self.built = False
            self.reshaped = None
            self._words[:] = message.words
            self._node_ids[:] = message.node_ids
            self._index_ids()
            self.moved_only = like is self
            if like is None:
                self.nodes[:] = self._positions(self._node_ids, "node")
                if len(self.nodes) and self.nodes.min() < 0:
                    raise ProtocolError("A node of the graph has the id 0, which means none.")
                self.layout = None
            elif like is not self:
                self.nodes[:], self.src[:], self.view_src[:] = like.nodes, like.src, like.view_src
                self.layout = like.layout
        self.changed = self._all_rows if changed is None and like is not None else changed
        if changed is None or len(changed):
            at = slice(None) if changed is None else changed
            self._write_places(at, handles)
            if not self.moved_only:
                self._write_shapes(at, find_sources=like is None)
            self._write_graph(changed)
            self.moved_only |= like is not None
            self.built = True

    def _index_ids(self) -> None:
        ids = _u64(self._words, slice(None), "id")
        self._order = np.argsort(ids, kind="stable")
        self._sorted_ids = ids[self._order]
        if len(ids) and self._sorted_ids[0] == 0:
            raise ProtocolError("A tensor of the graph has the id 0, which means none.")
        if (self._sorted_ids[1:] == self._sorted_ids[:-1]).any():
            raise ProtocolError("Two tensors of the graph have the same id.")

    def _positions(self, ids: np.ndarray, what: str) -> np.ndarray:
        """Positions of ids in the table, -1 for id 0."""
        result = np.full(ids.shape, -1, dtype=np.int64)
        flat, places = ids.ravel(), result.ravel()
        at = np.flatnonzero(flat)
        wanted = flat[at]
        if not len(wanted):
            return result
        where = np.searchsorted(self._sorted_ids, wanted)
        where[where == len(self._sorted_ids)] = 0
        unknown = self._sorted_ids[where] != wanted
        if unknown.any():
            raise ProtocolError(f"The graph names {what} {int(wanted[unknown][0]):#x}, which it does not carry.")
        places[at] = self._order[where]
        return result

    def _write_places(self, at: slice | np.ndarray, handles: HandleTable) -> None:
        """Where the tensors of some rows lie, and their names."""
        buf, data = handles.resolve(_u64(self._words, at, "buffer"), _u64(self._words, at, "data"))
        self.buf[at], self.data[at] = buf, data
        real = handles.real_base[buf] + data
        ggml_buffer = handles.ggml[buf]
        none = buf < 0
        if none.any():
            real[none] = 0
            ggml_buffer[none] = 0
        columns = self.tensors
        columns["buffer"][at] = ggml_buffer
        columns["data"][at] = real
        columns["name"][at] = self.rows["name"][at]

    def _write_shapes(self, at: slice | np.ndarray, *, find_sources: bool) -> None:
        """All else of some rows."""
        if find_sources:
            self.src[at] = self._positions(_u64(self._words, at, "src"), "source")
            self.view_src[at] = self._positions(_u64(self._words, at, "view_src"), "view source")
        rows, src, view_src = self.rows[at], self.src[at], self.view_src[at]
        columns = self.tensors
        for name in _SHAPE_FIELDS:
            columns[name][at] = rows[name]
        columns["view_offs"][at] = _u64(self._words, at, "view_offs")
        addresses = np.append(self._addresses, np.uint64(0))  # the position -1 is the address 0
        columns["src"][at] = addresses[src]
        columns["view_src"][at] = addresses[view_src]

    def _write_graph(self, changed: np.ndarray | None) -> None:
        if not self._private_layout:
            if changed is None:
                self.ggml.ggml_graph_clear(self.graph)
                for address in self._addresses[self.nodes].tolist():
                    self.ggml.ggml_graph_add_node(self.graph, address)
            return
        if changed is None:
            self._node_addresses[:] = self._addresses[self.nodes]
            slots = self._slots[self.nodes]
            self._use_counts[:] = 0
            self._keys[:] = 0
            self._use_counts[slots] = self.rows["use_count"][self.nodes]
            self._keys[slots] = self._node_addresses
            bits = np.zeros(len(self._used) * 8, dtype=np.uint8)
            bits[slots] = 1
            self._used[:] = np.packbits(bits, bitorder="little")
        elif not self.moved_only:
            slots = self._slots[changed]
            is_node = self._keys[slots] != 0
            self._use_counts[slots[is_node]] = self.rows["use_count"][changed][is_node]
        # A number of its own for each content: the CUDA backend then need not compare the nodes with those it captured.
        self._cgraph.uid = self.ggml.ggml_graph_next_uid()

    def table(self, handles: HandleTable) -> TensorTable:
        """The graph as the rules see it; the columns are views, and show the next update too."""
        self._table.buf_size = handles.size[: handles.count]
        self._table.layout = None
        return self._table

    def _make_table(self) -> TensorTable:
        t = self.tensors
        return TensorTable(
            type=t["type"].view(np.uint32),
            ne=t["ne"],
            nb=t["nb"],
            op=t["op"].view(np.uint32),
            op_params=t["op_params"],
            flags=t["flags"],
            src=self.src,
            view_src=self.view_src,
            view_offs=t["view_offs"],
            buf=self.buf,
            data=self.data,
            buf_size=np.zeros(0, dtype=np.uint64),
            nodes=self.nodes,
            use_count=self.rows["use_count"],
            wire_widths=True,
        )

    def close(self) -> None:
        if self._ctx:
            self.ggml.ggml_free(self._ctx)
            self._ctx = 0


class GraphStore:
    """The arenas of one device of one connection, the last used one first."""

    def __init__(self, ggml: Ggml, private_layout: bool, max_arenas: int = MAX_ARENAS) -> None:
        self.ggml = ggml
        self.private_layout = private_layout
        self.max_arenas = max_arenas
        self.arenas: list[Arena] = []
        self.last: Arena | None = None

    def take(self, payload: memoryview, handles: HandleTable) -> Arena:
        """The arena that now holds the graph of a GRAPH_COMPUTE payload (everything after the 9-byte header).

        Raises: ProtocolError for counts that do not match the payload, and what Arena.update raises.
        """
        self.last = None
        message = self._parse(payload)
        shape, n_tensors = message.shape, message.shape[1]
        best: Arena | None = None
        best_rows: np.ndarray | None = None
        for arena in self.arenas:
            if arena.shape != shape:
                continue
            rows = arena.difference(message)
            if rows is not None and (best_rows is None or len(rows) < len(best_rows)):
                best, best_rows = arena, rows
                if len(rows) <= REWRITE_PART * n_tensors:
                    break
        like = None
        if best is None or best_rows is None or len(best_rows) > REWRITE_PART * n_tensors:
            best, best_rows = self._free_arena(shape), None
            same = [best, *(arena for arena in self.arenas if arena.shape == shape and arena is not best)]
            like = next((arena for arena in same if arena.held(message)), None)
        self.arenas.remove(best)
        # An arena that this fails in is gone, and so is the connection.
        best.update(message, best_rows, handles, like)
        self.arenas.insert(0, best)
        self.last = best
        return best

    def _parse(self, payload: memoryview) -> Message:
        _, n_nodes = wire.GRAPH_HEAD.unpack_from(payload)
        at = wire.GRAPH_HEAD.size + 8 * n_nodes
        if n_nodes > wire.MAX_GRAPH_TENSORS or len(payload) < at + 4:
            raise ProtocolError(f"GRAPH_COMPUTE announces {n_nodes} nodes in {len(payload)} bytes.")
        (n_tensors,) = wire.U32.unpack_from(payload, at)
        wanted = at + 4 + n_tensors * wire.TENSOR_SIZE
        if n_tensors > wire.MAX_GRAPH_TENSORS or len(payload) != wanted:
            raise ProtocolError(
                f"GRAPH_COMPUTE: {n_nodes} nodes and {n_tensors} tensors in {len(payload)} bytes, which take {wanted}."
            )
        if not n_nodes or n_nodes > n_tensors:
            raise ProtocolError(f"GRAPH_COMPUTE has {n_nodes} nodes and {n_tensors} tensors.")
        node_ids = np.frombuffer(payload, dtype="<u8", count=n_nodes, offset=8)
        return Message(node_ids, np.frombuffer(payload, dtype="<u8", offset=at + 4), n_tensors)

    def _free_arena(self, shape: tuple[int, int]) -> Arena:
        same = [arena for arena in self.arenas if arena.shape == shape]
        for arena in same:
            if not arena.built:
                return arena
        if len(self.arenas) >= self.max_arenas:
            if same:
                return same[-1]
            self.arenas.pop().close()
        arena = Arena(self.ggml, *shape, self.private_layout)
        self.arenas.append(arena)
        return arena

    def forget(self) -> None:
        """Drops every graph: a freed buffer may be part of any of them."""
        self.last = None
        for arena in self.arenas:
            arena.built = False

    def close(self) -> None:
        self.last = None
        for arena in self.arenas:
            arena.close()
        self.arenas.clear()
