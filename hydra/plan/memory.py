"""Bytes that each node needs for a model: weights, caches, states, compute buffers, the draft context.

Pure arithmetic over a Shape; follows hydra/head/loading.py in how contexts are made. What is allocated outside of
llama.cpp's own buffers (the driver's context, cuBLAS, captured graphs) is in `reserve`.

Source: src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-memory-recurrent.cpp, llama-context.cpp (sched_reserve)
of the pinned llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hydra.plan import graph
from hydra.plan.gguf import row_bytes
from hydra.plan.shape import Layer, Shape

MIB, GIB = 1 << 20, 1 << 30
GPU_RESERVE_BYTES = 640 * MIB  # seen on an H200: 560 MiB for the driver's context, up to 160 MiB more once it serves
CPU_RESERVE_BYTES = 256 * MIB
_QUANTISED = ("q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")


@dataclass(frozen=True)
class Setting:
    """What of hydra.toml costs memory. draft: with the model's MTP block, where it has exactly one."""

    ctx_size: int = 4096
    batch_size: int = 2048
    ubatch_size: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash: bool = True
    parallel: int = 1
    draft: bool = True
    n_max: int = 3

    def drafts(self, shape: Shape) -> bool:
        return self.draft and shape.n_nextn == 1

    def context(self, shape: Shape) -> int:
        """Cells of the cache."""
        return _pad(self.ctx_size or shape.n_ctx_train or 4096, 256)


@dataclass(frozen=True)
class NodeBytes:
    """One node's bytes on its device. kept: copies of recurrent states, one for each slot, that the engine goes back
    to; host: what the head keeps in its own memory beside a card.
    """

    weights: int = 0
    kv: int = 0
    state: int = 0
    kept: int = 0
    compute: int = 0
    draft: int = 0
    output: int = 0
    reserve: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """All of it on the device."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")

    @property
    def buffers(self) -> int:
        """What llama.cpp itself allocates there."""
        return self.total - self.reserve


@dataclass(frozen=True)
class Place:
    """A node as planning sees it. peer or head; gpu: its device is a card; memory_bytes: usable, 0 = unknown.

    bandwidth_bytes_s: of its memory in decode, 0 = unknown; op_s: fixed cost of one operation.
    """

    name: str
    is_head: bool
    gpu: bool
    memory_bytes: int = 0
    bandwidth_bytes_s: float = 0.0
    op_s: float = 3e-6


def _pad(value: int, step: int) -> int:
    return -(-value // step) * step


def step_of(shape: Shape, setting: Setting, gpu: bool = False) -> graph.Step:
    """The largest step that llama.cpp reserves buffers for. gpu: on a card."""
    drafts = setting.drafts(shape)
    cells = setting.context(shape)
    outputs = setting.parallel * (1 + setting.n_max if drafts else 1)
    batch = max(setting.batch_size, outputs)
    tokens = min(max(setting.ubatch_size, setting.n_max + 2), batch, cells)
    window = max((layer.window for layer in shape.layers), default=0)
    cells_window = _pad(min(cells, window * setting.parallel + tokens), 256)
    return graph.Step(
        tokens=tokens, outputs=min(tokens, outputs), sequences=setting.parallel, cells=cells,
        # A refused draft is taken back, which a window that has moved on does not allow: the cache is then full size.
        cells_window=cells if drafts and window else cells_window, flash=setting.flash,
        quantised_k=_rotated(setting.type_k, shape.head_k), quantised_v=_rotated(setting.type_v, shape.head_v),
        n_rs=setting.n_max if drafts and shape.recurrent else 0,
        # ggml_cuda_flash_attn_ext_get_alloc_size of ggml-cuda/fattn.cu
        convert_k=gpu and setting.flash and setting.type_k != "f16",
        convert_v=gpu and setting.flash and setting.type_v != "f16")


def _rotated(kind: str, head: int) -> bool:
    return kind in _QUANTISED and head > 0 and head % 64 == 0


def cache_bytes(shape: Shape, layers: Sequence[Layer], setting: Setting, step: graph.Step) -> int:
    """K and V caches of these layers."""
    total = 0
    for layer in layers:
        if not layer.attends:
            continue
        cells = step.cells_window if layer.window else step.cells
        head_k, head_v = (shape.head_k_swa, shape.head_v_swa) if layer.window else (shape.head_k, shape.head_v)
        total += cells * row_bytes(setting.type_k, head_k * layer.n_head_kv)
        total += cells * row_bytes(setting.type_v, head_v * layer.n_head_kv)
    return total


def state_bytes(shape: Shape, layers: Sequence[Layer], setting: Setting, step: graph.Step) -> int:
    """What recurrent layers keep: newest state and snapshots, for each sequence."""
    rows = max(1, setting.parallel) * (1 + step.n_rs)
    return sum(4 * (shape.conv_state + shape.delta_state) * rows for layer in layers if layer.recurrent)


def ranges(counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """First and last-plus-one layer of each node, in the order of `counts` (peers, then the head)."""
    result, at = {}, 0
    for name, count in counts.items():
        result[name] = (at, at + count)
        at += count
    return result


def node_bytes(shape: Shape, setting: Setting, place: Place, span: tuple[int, int]) -> NodeBytes:
    """What one node needs for the layers from span[0] up to span[1]."""
    step = step_of(shape, setting, place.gpu)
    layers = shape.layers[span[0]:span[1]]
    drafts = setting.drafts(shape)
    weights = sum(layer.weights for layer in layers)
    kv, state = cache_bytes(shape, layers, setting, step), state_bytes(shape, layers, setting, step)
    kept = state // (1 + step.n_rs)
    reserve = GPU_RESERVE_BYTES if place.gpu else CPU_RESERVE_BYTES
    if not place.is_head:
        compute = graph.step_bytes(shape, layers, step, first=False, last=False, shares_inputs=False) if layers else 0
        return NodeBytes(weights, kv, state, kept, compute, reserve=reserve)
    compute = graph.step_bytes(shape, layers, step, first=not place.gpu, last=True, shares_inputs=not place.gpu)
    output = 4 * shape.n_vocab * max(setting.parallel, step.outputs)
    if drafts:
        output += 4 * shape.n_embd * max(setting.batch_size, step.outputs)  # hidden rows for the draft
    weights += sum(layer.weights for layer in shape.layers if layer.mtp) if drafts else 0
    draft = 0
    if drafts:
        blocks = tuple(layer for layer in shape.layers if layer.mtp)
        draft_step = replace(step, outputs=min(step.tokens, setting.parallel), n_rs=0)
        draft = cache_bytes(shape, blocks, setting, step)
        draft += graph.step_bytes(shape, blocks, draft_step, first=True, last=True, shares_inputs=True, mtp=True)
    if place.gpu:
        host = shape.embed_bytes + graph.input_bytes(shape, step) + output
        return NodeBytes(weights + shape.output_bytes, kv, state, kept, compute, draft, 0, reserve, host)
    # Where the embeddings serve as output they are one tensor here, not two.
    weights += shape.output_bytes if shape.tied else shape.output_bytes + shape.embed_bytes
    return NodeBytes(weights, kv, state, kept, compute, draft, output, reserve)


def all_nodes(shape: Shape, setting: Setting, places: Sequence[Place], counts: Mapping[str, int]
              ) -> dict[str, NodeBytes]:
    """Every node's bytes. counts: layers by node, peers in order and the head last."""
    spans = ranges(counts)
    return {place.name: node_bytes(shape, setting, place, spans[place.name]) for place in places}
