"""Loads what an EngineSpec describes: peers, model with its layers placed by node name, target and draft contexts.

Knows placement and memory; does not know requests. What can fail fails here, before anything is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import ModelError
from hydra.hardware import usable_cores

from . import memory, placement
from .draft import Drafter, MtpDrafter, batch_capacity
from .draftmodel import ModelDrafter, check_fit
from .llama import DEVICE_CPU, Context, Device, Model, Progress, local_devices, register_peer
from .lookup import LookupDrafter
from .spec import EngineSpec

ProgressSink = Callable[[dict[str, Any]], None]
_PROGRESS_PERIOD_S = 0.1
# Those whose graph for one MTP block with a KV cache of its own llama.cpp has (src/models/*.cpp,
# LLM_GRAPH_TYPE_DECODER_MTP). Others abort or share the target's cache. Tested with qwen35; a bad guess of another
# costs speed, never an answer.
MTP_ARCHITECTURES = frozenset((
    "qwen35", "qwen35moe", "qwen3next", "glm4moe", "glm-dsa", "deepseek2", "deepseek32", "cohere2moe", "nemotron_h_moe",
    "bailingmoe3"))


@dataclass
class Placement:
    """Devices in llama.cpp's order (peers, then the head's), repeating layers for each, and whose they are.

    ``n_extra``: MTP blocks and the output, which go to the last device. ``buffers``: device by buffer type name, where
    the two differ (``RPC0[host:port]``, whose number is the peer's own).
    """

    head: str
    devices: list[Device]
    counts: list[int]
    node_of: dict[str, str]
    layers: dict[str, int]
    n_extra: int
    buffers: dict[str, str]

    @property
    def local_cpu(self) -> bool:
        """No peer and no GPU: llama.cpp then wants no devices at all, and may repack weights."""
        return all(device.kind == DEVICE_CPU for device in self.devices)


@dataclass
class Loaded:
    """Everything native that an engine owns; ``close`` ends contexts before the model.

    ``shares_core``: a decode needs no second core on this box, so the RPC client's threads may have the engine's.
    """

    spec: EngineSpec
    model: Model
    target: Context
    drafter: Drafter | None
    layers: dict[str, int]
    memory_use: dict[str, dict[str, int]]
    notes: list[str] = field(default_factory=list)
    warm_up_tokens: int = 1
    shares_core: bool = False
    owns_model: bool = True

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
        self.target.close()
        if self.owns_model:
            self.model.close()


def n_threads(asked: int) -> int:
    """CPU threads: as asked, or one for each core this process may use."""
    return asked or usable_cores()


def load(spec: EngineSpec, progress: ProgressSink | None = None) -> Loaded:
    """Load everything; that it fits is found out first. ``progress`` gets the fields of the ``progress`` frame.

    Raises: PeerUnreachable, DeviceError, ModelError, LibraryError, each with numbers.
    """
    spec.check()
    report = progress or (lambda _event: None)
    report({"stage": "peers"})
    place = find_devices(spec, read_shape(spec.model_path))
    report({"stage": "memory"})
    expected = estimate(spec, place)
    memory.check(expected, {device.name: device for device in place.devices}, place.node_of)
    tracker = _Tracker(report, place, sum(use.model for use in expected.by_node.values()))
    model = _open_model(spec, place, progress=tracker.on_progress)
    tracker.finish()
    try:
        layers = _verify(model, place, spec.head)
        report({"stage": "contexts"})
        contexts = _open_contexts(spec, model)
    except BaseException:
        model.close()
        raise
    used = _account(contexts, place)
    # A GPU takes work space at its first full ubatch; on a CPU that would only be a long wait.
    on_cpu = place.devices[-1].kind == DEVICE_CPU
    warm_up_tokens = 1 if on_cpu else contexts.n_ubatch
    shares_core = bool(spec.endpoints) and not spec.pipeline and (not on_cpu or n_threads(spec.threads) == 1)
    return Loaded(spec, model, contexts.target, _drafter(spec, contexts), layers,
                  {node: use.to_dict() for node, use in used.by_node.items()}, contexts.notes,
                  warm_up_tokens, shares_core)


def share(loaded: Loaded, spec: EngineSpec) -> Loaded:
    """Contexts of their own, as ``spec`` says, on a model that is loaded already and stays its first owner's.

    Raises: DeviceError when there is no memory for them.
    """
    contexts = _open_contexts(spec, loaded.model)
    return Loaded(spec, loaded.model, contexts.target, _drafter(spec, contexts), loaded.layers, loaded.memory_use,
                  contexts.notes, shares_core=loaded.shares_core, owns_model=False)


def estimate(spec: EngineSpec, place: Placement) -> memory.Estimate:
    """What the load will take, by llama.cpp's own accounting of a load without allocation.

    Raises: ModelError, DeviceError, LibraryError.
    """
    with _open_model(spec, place, no_alloc=True) as model:
        contexts = _open_contexts(spec, model, no_alloc=True)
        try:
            return _account(contexts, place)
        finally:
            contexts.close()


def _open_model(spec: EngineSpec, place: Placement, *, progress: Progress | None = None,
                no_alloc: bool = False) -> Model:
    return Model(
        spec.model_path, [] if place.local_cpu else place.devices,
        [] if place.local_cpu else placement.tensor_split(place.counts, place.n_extra),
        load_mtp=spec.draft.kind in ("auto", "mtp") and not spec.draft.model, pipeline=spec.pipeline,
        use_extra_bufts=spec.use_extra_bufts, progress=progress, no_alloc=no_alloc, n_gpu_layers=spec.n_gpu_layers)


@dataclass
class Shape:
    """What the GGUF's header says that placement needs."""

    n_layer: int
    n_layer_nextn: int


def read_shape(path: str) -> Shape:
    """Layers and MTP blocks of a GGUF, from its header alone. Raises ModelError."""
    try:
        with Model(path, [], [], load_mtp=False, pipeline=True, use_extra_bufts=False, vocab_only=True) as model:
            arch = model.meta("general.architecture") or ""
            n_all = int(model.meta(f"{arch}.block_count") or 0)
            nextn = int(model.meta(f"{arch}.nextn_predict_layers") or 0)
    except ValueError as exc:
        raise ModelError(f"{path} has a header that cannot be read: {exc}.") from exc
    if n_all <= nextn:
        raise ModelError(f"{path} says that it has {n_all} blocks.", "Is it a language model's GGUF (its first part)?")
    return Shape(n_all - nextn, nextn)


def find_devices(spec: EngineSpec, shape: Shape) -> Placement:
    """Peers registered and local devices found, with each one's layers. Raises PeerUnreachable, DeviceError,
    ModelError.
    """
    peers = [register_peer(endpoint.address, endpoint.device) for endpoint in spec.endpoints]
    local = local_devices(spec.devices)
    free: dict[str, int] = {}
    if spec.endpoints and not spec.layers:
        free = {e.node: device.memory()[0] for e, device in zip(spec.endpoints, peers, strict=True)}
        free[spec.head] = sum(device.memory()[0] for device in local)
    layers = placement.layers_by_node(shape.n_layer, [e.node for e in spec.endpoints], spec.head, spec.layers, free)
    counts = [layers[e.node] for e in spec.endpoints]
    counts += placement.spread(layers[spec.head], [device.memory()[0] if len(local) > 1 else 1 for device in local])
    node_of = {device.name: e.node for e, device in zip(spec.endpoints, peers, strict=True)}
    node_of.update({device.name: spec.head for device in local})
    node_of.setdefault("CPU", spec.head)  # token embeddings always lie there
    buffers = {f"RPC{e.device}[{e.address}]": device.name for e, device in zip(spec.endpoints, peers, strict=True)}
    return Placement(spec.head, [*peers, *local], counts, node_of, layers, shape.n_layer_nextn + 1, buffers)


def _verify(model: Model, place: Placement, head: str) -> dict[str, int]:
    if place.local_cpu:
        return {head: model.n_layer}
    return placement.verify(place.layers, model.log.layers, place.node_of, model.n_layer, head)


@dataclass
class _Contexts:
    """The target context, the draft context where one is needed, and how to draft."""

    target: Context
    draft: Context | None
    kind: str
    n_ubatch: int
    notes: list[str]
    draft_model: Model | None = None

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
        if self.draft_model is not None:
            self.draft_model.close()
        self.target.close()


def _open_contexts(spec: EngineSpec, model: Model, no_alloc: bool = False) -> _Contexts:
    notes: list[str] = []
    kind = _drafter_kind(spec, model, notes)
    drafts = kind != "none"
    outputs = spec.parallel * (1 + spec.draft.n_max if drafts else 1)
    n_batch = max(spec.batch_size, outputs)
    common: dict[str, Any] = {
        "n_ctx": spec.ctx_size or model.n_ctx_train, "n_seq_max": spec.parallel,
        "n_ubatch": min(max(spec.ubatch_size, spec.draft.n_max + 2), n_batch),
        "type_k": spec.cache_type_k, "type_v": spec.cache_type_v, "flash_attn": spec.flash_attn,
        "n_threads": n_threads(spec.threads)}
    target = Context(model, n_batch=n_batch, n_outputs_max=outputs,
                     n_rs_seq=spec.draft.n_max if drafts and model.recurrent else 0,
                     # A refused draft is taken back, which a sliding window that has moved on does not allow.
                     swa_full=drafts and model.n_swa > 0, **common)
    draft: Context | None = None
    draft_model: Model | None = None
    try:
        if model.recurrent and drafts and target.n_rs_seq < spec.draft.n_max:
            notes.append(f"This architecture keeps {target.n_rs_seq} snapshots of its state, so nothing is drafted.")
            kind = "none"
        if kind == "mtp":
            draft = Context(model, n_batch=batch_capacity(spec.parallel, common["n_ubatch"], spec.draft.n_max),
                            n_outputs_max=spec.parallel, mtp_of=target, greedy=spec.draft.p_min <= 0, **common)
        elif kind == "model":
            draft_model = _open_draft_model(spec, model, no_alloc)
            draft = Context(draft_model, n_batch=common["n_ubatch"] + spec.parallel, n_outputs_max=spec.parallel,
                            swa_full=draft_model.n_swa > 0, greedy=spec.draft.p_min <= 0, **common)
    except BaseException:
        target.close()
        if draft_model is not None:
            draft_model.close()
        raise
    return _Contexts(target, draft, kind, common["n_ubatch"], notes, draft_model)


def _open_draft_model(spec: EngineSpec, target: Model, no_alloc: bool) -> Model:
    """The small model on the head's first device. Raises: ModelError when its vocabulary is another."""
    devices = [device for device in local_devices(spec.devices) if device.kind != DEVICE_CPU][:1]
    model = Model(spec.draft.model, devices, [], load_mtp=False, pipeline=True, use_extra_bufts=spec.use_extra_bufts,
                  no_alloc=no_alloc)
    try:
        check_fit(target, model, spec.draft.model)
    except BaseException:
        model.close()
        raise
    return model


def _drafter(spec: EngineSpec, contexts: _Contexts) -> Drafter | None:
    if contexts.draft is not None and contexts.draft_model is not None:
        return ModelDrafter(contexts.draft_model, contexts.draft, n_slots=spec.parallel, piece=contexts.n_ubatch,
                            n_max=spec.draft.n_max, p_min=spec.draft.p_min)
    if contexts.draft is not None:
        return MtpDrafter(contexts.target, contexts.draft, n_slots=spec.parallel, piece=contexts.n_ubatch,
                          n_max=spec.draft.n_max, p_min=spec.draft.p_min)
    return LookupDrafter(n_slots=spec.parallel, n_max=spec.draft.n_max) if contexts.kind == "lookup" else None


def _account(contexts: _Contexts, place: Placement) -> memory.Estimate:
    result = memory.Estimate()
    for context, draft in ((contexts.target, False), (contexts.draft, True)):
        for buffer, sizes in (memory.breakdown(context) if context is not None else {}).items():
            device = place.buffers.get(buffer, buffer if buffer in place.node_of else "CPU")
            result.add(device, place.node_of.get(device, place.head), sizes, draft)
            if draft and contexts.draft_model is not None:  # weights of its own
                result.add(device, place.node_of.get(device, place.head), (sizes[0], 0, 0), draft=False)
    for buffer, size in memory.kept_states(contexts.target).items():
        device = place.buffers.get(buffer, buffer if buffer in place.node_of else "CPU")
        result.by_device[device].checkpoints += size
        result.by_node[place.node_of.get(device, place.head)].checkpoints += size
    return result


def _drafter_kind(spec: EngineSpec, model: Model, notes: list[str]) -> str:
    kind = spec.draft.kind
    if kind == "none":
        return kind
    if kind == "lookup":
        return kind
    if kind == "model" or (kind == "auto" and spec.draft.model):
        return "model"
    if model.n_layer_nextn == 0 and kind == "auto" and spec.draft.lookup:
        notes.append("This model has no MTP block: drafts are looked up in the text.")
        return "lookup"
    if model.n_layer_nextn == 0:
        notes.append("This model has no MTP block: nothing is drafted ahead.")
        return "none"
    arch = model.meta("general.architecture") or ""
    if arch not in MTP_ARCHITECTURES:
        notes.append(f"hydra does not know the MTP block of {arch} models: nothing is drafted ahead.")
        return "none"
    if model.n_layer_nextn > 1:
        notes.append(f"This model has {model.n_layer_nextn} MTP blocks; hydra drafts with exactly one, "
                     "so nothing is drafted.")
        return "none"
    return "mtp"


class _Tracker:
    """Turns llama.cpp's one fraction into bytes and layers by node; the loader goes through the buffers in its log's
    order.
    """

    def __init__(self, report: ProgressSink, place: Placement, total_bytes: int) -> None:
        self._report = report
        self._place = place
        self._total_bytes = total_bytes
        self._started = time.perf_counter()
        self._last = 0.0
        self._send("", 0.0, 0, None)

    def on_progress(self, fraction: float) -> bool:
        now = time.perf_counter()
        if now - self._last < _PROGRESS_PERIOD_S and fraction < 1:
            return True
        self._last = now
        elapsed = now - self._started
        done = int(fraction * sum(self._place.layers.values()))
        node, passed = "", 0
        for name, count in self._place.layers.items():
            node = name
            if done < passed + count:
                break
            passed += count
        self._send(node, fraction, done, round(elapsed / fraction - elapsed, 1) if fraction > 0.01 else None)
        return True

    def finish(self) -> None:
        self._send("", 1.0, sum(self._place.layers.values()), 0.0)

    def _send(self, node: str, fraction: float, layers: int, eta_s: float | None) -> None:
        self._report({"stage": "weights", "node": node, "layers_done": layers,
                      "layers_total": sum(self._place.layers.values()), "bytes_done": int(fraction * self._total_bytes),
                      "bytes_total": self._total_bytes, "eta_s": eta_s})
