"""Decides which layers lie where: pure arithmetic over counts, no devices and no llama.cpp.

llama.cpp gives layer ``il`` of ``n`` (repeating layers, then the MTP blocks, then the output) to the first device whose
cumulated share exceeds ``il / n``. With shares that are whole numbers of layers the division is exact on both sides, so
the counts come out as asked; ``verify`` compares with what the loader said it did.

Source: llama_model_base::load_tensors in src/llama-model.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.errors import ModelError


def layers_by_node(n_layer: int, peers: Sequence[str], head: str, layers: Mapping[str, int],
                   free_bytes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Repeating layers for each node, peers first in their order, then the head; their sum is ``n_layer``.

    The head may be left out of ``layers`` and gets the rest. With no ``layers`` at all, by free memory (``free_bytes``
    by node).
    Raises: ModelError when the counts do not add up.
    """
    if not peers:
        asked = layers.get(head, n_layer)
        if asked != n_layer:
            raise ModelError(f"The model has {n_layer} layers and there is no peer, but {asked} are given to {head!r}.",
                             f"Set layers = {n_layer} or leave it out.")
        return {head: n_layer}
    if not layers:
        shares = {node: float((free_bytes or {}).get(node, 0)) for node in [*peers, head]}
        if not any(shares.values()):
            shares = dict.fromkeys(shares, 1.0)
        return _by_share(n_layer, shares)
    missing = [node for node in peers if node not in layers]
    if missing:
        raise ModelError(f"No layers are given for the peer {missing[0]!r}.", "Set layers in its [[nodes]] table.")
    result = {node: layers[node] for node in peers}
    rest = n_layer - sum(result.values())
    result[head] = layers.get(head, rest)
    if rest < 0 or result[head] != rest:
        split = " + ".join(f"{node} {count}" for node, count in result.items())
        raise ModelError(f"The split {split} is {sum(result.values())} layers; the model has {n_layer}.",
                         f"The counts must add up to {n_layer} (the MTP block and the output are not counted; "
                         "they always lie on the head).")
    return result


def tensor_split(counts: Sequence[int], n_extra: int) -> list[float]:
    """llama.cpp's ``tensor_split`` for ``counts`` repeating layers per device; ``n_extra`` more (MTP, output) on the
    last.
    """
    return [float(count) for count in counts[:-1]] + [float(counts[-1] + n_extra)]


def spread(count: int, free_bytes: Sequence[int]) -> list[int]:
    """One node's layers over its own devices, by their free memory."""
    if len(free_bytes) == 1:
        return [count]
    shares = {str(i): float(size) for i, size in enumerate(free_bytes)}
    if not any(shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    return list(_by_share(count, shares).values())


def _by_share(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """``count`` over ``shares`` by largest remainder; earlier names win ties."""
    total = sum(shares.values())
    exact = {name: count * share / total for name, share in shares.items()}
    result = {name: int(value) for name, value in exact.items()}
    left = count - sum(result.values())
    for name in sorted(exact, key=lambda n: result[n] - exact[n])[:left]:
        result[name] += 1
    return result


def verify(asked: Mapping[str, int], device_of_layer: Mapping[int, str], node_of_device: Mapping[str, str],
           n_layer: int, head: str) -> dict[str, int]:
    """What the loader really did, by node; MTP blocks and the output (``il >= n_layer``) must be on the head.

    Raises: ModelError when that is not what was asked.
    """
    real: dict[str, int] = dict.fromkeys(asked, 0)
    for il in range(n_layer):
        device = device_of_layer.get(il, "?")
        node = node_of_device.get(device, device)
        real[node] = real.get(node, 0) + 1
    if real != dict(asked):
        raise ModelError(f"llama.cpp placed the layers as {real}, not as {dict(asked)}.",
                         "This is a fault in hydra: please report it with the split.")
    for il, device in device_of_layer.items():
        if il >= n_layer and node_of_device.get(device, device) != head:
            raise ModelError(f"Layer {il} (MTP or output) lies on {device}, not on the head.",
                             "This is a fault in hydra: please report it with the split.")
    return real
