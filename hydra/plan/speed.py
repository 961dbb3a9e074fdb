"""How long one step of decode should take: bytes read over memory bandwidth, operations, and the wire.

Made of what is known: a step cannot be faster than reading each node's weights and caches once. Peers and head work one
after another, so their times add up. The fixed costs below were seen on an H200 with three models (dense, sliding
window, gated delta nets), alone and split, and with MTP; what was measured there is met within 7 %. Knows nothing of
devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.plan.memory import Place, Setting, cache_bytes, ranges, step_of
from hydra.plan.shape import Shape

# Operations of a layer as they are launched: attention, and a gated delta net.
LAYER_OPS, DELTA_OPS, TAIL_OPS = 22, 34, 6
OP_S = {True: 3e-6, False: 1e-6}  # of an operation on a card, or a CPU: its start, and the gap to the next
PEER_S = 1.0e-3  # of a peer in a step, beside the wire: waiting for one another, copies, a graph that is started anew
VERIFY_S = 1.0e-3  # of a peer more than that, where a step verifies a draft
LINK_S = 0.3e-3  # of a step's messages to one peer over gigabit Ethernet: about ten sends, one reply
DRAFT_S = 0.25e-3  # of a drafted token, beside its computation: one more wait for the card
WIRE_BYTES_S = 117e6
ACCEPTANCE = 0.7  # of a drafted token, where nobody has measured it


@dataclass(frozen=True)
class NodeStep:
    """One node in one step: bytes it reads, and seconds for memory, operations, and reaching it."""

    read_bytes: int
    memory_s: float
    ops_s: float
    wire_s: float

    @property
    def work_s(self) -> float:
        """What the node itself needs."""
        return self.memory_s + self.ops_s

    @property
    def total_s(self) -> float:
        return self.work_s + self.wire_s


@dataclass(frozen=True)
class Speed:
    """A step of one token at `depth` tokens of context. mtp_step_s: of a draft and its verification, with
    mtp_tokens_per_step tokens for it; 0 without MTP."""

    depth: int
    nodes: dict[str, NodeStep]
    step_s: float
    mtp_step_s: float = 0.0
    mtp_tokens_per_step: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s

    @property
    def mtp_tokens_per_s(self) -> float:
        return self.mtp_tokens_per_step / self.mtp_step_s if self.mtp_step_s else 0.0


def predict(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int], *, depth: int = 0,
            acceptance: float = ACCEPTANCE, link_s: float = LINK_S, wire_bytes_s: float = WIRE_BYTES_S) -> Speed | None:
    """The step at `depth` tokens of context; None where a node's bandwidth is not known.

    link_s: round trip of a step's messages to one peer; wire_bytes_s: bandwidth of the network.
    """
    if any(not place.bandwidth_bytes_s for place in places if counts[place.name] or place.is_head):
        return None
    spans = ranges(counts)
    nodes = {place.name: _node(shape, setting, place, spans[place.name], depth, 1, link_s, wire_bytes_s)
             for place in places}
    step_s = sum(node.total_s for node in nodes.values())
    if not setting.drafts(shape):
        return Speed(depth, nodes, step_s)
    head = next(place for place in places if place.is_head)
    n = setting.n_max
    verify = sum(_node(shape, setting, place, spans[place.name], depth, n + 1, link_s, wire_bytes_s).total_s
                 for place in places)
    block = sum(layer.active_bytes for layer in shape.layers if layer.mtp) + shape.output_bytes
    draft = n * (block / head.bandwidth_bytes_s + (LAYER_OPS + TAIL_OPS) * head.op_s + DRAFT_S)
    gained = sum(acceptance**k for k in range(n + 1))
    return Speed(depth, nodes, step_s, verify + draft, gained)


def _node(shape: Shape, setting: Setting, place: Place, span: tuple[int, int], depth: int, width: int, link_s: float,
          wire_bytes_s: float) -> NodeStep:
    layers = shape.layers[span[0]:span[1]]
    if not layers and not place.is_head:
        return NodeStep(0, 0.0, 0.0, 0.0)
    step = step_of(shape, setting)
    filled = min(depth, step.cells) / step.cells
    read = sum(layer.active_bytes for layer in layers)
    read += round(cache_bytes(shape, layers, setting, step) * filled)
    # A state is read and written whole; with snapshots one is written for each token.
    read += sum(4 * (shape.conv_state + shape.delta_state) * (1 + width) for layer in layers if layer.recurrent)
    ops = sum(DELTA_OPS if layer.recurrent else LAYER_OPS for layer in layers)
    if place.is_head:
        read += shape.output_bytes
        ops += TAIL_OPS
        wire = 0.0
    else:
        wire = PEER_S + (VERIFY_S if width > 1 else 0.0) + link_s + 2 * 4 * shape.n_embd * width / wire_bytes_s
    return NodeStep(read, read / place.bandwidth_bytes_s, ops * place.op_s, wire)
