"""A graph that passed the rules, in which a few shapes changed: asks again what those shapes can have changed.

A conversation's cache grows, and with every step of its length some views of it, a mask, the attention over them. Of
two thousand tensors a dozen differ. To ask everything again takes milliseconds, during which a GPU stands still.

A rule looks at its node and at that node's sources, at the tensors that these are views of, and at nothing beyond. So
the tensors that changed, their views, the nodes that are among these or use one of them, and the sources of those nodes
are made a table of their own, and the same rules are asked about it. What holds for who uses whom (order, cycles, use
counts, which sources there must be) was found before and is not looked at: the caller knows that it is the same.

No rules of its own; those are hydra.peer.rules and the op_rules.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from hydra.errors import ProtocolError
from hydra.peer import op_rules, rules
from hydra.peer.rules import Ints, Layout, TensorTable

_COLUMNS = ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "buf", "data")
_KEPT = frozenset(("root", "memo"))  # of a Layout: not what a change of shapes changes


def recheck(t: TensorTable, layout: Layout, changed: Ints) -> tuple[Layout, Ints] | None:
    """The layout of a graph whose rows ``changed`` have other shapes, strides, parameters or view offsets than when it
    had ``layout``, and the nodes i64[k] (rows) that a device has to be asked about again.

    All else of those rows must be as it was, but for where they lie. None when it is not that simple, or when a rule
    refuses it: check_tensors and check_graph then have the answer, and the words for it. Where the tensors lie is left
    to check_placement.
    """
    touched = np.zeros(len(t), np.bool_)
    touched[changed] = True
    views = np.flatnonzero(t.view_src >= 0)
    touched[views[touched[t.view_src[views]]]] = True
    with_none = np.append(touched, False)  # the row -1 is no source
    nodes = t.nodes[touched[t.nodes] | with_none[t.src[t.nodes]].any(1)]
    affected = touched.copy()
    affected[nodes] = True
    needed = affected.copy()
    sources = t.src[nodes]
    needed[sources[sources >= 0]] = True
    roots = t.view_src[needed]
    needed[roots[roots >= 0]] = True
    rows = np.flatnonzero(needed)
    part = _part(t, rows, nodes)
    try:
        rules.check_tensors(part)
        new = part.layout
        if new is None or ((new.elements == 0) != (layout.elements[rows] == 0)).any():
            return None
        for number, group in rules.by_operation(part.op[part.nodes].astype(np.int64)):
            op_rules.check(op_rules.Batch(part, new, number, part.nodes[group], group))
    except ProtocolError:
        return None
    return _merged(t, layout, new, rows, affected), nodes


def _part(t: TensorTable, rows: Ints, nodes: Ints) -> TensorTable:
    """Some rows as a table of their own. Sources are kept of ``nodes`` alone: no rule is asked about the others."""
    at = np.full(len(t) + 1, -1, np.int64)  # the last for the row -1, which stays -1
    at[rows] = np.arange(len(rows))
    src = np.full((len(rows), op_rules.MAX_SRC), -1, np.int64)
    src[at[nodes]] = at[t.src[nodes]]
    return TensorTable(
        **{name: getattr(t, name)[rows] for name in _COLUMNS},
        src=src,
        view_src=at[t.view_src[rows]],
        buf_size=t.buf_size,
        nodes=at[nodes],
        is_cpu=t.is_cpu,
    )


def _merged(t: TensorTable, layout: Layout, new: Layout, rows: Ints, affected: rules.Mask) -> Layout:
    """``layout`` with what ``new`` says of ``rows``; of what others derived from it, all that is still true."""
    merged = {}
    for column in fields(Layout):
        if column.name not in _KEPT:
            merged[column.name] = getattr(layout, column.name).copy()
            merged[column.name][rows] = getattr(new, column.name)
    result = replace(layout, **merged, memo={})
    paths = layout.memo.get("indices")
    if paths is not None and not affected[paths.seen].any():
        result.memo["indices"] = paths
    sizes = layout.memo.get("sizes")
    if sizes is not None:
        result.memo["sizes"] = np.where(affected, rules.sizes_to_ask(t, result), sizes)
    return result
