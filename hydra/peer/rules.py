"""What a tensor and a graph from the network may be, decided before libggml sees either.

Pure arithmetic over numpy columns: no libggml, no sockets, no device. A graph arrives without having passed ggml's
constructors, so every property that those assert, and every one that the kernels take for granted, is asked here for
all tensors at once. What cannot be known from the message (an index that lies in device memory) is not decided here.

    check_tensors   types, shapes, strides, extents inside their buffers, views inside their sources   every graph
    check_graph     operations, sources, order, parameters, result shapes                              new topologies
    check_tensor    one tensor of SET/GET/COPY/MEMSET/INIT_TENSOR, in plain integers                   every transfer

topology_key names everything that check_graph looks at, so that a topology is paid for once; offsets into buffers are
not part of it, because check_tensors looks at those again each time.

Source: ggml/src/ggml.c (constructors, ggml_nbytes, ggml_is_contiguous*), ggml/src/ggml-rpc/ggml-rpc.cpp
(deserialize_tensor, create_node) of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hydra.errors import ProtocolError
from hydra.peer import (  # the others register their rules
    op_rules,
    op_rules_image,  # noqa: F401
    op_rules_math,  # noqa: F401
    op_rules_matrix,  # noqa: F401
    op_rules_memory,  # noqa: F401
    op_rules_recurrent,  # noqa: F401
)
from hydra.peer.ops import BLOCK_SIZE, IS_VIEW_OP, OP, OP_COUNT, QUANTIZED, TYPE_COUNT, TYPE_SIZE, op_name, type_name

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Verdict = NDArray[np.bool_] | np.bool_

MAX_DIM = 2**31 - 1  # the kernels hold dimensions and row counts in C ints
ROW_PADDING = 512  # elements; MATRIX_ROW_PADDING of ggml-cuda
_SIZED = np.isin(np.arange(OP_COUNT), list(op_rules.SIZED_BY_SOURCES))
_EXACT = float(2**62)  # products up to here are exact in int64
_U32 = 2**32 - 1
_HINT = "Close this connection; its client is not a working ggml-RPC client of this release."


@dataclass
class TensorTable:
    """The n tensors of one graph as columns, and the k nodes to compute.

    type u32[n], ne i64[n,4], nb u64[n,4] bytes, op u32[n], op_params i32[n,16], flags i32[n], src i64[n,10] and
    view_src i64[n] (rows of this table, -1 = none), view_offs u64[n] bytes, buf i64[n] (row of buf_size, -1 = none),
    data u64[n] (bytes from that buffer's start; 0 without one), buf_size u64[nbuf] bytes, nodes i64[k] (rows, in
    execution order), use_count i32[n] or None where the message carries none. is_cpu: for the CPU device, some of whose
    kernels take less than those of a GPU.
    """

    type: NDArray[np.uint32]
    ne: Ints
    nb: NDArray[np.uint64]
    op: NDArray[np.uint32]
    op_params: NDArray[np.int32]
    flags: NDArray[np.int32]
    src: Ints
    view_src: Ints
    view_offs: NDArray[np.uint64]
    buf: Ints
    data: NDArray[np.uint64]
    buf_size: NDArray[np.uint64]
    nodes: Ints
    use_count: NDArray[np.int32] | None = None
    is_cpu: bool = True
    wire_widths: bool = False  # ne and nb are known to have been 32 bits wide, as the wire has them
    layout: Layout | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.type)

    def describe(self, row: int) -> str:
        """Type, shape and strides of one tensor, for the line in the log."""
        ne, nb = (",".join(str(int(v)) for v in column[row]) for column in (self.ne, self.nb))
        return f"{type_name(int(self.type[row]))}[{ne}] strides [{nb}]"


@dataclass(frozen=True)
class Layout:
    """What ggml derives from type, ne and nb, for all tensors at once (n rows)."""

    type: Ints
    nb: Ints  # the strides, now known to fit
    elements: Ints
    type_size: Ints
    extent: Ints  # ggml_nbytes: from the first byte to the last
    packed: Ints  # bytes that the elements would take without gaps
    natural: Mask  # strides are the ones that ggml_new_tensor gives, in every dimension
    contiguous: Mask  # ggml_is_contiguous
    contiguous_1: Mask
    contiguous_rows: Mask
    unit: Mask  # nb[0] is the type's size, whatever ne[0]
    root: Ints  # the tensor whose memory this one uses: view_src, or itself
    root_offs: Ints  # bytes from the root's first byte
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # what others derive from a topology


def check_tensors(t: TensorTable) -> None:
    """Every tensor's type, shape, strides, extent, buffer and view.

    Raises: ProtocolError for the first tensor that ggml could not have made or that reaches outside its buffer.
    Source: ggml.c ggml_new_tensor_impl, ggml_nbytes; ggml-rpc.cpp deserialize_tensor.
    """
    n = len(t)
    _refuse(t, t.type < TYPE_COUNT, "its type number {} is unknown", t.type)
    types = t.type.astype(np.int64)
    block, size = BLOCK_SIZE[types], TYPE_SIZE[types]
    _refuse(t, block > 0, "its type number {} was removed from ggml", t.type)

    # By dimension: [4, n], so that numpy goes along the tensors and not along the four numbers of one.
    ne = np.ascontiguousarray(t.ne.T)
    _refuse(t, ((ne >= 0) & (ne <= MAX_DIM)).T, "a dimension is below 0 or above 2^31-1")
    _refuse(t, ne[0] % block == 0, "ne[0] is not a multiple of the type's block")
    strides = np.ascontiguousarray(t.nb.T)
    _refuse(t, (strides < 2**62).T, "a stride is above 2^62 bytes")
    nb = strides.astype(np.int64)

    # Products are first taken in floating point: where that is far below 2^62, the integer products cannot overflow.
    ne_float = ne.astype(np.float64)
    rows_float = ne_float[1] * ne_float[2] * ne_float[3]
    _refuse(t, rows_float <= MAX_DIM, "it has more than 2^31-1 rows")
    _refuse(t, rows_float * ne_float[0] * size < _EXACT, "it is larger than 2^62 bytes")
    reach_float = ((ne_float - 1) * nb).clip(0).sum(0) + ne_float[0] * nb[0]
    _refuse(t, reach_float < _EXACT, "it reaches further than 2^62 bytes")

    rows = ne[1] * ne[2] * ne[3]
    elements = ne[0] * rows
    blocks = ne[0] // block
    row_bytes = blocks * size
    packed = row_bytes * rows
    steps = ((ne[1:] - 1) * nb[1:]).sum(0)
    extent = np.where(block == 1, size + (ne[0] - 1) * nb[0], blocks * nb[0]) + steps
    extent[elements == 0] = 0

    natural_nb = np.empty((4, n), np.int64)
    natural_nb[0] = size
    natural_nb[1] = row_bytes
    natural_nb[2] = row_bytes * ne[1]
    natural_nb[3] = natural_nb[2] * ne[2]
    exact = nb == natural_nb
    one = ne == 1
    # The wire cuts strides to 32 bits: of a tensor above 4 GiB, a stride that no kernel steps by arrives cut.
    cut = one & (nb == (natural_nb & _U32))

    _refuse(t, (cut | (nb % size == 0)).T, "a stride is not a whole number of its type's blocks")
    _refuse(t, (one | (nb > 0) | (elements == 0)).T, "a stride of 0 would repeat elements")

    is_view = t.view_src >= 0
    _refuse(t, (t.view_src < n) & (t.view_src >= -1), "the tensor it is a view of does not exist")
    own = np.arange(n)
    root = np.where(is_view, t.view_src, own)
    _refuse(t, t.view_src[root] < 0, "it is a view of a view")
    _refuse(t, is_view | (t.view_offs == 0), "it has a view offset but is no view")
    source_extent = extent[root].astype(np.uint64)
    inside = (t.view_offs <= source_extent) & (
        extent.astype(np.uint64) <= source_extent - np.minimum(t.view_offs, source_extent)
    )
    # ggml lets an empty view (no outputs in this ubatch, say) stand anywhere
    _refuse(
        t,
        ~is_view | inside | (elements == 0),
        "it reaches outside the tensor that it is a view of ({} bytes)",
        source_extent,
    )
    unit = nb[0] == size
    tight_0 = (ne[0] == block) | unit
    t.layout = Layout(
        type=types,
        nb=np.ascontiguousarray(nb.T),
        elements=elements,
        type_size=size,
        extent=extent,
        packed=packed,
        natural=(exact | cut).all(0),
        contiguous=tight_0 & (one[1] | exact[1]) & (one[2] | exact[2]) & (one[3] | exact[3]),
        contiguous_1=tight_0 & (one[2] | (nb[2] == ne[1] * nb[1])) & (one[3] | (nb[3] == ne[1] * nb[1] * ne[2])),
        contiguous_rows=tight_0,
        unit=unit,
        root=root,
        root_offs=np.where(is_view, t.view_offs, 0).astype(np.int64),
    )
    check_placement(t, t.layout)


def check_placement(t: TensorTable, layout: Layout, rows: Ints | None = None) -> None:
    """Where the tensors lie, all else being known to be right: inside their buffers, aligned, views where their source
    is.

    A topology that passed check_graph before needs no more than this. rows: those that moved since all were last known
    to be right. Raises: ProtocolError.
    """
    has_buffer = t.buf >= 0
    if len(t.buf_size) and _placed(t, layout, has_buffer, rows):
        return
    n = len(t)  # once more, one question at a time, for what to say
    _refuse(t, t.buf < len(t.buf_size), "its buffer is unknown")
    _refuse(t, has_buffer | (t.data == 0), "it has an address but no buffer")
    room = t.buf_size[t.buf] if len(t.buf_size) else np.zeros(n, np.uint64)
    room = np.where(has_buffer, room, np.uint64(0))
    fits = (t.data <= room) & (layout.extent.astype(np.uint64) <= room - np.minimum(t.data, room))
    _refuse(t, ~has_buffer | fits, "it reaches outside its buffer of {} bytes", room)
    packed = layout.packed.astype(np.uint64)
    _refuse(t, ~has_buffer | (packed <= room), "its elements overlap: they outnumber its buffer's bytes")
    # A view's outermost stride may step once past what the view covers, never further.
    longest = layout.nb.max(1).astype(np.uint64)
    _refuse(t, ~has_buffer | (longest <= 2 * room), "a stride is longer than its buffer of {} bytes", room)
    size = layout.type_size.astype(np.uint64)
    aligned = (BLOCK_SIZE[layout.type] > 1) | (t.data % size == 0)
    _refuse(t, aligned, "its address is not a multiple of its type's size")
    is_view = t.view_src >= 0
    root = np.where(is_view, t.view_src, np.arange(n))
    same_place = (t.buf == t.buf[root]) & (~has_buffer | (t.data - np.where(is_view, t.view_offs, 0) == t.data[root]))
    _refuse(t, same_place, "it does not lie where the tensor that it is a view of puts it")


@dataclass(frozen=True)
class _Needs:
    """What check_placement compares places with, from the layout alone; n rows, but views and roots, which are m."""

    extent: NDArray[np.uint64]
    room: NDArray[np.uint64]  # bytes that the buffer has at least
    unaligned: NDArray[np.uint64]  # bits of an offset that must be 0
    views: Ints
    roots: Ints
    offsets: NDArray[np.uint64]
    view_at: Ints  # where a row is among the views, or -1
    has_views: Mask  # somebody is a view of it


def _needs(t: TensorTable, layout: Layout) -> _Needs:
    known: _Needs | None = layout.memo.get("needs")
    if known is None:
        views = np.flatnonzero(t.view_src >= 0)
        has_views = np.zeros(len(t), np.bool_)
        has_views[t.view_src[views]] = True
        view_at = np.full(len(t), -1)
        view_at[views] = np.arange(len(views))
        # Sizes of types whose block is one element are powers of two; of the others no alignment is asked.
        unaligned = np.where(BLOCK_SIZE[layout.type] > 1, 0, layout.type_size - 1).astype(np.uint64)
        known = layout.memo["needs"] = _Needs(
            extent=layout.extent.astype(np.uint64),
            room=np.maximum(layout.packed, (layout.nb.max(1) + 1) // 2).astype(np.uint64),
            unaligned=unaligned,
            views=views,
            roots=t.view_src[views],
            offsets=t.view_offs[views].copy(),
            view_at=view_at,
            has_views=has_views,
        )
    return known


def _placed(t: TensorTable, layout: Layout, has_buffer: Mask, rows: Ints | None) -> bool:
    """check_placement as one yes or no; a no may also be that it takes a closer look."""
    needs = _needs(t, layout)
    at: slice | Ints = slice(None)
    views, roots, offsets = needs.views, needs.roots, needs.offsets
    if rows is not None and len(rows) < len(t) and not needs.has_views[rows].any():
        at = rows
        which = needs.view_at[at]
        which = which[which >= 0]
        views, roots, offsets = views[which], roots[which], offsets[which]
    buf, data = t.buf[at], t.data[at]
    if not len(buf):
        return True
    if buf.min() < -1 or buf.max() >= len(t.buf_size):
        return False
    room = t.buf_size[buf]
    # Neither addend reaches 2^62: the extent was checked to, and an offset is inside its buffer.
    inside = (data <= room) & (data + needs.extent[at] <= room) & (needs.room[at] <= room)
    if not inside.all() and not (inside | (~has_buffer[at] & (data == 0))).all():
        return False
    if (data & needs.unaligned[at]).any():
        return False
    if not len(views):
        return True
    apart = (t.data[views] - offsets != t.data[roots]) & has_buffer[views]
    return not apart.any() and bool((t.buf[views] == t.buf[roots]).all())


def check_graph(t: TensorTable) -> None:
    """Every node's operation, sources, parameters, result and place in the order; after check_tensors.

    Raises: ProtocolError naming the node, its operation and the numbers.
    Source: ggml.c (constructors), ggml-cpu/ops.cpp and ggml-cuda (what the kernels assert or assume).
    """
    if t.layout is None:
        check_tensors(t)
    layout = t.layout
    if layout is None:  # pragma: no cover - check_tensors always sets it
        raise RuntimeError("check_tensors left no layout")
    n, nodes = len(t), t.nodes
    if len(nodes) == 0:
        raise ProtocolError("A graph without nodes.", _HINT)
    if not ((nodes >= 0) & (nodes < n)).all():
        raise ProtocolError(f"A graph node stands for a tensor that is not among its {n} tensors.", _HINT)
    _refuse(t, t.op < OP_COUNT, "its operation number {} is unknown", t.op)
    _refuse(t, (t.src >= -1) & (t.src < n), "a source does not exist")
    _refuse(t, (t.flags >= 0) & (t.flags < 32), "its flags {} are unknown", t.flags)

    position = np.full(n, -1, np.int64)
    order = np.arange(len(nodes))
    position[nodes] = order
    repeated = position[nodes] != order
    if repeated.any():
        raise ProtocolError(f"Graph node {int(np.argmax(repeated))} is listed twice.", _HINT)
    ops = t.op[nodes].astype(np.int64)
    sources = t.src[nodes]
    present = sources >= 0
    too_late = present & (position[sources] >= order[:, None])
    # ggml_cast names its own result as its second source
    too_late[:, 1] &= ~((ops == OP["CPY"]) & (sources[:, 1] == nodes))
    _refuse_node(t, ~too_late, "it needs a node that comes after it")
    view = t.view_src[nodes]
    _refuse_node(t, (view < 0) | (position[view] < order), "it is a view of a node that comes after it")
    _check_acyclic(t)

    known = op_rules.ALLOWED[ops]
    _refuse_node(t, known, "this peer does not run that operation")
    _refuse_node(t, present | ~op_rules.REQUIRED[ops], "a source is missing")
    _refuse_node(t, ~present | op_rules.POSSIBLE[ops], "it has more sources than its operation takes")
    computes = ~IS_VIEW_OP[ops]
    usable = (t.buf >= 0) | (layout.elements == 0)
    _refuse_node(t, ~computes | usable[nodes], "its result has no buffer")
    _refuse_node(t, ~computes[:, None] | ~present | usable[sources], "a source has no buffer")
    if t.use_count is not None:
        # Of nodes alone: the client counts no uses of what another part of the split graph computes.
        uses = np.bincount(sources[present], minlength=n)
        too_few = np.zeros(n, dtype=bool)
        too_few[nodes] = t.use_count[nodes] < uses[nodes]
        _refuse(t, ~too_few, "it is used more often than its use count {} says", t.use_count)

    for number, group in by_operation(ops):
        op_rules.check(op_rules.Batch(t, layout, number, nodes[group], group))


def by_operation(ops: Ints) -> list[tuple[int, Ints]]:
    """The numbers that occur in ``ops``, each with its positions."""
    in_order = np.argsort(ops, kind="stable")
    numbers, starts = np.unique(ops[in_order], return_index=True)
    return list(zip(numbers.tolist(), np.split(in_order, starts[1:]), strict=True))


def check_alloc_query(t: TensorTable) -> None:
    """The tensor of GET_ALLOC_SIZE (row 0) with its sources (rows 1-10): as check_graph, but nothing need be placed.

    Raises: ProtocolError. Source: ggml-rpc.cpp get_alloc_size; backends read the sources of some operations there.
    """
    check_tensors(t)
    layout = t.layout
    if layout is None:  # pragma: no cover - check_tensors always sets it
        raise RuntimeError("check_tensors left no layout")
    _refuse(t, t.op < OP_COUNT, "its operation number {} is unknown", t.op)
    ops = t.op[:1].astype(np.int64)
    present = t.src[:1] >= 0
    _refuse_node(t, op_rules.ALLOWED[ops], "this peer does not run that operation")
    _refuse_node(t, present | ~op_rules.REQUIRED[ops], "a source is missing")
    if ops[0] in op_rules.SIZED_BY_SOURCES:
        op_rules.check(op_rules.Batch(t, layout, int(ops[0]), t.nodes[:1], np.zeros(1, np.int64)))


def check_devices(t: TensorTable, own: Mask) -> None:
    """That what a graph reads and writes lies in buffers of its own device: own bool[nbuf].

    A tensor that is only described (another split's) may lie elsewhere. Raises: ProtocolError.
    Source: ggml-rpc.cpp ggml_backend_rpc_device_supports_buft, which holds the stock client to it.
    """
    computing = t.nodes[~IS_VIEW_OP[t.op[t.nodes]]]
    sources = t.src[computing]
    used = np.zeros(len(t), np.bool_)
    used[computing] = True
    used[sources[sources >= 0]] = True
    _refuse(t, ~used | (t.buf < 0) | own[t.buf], "its buffer {} is another device's", t.buf)


def sizes_to_ask(t: TensorTable, layout: Layout) -> Ints:
    """i64[n]: -1 for each row that a GPU may use more memory for than its extent, 0 for the others.

    Some results have temporary memory behind them, and rows of blocks are padded to a multiple of 512 elements.
    Source: ggml-cuda.cu ggml_backend_cuda_buffer_type_get_alloc_size; ggml-backend.cpp ggml_op_alloc_size_may_expand.
    """
    padded = QUANTIZED[layout.type] & (t.ne[:, 0] % ROW_PADDING != 0) & (t.view_src < 0)
    sized = np.zeros(len(t), np.bool_)
    sized[t.nodes] = _SIZED[t.op[t.nodes]]
    return np.where((padded | sized) & (t.buf >= 0) & (layout.elements > 0), -1, 0)


def check_tensor(type_: int, ne: Sequence[int], nb: Sequence[int], data: int, buffer_bytes: int) -> int:
    """One tensor of a transfer: its extent in bytes, once it is known to lie inside its buffer.

    data: bytes from the buffer's start. Raises: ProtocolError.
    """
    block = int(BLOCK_SIZE[type_]) if 0 <= type_ < TYPE_COUNT else 0
    if block == 0:
        raise ProtocolError(f"A tensor of unknown type number {type_}.", _HINT)
    size = int(TYPE_SIZE[type_])
    if ne[0] % block:
        raise ProtocolError(f"A tensor of {ne[0]} {type_name(type_)} a row: not a multiple of {block}.", _HINT)
    if min(ne) < 0 or max(ne) > MAX_DIM:
        raise ProtocolError(f"A tensor of shape {tuple(ne)}: a dimension is below 0 or above 2^31-1.", _HINT)
    if 0 in ne:
        extent = 0
    elif block == 1:
        extent = size + sum((ne[i] - 1) * nb[i] for i in range(4))
    else:
        extent = ne[0] // block * nb[0] + sum((ne[i] - 1) * nb[i] for i in range(1, 4))
    if not 0 <= data <= buffer_bytes or extent > buffer_bytes - data:
        raise ProtocolError(
            f"A tensor {type_name(type_)}{list(ne)} of {extent} bytes at offset {data} of a buffer of {buffer_bytes}.",
            _HINT,
        )
    return extent


def topology_key(t: TensorTable) -> bytes:
    """A 16-byte name of everything that check_graph looks at: equal keys, equal verdict."""
    digest = hashlib.blake2b(digest_size=16)
    small = np.uint32  # as on the wire; rows of the table are fewer
    columns: list[NDArray[Any]] = [
        t.type,
        t.ne.astype(small) if t.wire_widths else t.ne,
        t.nb.astype(small) if t.wire_widths else t.nb,
        t.op,
        t.op_params,
        t.flags,
        t.src.astype(np.int32),
        t.view_src.astype(np.int32),
        t.view_offs,
        t.buf >= 0,
        t.nodes.astype(np.int32),
    ]
    if t.use_count is not None:
        columns.append(t.use_count)
    for column in columns:
        digest.update(len(column).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(column).data)
    return digest.digest()


def _check_acyclic(t: TensorTable) -> None:
    """No tensor among its own ancestors, whether it is computed here or only described."""
    n = len(t)
    own = np.arange(n)[:, None]
    parents = np.concatenate([t.src, t.view_src[:, None]], axis=1)
    is_self = parents == own
    is_self[:, 1] &= t.op != OP["CPY"]
    _refuse(t, ~is_self, "it is its own source")
    if (parents <= own).all():  # the stock client sends sources first
        return
    waiting = np.where(parents == own, -1, parents)
    missing = (waiting >= 0).sum(1).tolist()
    child, slot = np.nonzero(waiting >= 0)
    parent = waiting[child, slot]
    by_parent = np.argsort(parent, kind="stable")
    children = child[by_parent].tolist()
    first = np.searchsorted(parent[by_parent], np.arange(n + 1)).tolist()
    ready = [row for row in range(n) if missing[row] == 0]
    done = 0
    while ready:
        row = ready.pop()
        done += 1
        for follower in children[first[row] : first[row + 1]]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if done < n:
        row = next(row for row in range(n) if missing[row] > 0)
        raise ProtocolError(f"Graph tensor {row} ({op_name(int(t.op[row]))}) depends on itself.", _HINT)


def _refuse(t: TensorTable, ok: Verdict, why: str, value: NDArray[Any] | None = None) -> None:
    """ok: bool[n], or bool[n, m] where all m have to hold."""
    if not ok.all():
        _fail(t, _first_wrong(ok), why, value)


def _first_wrong(ok: Verdict) -> int:
    return int(np.argmin(ok.all(1) if isinstance(ok, np.ndarray) and ok.ndim == 2 else ok))


def _fail(t: TensorTable, row: int, why: str, value: NDArray[Any] | None) -> NoReturn:
    reason = why if value is None else why.format(int(value[row]))
    where = f"offset {int(t.data[row])} of buffer {int(t.buf[row])}"
    raise ProtocolError(
        f"Graph tensor {row} ({op_name(int(t.op[row]))}) {t.describe(row)} at {where}: {reason}.", _HINT
    )


def _refuse_node(t: TensorTable, ok: Verdict, why: str) -> None:
    if not ok.all():
        at = _first_wrong(ok)
        row = int(t.nodes[at])
        raise ProtocolError(
            f"Graph node {at}, {op_name(int(t.op[row]))} (tensor {row}) {t.describe(row)}: {why}.", _HINT
        )
