"""A model's dimensions, layer by layer, from its GGUF metadata, and what each layer keeps between tokens.

Knows architectures as far as memory goes: which layers attend, over which window, which are recurrent. What an
architecture does that is not known here is told in ``notes``, and counted as an ordinary transformer.

Source: src/llama-hparams.cpp, src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp and the load_arch_hparams of
src/models/*.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import ModelError
from hydra.plan.gguf import Header, Tensor

# Architecture → every how manieth layer is not a sliding window (llama.cpp's default of load_swa_pattern), dense first?
_SWA: dict[str, tuple[int, bool]] = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone4": (4, False),
    "exaone-moe": (4, False), "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gemma4": (6, False),
    "gpt-oss": (2, False), "laguna": (4, True), "llama4": (4, False), "mellum": (4, False), "olmo2": (4, False),
    "plamo3": (8, False), "smallthinker": (4, True),
}  # fmt: skip
_DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_MTP_APART = (*_DELTA_NETS, "glm4moe", "glm4_moe", "deepseek32", "step35")
_MLA = ("deepseek2", "deepseek32", "glm-dsa", "minicpm3", "kimi-linear", "plm")
_OTHER_MEMORY = ("mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2",
                 "lfm2moe", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "plamo2", "kimi-linear", "minimax-01", *_MLA)


@dataclass(frozen=True)
class Layer:
    """One block. attends: has a KV cache; window: its sliding window in tokens, 0 = none; recurrent: keeps a state.

    n_ff: width of its feed-forward part; gate: that has a gate; experts: it is a mixture of them; n_ff_shared: width of
    the expert that is always asked, 0 = none. weights: bytes of its tensors; active_bytes: of those that one token
    reads (experts not chosen left out).
    """

    index: int
    attends: bool
    window: int
    recurrent: bool
    n_head: int
    n_head_kv: int
    n_ff: int
    weights: int
    active_bytes: int
    mtp: bool = False
    experts: bool = False
    gate: bool = True
    n_ff_shared: int = 0


@dataclass(frozen=True)
class Shape:
    """A model: n_layer repeating layers and n_nextn MTP blocks in `layers`, and what lies outside of them.

    head_k, head_v: size of a head of K and V. embed_bytes, output_bytes: token embeddings, output and its norm
    (counted again where the embeddings serve as output). state_*: numbers that a recurrent layer keeps (f32).
    """

    name: str
    arch: str
    n_layer: int
    n_nextn: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    head_k: int
    head_v: int
    head_k_swa: int
    head_v_swa: int
    layers: tuple[Layer, ...]
    embed_bytes: int
    output_bytes: int
    tied: bool
    file_bytes: int
    conv_state: int = 0
    delta_state: int = 0
    ssm: dict[str, int] = field(default_factory=dict)
    n_expert_used: int = 0
    n_expert: int = 0
    n_ff_expert: int = 0
    gated: bool = False
    qk_norm: bool = False
    mtp_embeds: bool = False
    notes: tuple[str, ...] = ()

    @property
    def recurrent(self) -> bool:
        return any(layer.recurrent for layer in self.layers)

    @property
    def windowed(self) -> bool:
        return any(layer.window for layer in self.layers)


def shape_of(header: Header) -> Shape:
    """The dimensions. Raises: ModelError where it is no language model."""
    meta = header.meta
    arch = str(meta.get("general.architecture", ""))

    def get(key: str, default: Any = 0) -> Any:
        return meta.get(f"{arch}.{key}", default)

    n_all, n_embd = get("block_count"), get("embedding_length")
    if not isinstance(n_all, int) or not n_all or not n_embd:
        raise ModelError(f"{header.path} is no language model: it has no {arch or '?'}.block_count.",
                         "Is it a projector, an adapter, or not the first part of a split model?")
    nextn = int(get("nextn_predict_layers"))
    n_layer = n_all - nextn
    heads = _per_layer(get("attention.head_count", 1), n_all)
    heads_kv = _per_layer(get("attention.head_count_kv", heads), n_all)
    ff = _per_layer(get("feed_forward_length", 0), n_all)
    head_k = int(get("attention.key_length", n_embd // max(1, heads[0])))
    head_v = int(get("attention.value_length", n_embd // max(1, heads[0])))
    notes: list[str] = []
    if arch in _OTHER_MEMORY:
        notes.append(f"{arch} keeps its context in a way that is not counted exactly here: treat the figures as rough.")
    if arch in _MLA:
        # One compressed row for each token, no V (llama_hparams::is_mla).
        head_k, head_v = int(get("attention.key_length_mla") and get("attention.key_length", head_k)) or head_k, 0
        heads_kv = [1] * n_all
    recurrent = _recurrent(arch, get, n_layer, n_all)
    windows = _windows(arch, get, n_layer, n_all)
    shared_kv = int(get("attention.shared_kv_layers"))
    n_expert, n_used = int(get("expert_count")), int(get("expert_used_count"))
    by_block: dict[int, list[Tensor]] = {}
    outside: list[Tensor] = []
    for tensor in header.tensors.values():
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        if match:
            by_block.setdefault(int(match[1]), []).append(tensor)
        else:
            outside.append(tensor)
    layers = []
    for il in range(n_all):
        mine = by_block.get(il, [])
        layers.append(Layer(
            il, attends=not recurrent[il] and heads_kv[il] > 0 and not n_layer - shared_kv <= il < n_layer,
            window=windows[il], recurrent=recurrent[il], n_head=heads[il], n_head_kv=heads_kv[il],
            n_ff=_rows(mine, "ffn_up.weight") or ff[il], experts=any("_exps." in t.name for t in mine),
            gate=any(".ffn_gate" in t.name for t in mine), n_ff_shared=_rows(mine, "ffn_up_shexp.weight"),
            weights=sum(t.n_bytes for t in mine), active_bytes=sum(_active(t, n_expert, n_used) for t in mine),
            mtp=il >= n_layer))
    inputs = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
    embed = [t for t in outside if t.name.startswith(inputs)]
    rest = [t for t in outside if t not in embed]
    tied = "output.weight" not in header.tensors
    output = sum(t.n_bytes for t in rest)
    if tied and "token_embd.weight" in header.tensors:
        output += header.tensors["token_embd.weight"].n_bytes
    ssm = {name: int(get(f"ssm.{key}")) for name, key in (
        ("conv", "conv_kernel"), ("inner", "inner_size"), ("state", "state_size"), ("heads", "time_step_rank"),
        ("groups", "group_count"))}
    first = header.tensors.get("token_embd.weight")
    return Shape(
        name=str(meta.get("general.name", header.path.stem)), arch=arch, n_layer=n_layer, n_nextn=nextn,
        n_embd=int(n_embd),
        n_vocab=first.shape[1] if first and len(first.shape) > 1 else int(get("vocab_size", 0)),
        n_ctx_train=int(get("context_length")), head_k=head_k, head_v=head_v,
        head_k_swa=int(get("attention.key_length_swa", head_k)),
        head_v_swa=int(get("attention.value_length_swa", head_v)),
        layers=tuple(layers), embed_bytes=sum(t.n_bytes for t in embed), output_bytes=output, tied=tied,
        file_bytes=header.file_bytes,
        conv_state=max(0, ssm["conv"] - 1) * (ssm["inner"] + 2 * ssm["groups"] * ssm["state"]),
        delta_state=ssm["state"] * ssm["inner"], ssm=ssm, n_expert=n_expert, n_expert_used=n_used,
        n_ff_expert=int(get("expert_feed_forward_length")), gated=arch in _DELTA_NETS,
        qk_norm=any(name.endswith(".attn_q_norm.weight") for name in header.tensors),
        mtp_embeds=any(".nextn.embed_tokens" in name for name in header.tensors), notes=tuple(notes))


def _per_layer(value: Any, n_all: int) -> list[int]:
    if isinstance(value, list):
        return [int(v) for v in value] + [int(value[-1]) if value else 0] * (n_all - len(value))
    return [int(value)] * n_all


def _recurrent(arch: str, get: Any, n_layer: int, n_all: int) -> list[bool]:
    if arch in _DELTA_NETS:
        listed = get("attention.recurrent_layers", None)
        if isinstance(listed, list):
            return [bool(v) for v in listed] + [False] * (n_all - len(listed))
        every = int(get("full_attention_interval", 4)) or 4
        return [il < n_layer and (il + 1) % every != 0 for il in range(n_all)]
    if get("ssm.state_size"):
        kv = get("attention.head_count_kv", 0)
        return [(isinstance(kv, list) and il < len(kv) and kv[il] == 0) or not kv for il in range(n_all)]
    return [False] * n_all


def _windows(arch: str, get: Any, n_layer: int, n_all: int) -> list[int]:
    window = int(get("attention.sliding_window"))
    if not window or (arch not in _SWA and get("attention.sliding_window_pattern", None) is None):
        return [0] * n_all
    pattern = get("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        return [window if il < len(pattern) and pattern[il] else 0 for il in range(n_all)]
    every, dense_first = _SWA.get(arch, (int(pattern or 1), False))
    every = int(pattern) if isinstance(pattern, int) and not isinstance(pattern, bool) else every

    def slides(il: int) -> bool:
        if il >= n_layer:
            return False
        if every == 0:
            return True
        return il % every != 0 if dense_first else il % every < every - 1

    return [window if slides(il) else 0 for il in range(n_all)]


def _rows(tensors: list[Tensor], name: str) -> int:
    """Rows of the block's tensor of that name; 0 where it has none."""
    return next((t.shape[1] for t in tensors if t.name.endswith(f".{name}") and len(t.shape) > 1), 0)


def _active(tensor: Tensor, n_expert: int, n_used: int) -> int:
    """Bytes of a tensor that one token reads: of experts, those chosen."""
    if n_expert and "_exps" in tensor.name:
        return tensor.n_bytes * n_used // n_expert
    if ".nextn.embed_tokens" in tensor.name:
        return 0
    return tensor.n_bytes
