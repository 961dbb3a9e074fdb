"""What an engine is to be: one frozen, JSON-able description of model, nodes, placement, contexts and drafting.

Knows nothing of hydra.toml, llama.cpp or devices: the caller has resolved names to addresses. This is the ``spec`` of
the ``load`` frame (docs/architecture.md), so that the parent never loads llama.cpp and the child never reads a file of
settings. Names and meanings are llama.cpp's (``common/common.h``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import EngineError

DRAFTERS = ("auto", "mtp", "model", "lookup", "none")


@dataclass(frozen=True)
class Endpoint:
    """A peer as this head reaches it: the node's name, ``host:port``, and which of its devices to use."""

    node: str
    address: str
    device: int = 0


@dataclass(frozen=True)
class DraftSpec:
    """How to draft ahead.

    ``kind``: ``auto`` = with the draft model where one is given, else the model's own MTP block where it has one, else
    nothing (else ``lookup`` where that is set); ``mtp`` = the block alone; ``model`` = the draft model; ``lookup`` =
    prompt-lookup n-grams; ``none``. ``model``: the GGUF of a small model with the same vocabulary.
    """

    kind: str = "auto"
    n_max: int = 3
    p_min: float = 0.0
    adaptive: bool = True
    lookup: bool = False
    model: str = ""


@dataclass(frozen=True)
class EngineSpec:
    """Everything the engine child needs to load and serve one model.

    ``layers`` holds the count of repeating layers by node name; the head may be left out and gets the rest. Peers come
    first, in the order of ``endpoints``. Empty ``layers`` with endpoints splits by free memory.
    ``devices``: local device names as ggml has them (``CUDA0``); empty = all local GPUs, or the CPU.
    ``n_gpu_layers``: without peers, how many layers (the last ones; the output is one more) lie on the devices, and not
    in the head's own memory; -1 = all.
    ``exact_resume``: a continued answer takes its known tokens step by step (same rounding) instead of in one batch
    (faster).
    ``pipeline``: llama.cpp's pipeline parallelism (several ubatches in flight): faster prefill on several cards, slower
    decode.
    """

    model_path: str
    head: str = "head"
    endpoints: tuple[Endpoint, ...] = ()
    layers: dict[str, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    n_gpu_layers: int = -1
    ctx_size: int = 4096
    batch_size: int = 2048
    ubatch_size: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    parallel: int = 1
    threads: int = 0
    use_extra_bufts: bool = True
    pipeline: bool = False
    context_shift: bool = False
    exact_resume: bool = True
    draft: DraftSpec = field(default_factory=DraftSpec)

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineSpec:
        """The inverse of ``to_dict``, also after a trip through JSON.

        Raises: EngineError for an unknown or missing key, so that parent and child of two releases are found out.
        """
        fields = dict(data)
        try:
            fields["endpoints"] = tuple(Endpoint(**item) for item in fields.get("endpoints", ()))
            fields["devices"] = tuple(fields.get("devices", ()))
            fields["draft"] = DraftSpec(**fields.get("draft", {}))
            spec = cls(**fields)
        except TypeError as exc:
            raise EngineError(f"The engine was asked to load a description it does not know: {exc}.",
                              "Parent and engine process are of different releases: restart hydra.") from exc
        spec.check()
        return spec

    def check(self) -> None:
        """Raises EngineError for values that contradict each other (hydra.toml's own checks come earlier)."""
        nodes = [endpoint.node for endpoint in self.endpoints] + [self.head]
        unknown = sorted(set(self.layers) - set(nodes))
        if unknown:
            raise EngineError(f"layers names the node {unknown[0]!r}, which is neither a peer nor the head "
                              f"({', '.join(nodes)}).")
        if len(set(nodes)) != len(nodes):
            raise EngineError(f"Two nodes have one name: {', '.join(nodes)}.")
        if self.endpoints and self.n_gpu_layers >= 0:
            raise EngineError(f"n_gpu_layers is {self.n_gpu_layers}, and there are peers: layers says what lies where.")
        if self.draft.kind not in DRAFTERS:
            raise EngineError(f"draft.kind is {self.draft.kind!r}.", f"Use one of {', '.join(DRAFTERS)}.")
        if self.draft.kind == "model" and not self.draft.model:
            raise EngineError("draft.kind is model, and draft.model names none.")
        if self.flash_attn not in ("on", "off", "auto"):
            raise EngineError(f"flash_attn is {self.flash_attn!r}.", "Use on, off or auto.")
        if self.parallel < 1 or self.ubatch_size < 1 or self.batch_size < 1 or self.draft.n_max < 1:
            raise EngineError("parallel, batch_size, ubatch_size and draft.n_max must be at least 1.")
