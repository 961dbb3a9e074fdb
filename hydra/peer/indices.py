"""What indices hold: the one thing about a graph that no message shows and that the kernels trust.

GET_ROWS, SET_ROWS, MUL_MAT_ID, ADD_ID and SSM_SCAN read row numbers from a tensor. The CPU kernels abort on one out of
range, or write where it points; the CUDA kernels follow it. Three cases, told apart when a graph is new (``plan``):

    sorted     by ARGSORT, TOP_K or ARGMAX in the same graph: the range is known from shapes
    written    by the client: what SET_TENSOR carried is remembered (``note``) and asked at every launch; what is not
               known (any more) is read back from the device, which has to wait for it: llama.cpp never needs that
    computed   by arithmetic in the graph: only for GET_ROWS and SET_ROWS (two models do it), and not checked

A place is a number: the buffer's index in the handle table times 2^48, plus the offset. No device and no socket here.

Source: ggml-cpu/ops.cpp (ggml_compute_forward_get_rows_*, set_rows, add_id, ssm_scan), ggml-cpu.c (mul_mat_id).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hydra.errors import ProtocolError
from hydra.peer.ops import I32, I64, IS_VIEW_OP, OP, op_name
from hydra.peer.rules import Layout, TensorTable

PLACE_SHIFT = 48
MAX_NOTE_BYTES = 1 << 20
MAX_NOTES = 256
FLAG_COMPUTE = 16  # GGML_TENSOR_FLAG_COMPUTE: the backends skip a node without it
_FEW_BYTES = 256  # up to here Python's own min and max are faster than numpy's
INTEGERS = frozenset((I32, I64))

# operation -> (source that holds the indices, source whose rows they number, its dimension)
_SLOTS = {
    OP["GET_ROWS"]: (1, 0, 1),
    OP["SET_ROWS"]: (1, 2, 1),
    OP["MUL_MAT_ID"]: (2, 0, 2),
    OP["ADD_ID"]: (2, 1, 1),
    OP["SSM_SCAN"]: (6, 0, 3),
}
_SORTED = frozenset((OP["ARGSORT"], OP["TOP_K"], OP["ARGMAX"]))
_COPIES = frozenset((OP["CONT"], OP["CPY"], OP["DUP"]))
_MAY_COMPUTE = frozenset((OP["GET_ROWS"], OP["SET_ROWS"]))
_HINT = "Close this connection; its client is not a working ggml-RPC client of this release."


@dataclass(frozen=True)
class IndexUse:
    """Indices that the client wrote: at ``place``, integers of ``dtype`` laid out by ne and nb, below ``limit``."""

    place: int
    size_bytes: int
    dtype: str
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    limit: int
    node: int
    op: int


@dataclass
class IndexPlan:
    """What must hold at every launch of one graph, and which places it writes: from start to end, i64[m] each."""

    uses: list[IndexUse]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    version: int = -1
    spoils: list[Note] = field(default_factory=list)
    sources: list[tuple[IndexUse, Note]] = field(default_factory=list)
    unknown: bool = True

    def writes(self) -> NDArray[np.int64]:
        """The places written, as starts and ends in order that do not touch: i64[2, k]."""
        return _joined(self.start, self.end)


class Note:
    """What the client last wrote to [start, end); ``values`` is None once something else may have written there."""

    __slots__ = ("end", "high", "low", "others", "start", "values")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.values: bytes | None = None
        self.low = self.high = 0
        self.others: list[Note] = []  # notes of other ranges that overlap this one

    def write(self, data: bytes, item_bytes: int) -> None:
        """The client wrote exactly this range: a decode step's few numbers, most often those of the step before."""
        for other in self.others:
            other.values = None
        if data == self.values:
            return
        if len(data) <= _FEW_BYTES:
            few = memoryview(data).cast("i" if item_bytes == 4 else "q").tolist()
            self.low, self.high = min(few), max(few)
        else:
            array = np.frombuffer(data, np.int32 if item_bytes == 4 else np.int64)
            self.low, self.high = int(array.min()), int(array.max())
        self.values = data


class IndexGuard:
    """The notes of one connection.

    read: (place, bytes) -> those bytes as the device has them now, after everything that is queued.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._notes: list[Note] = []  # sorted by start; they may overlap
        self._starts: list[int] = []
        self._longest = 0
        self.version = 0

    def watches(self, start: int, end: int) -> bool:
        """Whether a write there could change a note."""
        return any(True for _ in self._overlapping(start, end))

    def _overlapping(self, start: int, end: int) -> list[Note]:
        low = bisect.bisect_left(self._starts, start - self._longest)
        high = bisect.bisect_left(self._starts, end)
        return [note for note in self._notes[low:high] if note.end > start]

    def note(self, start: int, data: bytes, item_bytes: int) -> bool:
        """The client wrote these integers; whether it is the first time for exactly this range."""
        end = start + len(data)
        if len(data) > MAX_NOTE_BYTES or not data or len(data) % item_bytes:
            self.wrote(start, end)
            return False
        known = self.find(start, end)
        fresh = known is None
        if known is None:
            known = self._add(start, end)
        known.write(data, item_bytes)
        return fresh

    def find(self, start: int, end: int) -> Note | None:
        """The note of exactly this range."""
        return next((n for n in self._overlapping(start, end) if n.start == start and n.end == end), None)

    def _add(self, start: int, end: int) -> Note:
        if len(self._notes) >= MAX_NOTES:
            self._notes.clear()
            self._starts.clear()
        at = bisect.bisect_right(self._starts, start)
        note = Note(start, end)
        note.others = self._overlapping(start, end)
        for other in note.others:
            other.others.append(note)
        self._notes.insert(at, note)
        self._starts.insert(at, start)
        self._longest = max(self._longest, end - start)
        self.version += 1
        return note

    def wrote(self, start: int, end: int) -> None:
        """Something that is no index was written there."""
        for note in self._overlapping(start, end):
            note.values = None

    def forget_buffer(self, index: int) -> None:
        """A buffer is gone."""
        first, last = index << PLACE_SHIFT, (index + 1) << PLACE_SHIFT
        self._notes = [note for note in self._notes if not first <= note.start < last]
        self._starts = [note.start for note in self._notes]
        self.version += 1

    def check(self, plan: IndexPlan) -> None:
        """Before a launch. Raises: ProtocolError for an index out of range, naming node, operation and numbers."""
        if plan.version != self.version:
            self._bind(plan)
        for use, note in plan.sources:
            if note.values is None or note.low < 0 or note.high >= use.limit:
                break
        else:
            if not plan.unknown:
                return  # every step of a decode ends here
        for use in plan.uses:
            values, within = self._known(use)
            if values is None:
                values, within = self._read(use.place, use.size_bytes), 0
            elif within < 0:
                continue
            array = np.frombuffer(
                values, use.dtype, offset=within, count=use.size_bytes // np.dtype(use.dtype).itemsize
            )
            exact = np.lib.stride_tricks.as_strided(array, use.ne[::-1], use.nb[::-1])
            low, high = int(exact.min()), int(exact.max())
            if low < 0 or high >= use.limit:
                raise ProtocolError(
                    f"Graph node {use.node}, {op_name(use.op)}: index {low if low < 0 else high} of {use.limit} rows.",
                    _HINT,
                )

    def _bind(self, plan: IndexPlan) -> None:
        """Which notes a plan's uses read and its nodes write over; good until there is another note."""
        plan.version = self.version
        plan.sources = []
        for use in plan.uses:
            end = use.place + use.size_bytes
            note = next((n for n in self._overlapping(use.place, end) if n.start <= use.place and n.end >= end), None)
            if note is not None:
                plan.sources.append((use, note))
        plan.unknown = len(plan.sources) < len(plan.uses)
        plan.spoils = []
        if not self._notes:
            return
        starts, ends = plan.writes()
        plan.spoils = [
            note
            for note in self._notes
            if (low := int(np.searchsorted(ends, note.start, "right"))) < len(starts) and starts[low] < note.end
        ]

    def _known(self, use: IndexUse) -> tuple[bytes | None, int]:
        """(values, offset of the use in them): offset -1 where the whole note is in range; (None, 0) where unknown."""
        end = use.place + use.size_bytes
        for note in self._overlapping(use.place, end):
            if note.values is not None and note.start <= use.place and note.end >= end:
                if note.low >= 0 and note.high < use.limit:
                    return note.values, -1
                return note.values, use.place - note.start
        return None, 0

    def launched(self, plan: IndexPlan) -> None:
        """After a launch: what the graph wrote over is not known any more."""
        if plan.version != self.version:
            self._bind(plan)
        for note in plan.spoils:
            note.values = None


@dataclass
class _Window:
    """Rows of the table whose bytes must stay as they are from ``after`` (a node's position) until ``before``."""

    row: int
    after: int
    before: int
    node: int


@dataclass
class _Paths:
    """What a topology alone decides: the same for every graph of it, wherever its tensors lie.

    computing: rows of the nodes that write, when: their positions; uses: by row instead of place; seen: rows whose
    shape was looked at.
    """

    computing: NDArray[np.int64]
    when: NDArray[np.int64]
    uses: list[IndexUse]
    windows: list[_Window]
    seen: list[int]


def plan(t: TensorTable, layout: Layout, beyond: dict[int, int] | None = None) -> IndexPlan:
    """Where a graph's indices come from; once its topology and placement have passed.

    beyond: bytes from a tensor's start that its kernel may write, for the rows where that is more than the tensor.

    Raises: ProtocolError for indices that are sorted from more than there are rows, that a node writes over before they
    are used, or that are computed where no model computes them.
    """
    paths: _Paths | None = layout.memo.get("indices")
    if paths is None:
        paths = layout.memo["indices"] = _paths(t, layout)
    place = (t.buf << PLACE_SHIFT) + t.data.astype(np.int64)
    length = layout.extent
    if beyond:
        length = length.copy()
        length[list(beyond)] = list(beyond.values())
    start = place[paths.computing]
    end = start + length[paths.computing]
    _check_windows(t, paths, place, layout.extent, start, end)
    uses = [replace(use, place=int(place[use.place])) for use in paths.uses]
    return IndexPlan(_merged(uses), start, end)


def _paths(t: TensorTable, layout: Layout) -> _Paths:
    nodes, ops = t.nodes, t.op[t.nodes].astype(np.int64)
    position = np.full(len(t), -1, np.int64)
    position[nodes] = np.arange(len(nodes))
    computing = nodes[~IS_VIEW_OP[ops] & (layout.elements[nodes] > 0)]
    paths = _Paths(computing, position[computing], [], [], [])
    for op, (slot, table, dim) in _SLOTS.items():
        users = nodes[ops == op]
        if not len(users):
            continue
        holders = t.src[users, slot]
        limits = t.ne[t.src[users, table], dim]
        paths.seen += [*users.tolist(), *t.src[users, table].tolist()]
        for user, holder, limit in zip(users.tolist(), holders.tolist(), limits.tolist(), strict=True):
            if layout.elements[holder] and layout.elements[user] and t.flags[user] & FLAG_COMPUTE:
                _follow(t, layout, position, user, holder, limit, op, paths)
    # Most layers read the same indices: what must last until the last of them lasts for all.
    longest: dict[tuple[int, int], _Window] = {}
    for window in paths.windows:
        known = longest.get((window.row, window.after))
        if known is None or known.before < window.before:
            longest[window.row, window.after] = window
    paths.windows = list(longest.values())
    paths.uses = _merged(paths.uses)
    return paths


def _follow(
    t: TensorTable,
    layout: Layout,
    position: NDArray[np.int64],
    user: int,
    holder: int,
    limit: int,
    op: int,
    paths: _Paths,
) -> None:
    """From the indices that ``user`` reads back to whoever made them."""
    node = int(position[user])
    row, read_at, before = holder, holder, node
    for _ in range(len(t) + 1):
        paths.seen.append(row)
        number = int(t.op[row])
        here = int(position[row])
        if IS_VIEW_OP[number] and t.src[row, 0] >= 0:
            row = int(t.src[row, 0])
            continue
        if here >= 0 and number in _COPIES | _SORTED and not t.flags[row] & FLAG_COMPUTE:
            raise ProtocolError(
                f"Graph node {node}, {op_name(op)}: node {here} makes its indices and is skipped.", _HINT
            )
        if here >= 0 and number in _COPIES and t.type[row] == t.type[t.src[row, 0]]:
            paths.windows.append(_Window(read_at, here, before, node))
            row = read_at = int(t.src[row, 0])
            before = here
            continue
        break
    number, here = int(t.op[row]), int(position[row])
    if here >= 0 and number in _SORTED:
        paths.seen.append(int(t.src[row, 0]))
        count = int(t.ne[t.src[row, 0], 0])
        if count > limit:
            raise ProtocolError(
                f"Graph node {node}, {op_name(op)}: indices sorted from {count} for {limit} rows.", _HINT
            )
        paths.windows.append(_Window(read_at, here, before, node))
    elif here >= 0 and number != OP["NONE"]:
        if op not in _MAY_COMPUTE:
            raise ProtocolError(
                f"Graph node {node}, {op_name(op)}: its indices are computed by {op_name(number)}; no model does that.",
                _HINT,
            )
    else:
        paths.windows.append(_Window(read_at, -1, before, node))
        dtype = "<i4" if int(t.type[read_at]) == I32 else "<i8"
        ne, nb = tuple(t.ne[read_at].tolist()), tuple(layout.nb[read_at].tolist())
        paths.uses.append(IndexUse(read_at, int(layout.extent[read_at]), dtype, ne, nb, limit, node, op))


def _check_windows(
    t: TensorTable,
    paths: _Paths,
    place: NDArray[np.int64],
    extent: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> None:
    """No node may write to a place between the node that wrote indices there and the one that reads them."""
    if not paths.windows:
        return
    rows, after, before = np.array([(w.row, w.after, w.before) for w in paths.windows], np.int64).T
    first, last = place[rows][:, None], (place[rows] + extent[rows])[:, None]
    bad = (start < last) & (end > first) & (paths.when > after[:, None]) & (paths.when < before[:, None])
    if bad.any():
        at, by = (int(i) for i in np.argwhere(bad)[0])
        user = paths.windows[at].node
        raise ProtocolError(
            f"Graph node {user}, {op_name(int(t.op[t.nodes[user]]))}: node {int(paths.when[by])} writes over its"
            " indices.",
            _HINT,
        )


def _merged(uses: list[IndexUse]) -> list[IndexUse]:
    """One use for each place and layout: that with the lowest limit."""
    lowest: dict[tuple[object, ...], IndexUse] = {}
    for use in uses:
        key = (use.place, use.dtype, use.ne, use.nb)
        if key not in lowest or use.limit < lowest[key].limit:
            lowest[key] = use
    return list(lowest.values())


def _joined(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, m]: the union of ranges, as starts and ends in order."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    if not len(start):
        return np.zeros((2, 0), np.int64)
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((start[first], end[last]))
