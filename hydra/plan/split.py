"""Which layers where: the split that fits and is fastest, what limits it, and the smallest change where none fits.

Pure arithmetic: shapes, settings and places in, counts out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hydra.errors import ModelError
from hydra.plan.gguf import row_bytes
from hydra.plan.memory import NodeBytes, Place, Setting, all_nodes, node_bytes
from hydra.plan.shape import Shape

CONTEXT_STEP = 1024
SMALLEST_CONTEXT = 2048
A_LITTLE = 0.75  # of the context that was asked for


@dataclass(frozen=True)
class Change:
    """One change that makes it fit, in the words of hydra.toml. setting and counts: what it would be."""

    words: str
    setting: Setting
    counts: dict[str, int]


def lacking(nodes: Mapping[str, NodeBytes], places: Sequence[Place]) -> dict[str, int]:
    """Bytes that are missing on each node that has too few; empty when all fits (or is not known)."""
    return {place.name: nodes[place.name].total - place.memory_bytes for place in places
            if place.memory_bytes and nodes[place.name].total > place.memory_bytes}


def fits(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]) -> bool:
    return not lacking(all_nodes(shape, setting, places, counts), places)


def best_split(shape: Shape, setting: Setting, places: Sequence[Place]) -> dict[str, int]:
    """Layers by node (peers in order, the head last).

    As many as fit on the node with the fastest memory, the rest on the next; equally fast ones, or unknown ones, share
    by memory. Where nothing fits, the split that lacks least.
    Raises: ModelError when there is no head among the places.
    """
    if not any(place.is_head for place in places):
        raise ModelError("There is no head among the nodes.")
    if len(places) == 1:
        return {places[0].name: shape.n_layer}
    speeds = {place.bandwidth_bytes_s for place in places}
    if 0.0 in speeds or len(speeds) == 1 or any(not place.memory_bytes for place in places):
        counts = _by_memory(shape, setting, places)
    else:
        counts = _fastest_first(shape, setting, places)
    return counts if fits(shape, setting, places, counts) else _least_lacking(shape, setting, places, counts)


def _room(shape: Shape, setting: Setting, place: Place) -> float:
    """How many average layers a node has room for."""
    # Between a few layers and twice as many, so that what comes with the first layer is not counted for each.
    few = max(1, min(4, shape.n_layer // 2))
    small, large = (node_bytes(shape, setting, place, (0, n)).total for n in (few, 2 * few))
    each = (large - small) / few
    return max(0.0, few + (place.memory_bytes - small) / each) if each > 0 else 0.0


def _by_memory(shape: Shape, setting: Setting, places: Sequence[Place]) -> dict[str, int]:
    rooms = {place.name: _room(shape, setting, place) for place in places if place.memory_bytes}
    usual = sum(rooms.values()) / len(rooms) if any(rooms.values()) else 1.0
    rooms = {place.name: rooms.get(place.name, usual) for place in places}
    if not any(rooms.values()):
        rooms = dict.fromkeys(rooms, 1.0)
    total = sum(rooms.values())
    exact = {name: shape.n_layer * room / total for name, room in rooms.items()}
    counts = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[:shape.n_layer - sum(counts.values())]:
        counts[name] += 1
    return counts


def _fastest_first(shape: Shape, setting: Setting, places: Sequence[Place]) -> dict[str, int]:
    counts = {place.name: 0 for place in places}
    left = shape.n_layer
    for place in sorted(places, key=lambda p: -p.bandwidth_bytes_s):
        counts[place.name] = min(left, int(_room(shape, setting, place)))
        left -= counts[place.name]
    counts[max(places, key=lambda p: _room(shape, setting, p) - counts[p.name]).name] += left
    # The average layer is not each layer: move single ones until it fits, or no move helps.
    for _ in range(shape.n_layer):
        missing = lacking(all_nodes(shape, setting, places, counts), places)
        if not missing:
            break
        full = max(missing, key=lambda name: missing[name])
        others = [p for p in places if p.name not in missing]
        if not others or not counts[full]:
            break
        counts[full] -= 1
        counts[max(others, key=lambda p: _room(shape, setting, p) - counts[p.name]).name] += 1
    return counts


def _least_lacking(shape: Shape, setting: Setting, places: Sequence[Place],
                   counts: Mapping[str, int]) -> dict[str, int]:
    """By moving one layer at a time to where it is missed least."""
    best = dict(counts)

    def missed(candidate: Mapping[str, int]) -> int:
        return sum(lacking(all_nodes(shape, setting, places, candidate), places).values())

    lowest = missed(best)
    for _ in range(shape.n_layer):
        moves = [_moved(best, a.name, b.name) for a in places for b in places if a is not b and best[a.name]]
        if not moves:
            break
        move = min(moves, key=missed)
        now = missed(move)
        if now >= lowest:
            break
        best, lowest = move, now
    return best


def _moved(counts: Mapping[str, int], source: str, target: str) -> dict[str, int]:
    return {name: count - (name == source) + (name == target) for name, count in counts.items()}


def largest_context(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int] | None) -> int:
    """The largest ctx_size that fits with these counts (None: with the best split for each), 0 when none does."""
    most = max(shape.n_ctx_train or setting.context(shape), setting.context(shape))

    def good(blocks: int) -> bool:
        tried = replace(setting, ctx_size=blocks * CONTEXT_STEP)
        return fits(shape, tried, places, counts if counts is not None else best_split(shape, tried, places))

    low, high = 0, max(1, most // CONTEXT_STEP)
    if good(high):
        return high * CONTEXT_STEP
    while low < high - 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low * CONTEXT_STEP


def changes(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]) -> list[Change]:
    """Single changes that make it fit, the least first.

    Another split costs nothing; a little less context is less than coarser caches, and these less than a much smaller
    context; then smaller ubatches, and no MTP.
    """
    found = list(_by_split(shape, setting, places, counts))
    context = list(_by_context(shape, setting, places, counts))
    caches = list(_by_caches(shape, setting, places, counts))
    little = context and context[0].setting.ctx_size >= A_LITTLE * setting.context(shape)
    found += [*context, *caches] if little else [*caches, *context]
    return found + list(_by_the_rest(shape, setting, places, counts))


def _by_split(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]) -> Iterator[Change]:
    best = best_split(shape, setting, places)
    if best != dict(counts) and fits(shape, setting, places, best):
        yield Change("layers: " + ", ".join(f"{n} on {name}" for name, n in best.items()), setting, best)


def _by_caches(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]) -> Iterator[Change]:
    for kind in ("q8_0", "q4_0"):
        if row_order(kind) < row_order(setting.type_k) or row_order(kind) < row_order(setting.type_v):
            smaller = replace(setting, type_k=kind, type_v=kind, flash=True)
            split = _fitting(shape, smaller, places, counts)
            if split is not None:
                yield Change(f"cache_type_k = cache_type_v = \"{kind}\"" + _split_words(split, counts), smaller, split)
                return


def _by_context(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]) -> Iterator[Change]:
    context = largest_context(shape, setting, places, counts)
    if context >= SMALLEST_CONTEXT:
        yield Change(f"ctx_size = {context}", replace(setting, ctx_size=context), dict(counts))
    elif (context := largest_context(shape, setting, places, None)) >= SMALLEST_CONTEXT:
        tried = replace(setting, ctx_size=context)
        split = best_split(shape, tried, places)
        yield Change(f"ctx_size = {context}{_split_words(split, counts)}", tried, split)


def _by_the_rest(shape: Shape, setting: Setting, places: Sequence[Place],
                 counts: Mapping[str, int]) -> Iterator[Change]:
    for ubatch in (256, 128):
        if ubatch < setting.ubatch_size:
            tried = replace(setting, ubatch_size=ubatch)
            split = _fitting(shape, tried, places, counts)
            if split is not None:
                yield Change(f"ubatch_size = {ubatch}{_split_words(split, counts)}", tried, split)
                break
    if setting.drafts(shape):
        tried = replace(setting, draft=False)
        split = _fitting(shape, tried, places, counts)
        if split is not None:
            yield Change(f"[mtp] enabled = false{_split_words(split, counts)}", tried, split)


def row_order(kind: str) -> int:
    """Cache types by size."""
    return row_bytes(kind, 256)


def _fitting(shape: Shape, setting: Setting, places: Sequence[Place],
             counts: Mapping[str, int]) -> dict[str, int] | None:
    if fits(shape, setting, places, counts):
        return dict(counts)
    split = best_split(shape, setting, places)
    return split if fits(shape, setting, places, split) else None


def _split_words(split: Mapping[str, int], before: Mapping[str, int]) -> str:
    if dict(split) == dict(before):
        return ""
    return " and layers: " + ", ".join(f"{n} on {name}" for name, n in split.items())
