"""hydra/plan: predicted bytes against what llama.cpp really allocates, for several architectures and settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hydra.bench import synthetic
from hydra.head import loading
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec
from hydra.peer.launch import start_peer
from hydra.plan import graph, speed
from hydra.plan.gguf import Header, read_header
from hydra.plan.memory import Place, Setting, node_bytes, step_of
from hydra.plan.shape import Shape, shape_of

PLAIN = Setting(draft=False)
TOLERANCE = 0.03  # of what a node holds in all, of its weights and of its caches
COMPUTE_TOLERANCE = 0.1  # where a hole is left decides a few percent of a buffer that is small beside the rest


@pytest.fixture(scope="module")
def peer():
    with start_peer(device="CPU", threads=1) as process:
        yield f"127.0.0.1:{process.port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@dataclass(frozen=True)
class Case:
    """A model, what differs from the defaults, and the peer's layers (0 = no peer)."""

    model: str
    on_peer: int = 0
    setting: Setting = PLAIN

    def __str__(self) -> str:
        s = self.setting
        words = [self.model, f"{s.ctx_size}", s.type_k, "fa" if s.flash else "no-fa", f"ub{s.ubatch_size}"]
        words += [f"mtp{s.n_max}"] if s.draft else []
        words += [f"np{s.parallel}"] if s.parallel > 1 else []
        return "-".join([*words, f"peer{self.on_peer}"])


MTP = Setting()
CASES = [
    Case("toy-llama"), Case("toy-llama", 2), Case("toy-llama", 4), Case("toy-llama", 0),
    Case("toy-llama", 1, replace(PLAIN, flash=False)), Case("toy-llama", 3, replace(PLAIN, ctx_size=2000, type_k="q8_0",
                                                                                    type_v="q8_0")),
    Case("toy-llama", 2, replace(PLAIN, parallel=2)), Case("toy-llama", 2, replace(PLAIN, ubatch_size=64)),
    Case("toy-gemma", 0), Case("toy-gemma", 3), Case("toy-gemma", 5, replace(PLAIN, flash=False)),
    Case("toy-gemma", 2, replace(PLAIN, type_k="q4_0", type_v="q4_0")),
    Case("toy", 0), Case("toy", 2), Case("toy", 2, MTP), Case("toy", 3, replace(MTP, n_max=1)),
    Case("toy", 1, replace(MTP, parallel=2)), Case("toy", 4, replace(MTP, type_k="q8_0", type_v="q8_0", ctx_size=8192)),
]


def path_of(case: Case, folder: Path) -> Path:
    if case.model == "embedded":
        from hydra.embedded import embedded_model

        return embedded_model().path
    return synthetic.model(case.model, directory=folder)


def mapped_bytes(header: Header, shape: Shape, span: tuple[int, int], mtp: bool) -> int:
    """A CPU head maps its file from its first tensor to its last, a peer's layers between them included."""
    ours = set(range(*span)) | ({layer.index for layer in shape.layers if layer.mtp} if mtp else set())
    tensors = [t for name, t in header.tensors.items()
               if not name.startswith("blk.") or int(name.split(".")[1]) in ours]
    return max(t.offset + t.n_bytes for t in tensors) - min(t.offset for t in tensors)


def compare(case: Case, path: Path, peer: str) -> None:
    s = case.setting
    spec = EngineSpec(
        str(path), endpoints=(Endpoint("mini", peer),) if case.on_peer else (),
        layers={"mini": case.on_peer} if case.on_peer else {}, ctx_size=s.ctx_size, batch_size=s.batch_size,
        ubatch_size=s.ubatch_size, cache_type_k=s.type_k, cache_type_v=s.type_v, flash_attn="on" if s.flash else "off",
        parallel=s.parallel, threads=1, use_extra_bufts=False,
        draft=DraftSpec("mtp" if s.draft else "none", s.n_max))
    loaded = loading.load(spec)
    real = {node: dict(use) for node, use in loaded.memory_use.items()}
    loaded.close()
    header = read_header(path)
    shape = shape_of(header)
    spans = {"head": (case.on_peer, shape.n_layer)}
    if case.on_peer:
        spans["mini"] = (0, case.on_peer)
    for name, span in spans.items():
        found, want = node_bytes(shape, s, Place(name, name == "head", False), span), real[name]
        parts = {"context": found.kv + found.state, "compute": found.compute}
        weights = found.weights
        if name == "head":
            weights = mapped_bytes(header, shape, span, s.draft)
            assert weights >= found.weights - 64 * len(header.tensors), "what is needed lies in what is mapped"
            if s.drafts(shape):
                drafted = want["draft_context"] + want["draft_compute"]
                assert found.draft == pytest.approx(drafted, rel=COMPUTE_TOLERANCE), (name, found, want)
        assert weights == pytest.approx(want["model"], rel=TOLERANCE), (name, found, want)
        for part, size in parts.items():
            tolerance = COMPUTE_TOLERANCE if part == "compute" else TOLERANCE
            assert size == pytest.approx(want[part], rel=tolerance), (name, part, found, want)
        if "checkpoints" in want:
            assert found.kept == pytest.approx(want["checkpoints"], rel=TOLERANCE, abs=16384), (name, found, want)
        total = weights + sum(parts.values()) + (found.draft if name == "head" else 0)
        real_total = sum(want[part] for part in ("model", "context", "compute", "draft_context", "draft_compute"))
        assert total == pytest.approx(real_total, rel=TOLERANCE), (name, found, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_is_what_llama_cpp_allocates(case, folder, peer):
    compare(case, path_of(case, folder), peer)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("tiny", 6, Setting(ctx_size=8192, type_k="q8_0", type_v="q8_0"))], ids=str)
def test_a_larger_model(case, folder, peer):
    compare(case, path_of(case, folder), peer)


@pytest.mark.model
@pytest.mark.parametrize("case", [
    Case("embedded"), Case("embedded", 9), Case("embedded", 14, replace(PLAIN, flash=False, ctx_size=2048)),
    Case("embedded", 5, replace(PLAIN, type_k="q8_0", type_v="q8_0", parallel=2)),
], ids=str)
def test_the_embedded_model(case, folder, peer):
    compare(case, path_of(case, folder), peer)


# ---- as measured on a card -------------------------------------------------------------------------------------------

# One NVIDIA H200 (ggml 0.25.3, CUDA), a hydra peer on loopback and the head on the same card: layers on the peer, node,
# then bytes of weights, caches and states, compute buffers (the head's own memory included), draft context, tok/s.
MEASURED = [
    ("dense", 6, "mini", 1_390_608_384, 201_326_592, 121_645_056, 0, 282.1),
    ("dense", 6, "head", 2_888_122_368, 335_544_320, 146_823_328, 0, 282.1),
    ("dense", 0, "head", 4_278_730_752, 536_870_912, 146_823_328, 0, 401.4),
    ("hybrid", 6, "mini", 1_574_315_008, 136_675_328, 251_953_280, 0, 204.5),
    ("hybrid", 6, "head", 3_994_874_880, 305_430_528, 306_776_384, 367_595_680, 204.5),
    ("hybrid", 0, "head", 5_569_189_888, 442_105_856, 306_776_384, 367_595_680, 285.5),
    ("gemma", 7, "mini", 702_191_616, 104_857_600, 95_963_136, 0, 317.3),
    ("gemma", 7, "head", 1_459_970_048, 190_840_832, 124_819_616, 0, 317.3),
]
CARD_SHAPES = {
    "dense": synthetic.Shape("dense", "llama", 16, 4096, 14336, 32, 8, 128, 65536, 32768, "q8_0"),
    "hybrid": replace(synthetic.SHAPES["27b"], name="hybrid", n_layer=16, n_vocab=65536),
    "gemma": synthetic.Shape("gemma", "gemma3", 18, 2560, 10240, 8, 4, 256, 65536, 32768, "q8_0", n_swa=1024),
}
CARD_SETTINGS = {"dense": Setting(8192, draft=False), "gemma": Setting(16384, draft=False),
                 "hybrid": Setting(32768, type_k="q8_0", type_v="q8_0")}
# What `hydra bench device` measured there for the type of the weights.
CARD_BANDWIDTH = {"dense": 3130e9, "gemma": 3130e9, "hybrid": 2177e9}


# Drafting three tokens each time, of which 0.2406 were right.
MEASURED_MTP = [(0, 236.3), (6, 165.0)]


def end_in_a_hole(writer: Any, path: Path, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
    """Ends a file with these tensors (name, shape, type): all zero, and taking no room on the disk."""
    import os

    import gguf
    import numpy as np

    size = 0
    for name, shape, quant in tensors:
        count = synthetic.n_bytes(shape, quant)
        kind = gguf.GGMLQuantizationType[quant.upper()]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count, raw_dtype=kind)
        size += count + -count % 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + size + 64)


@pytest.fixture(scope="module")
def card_shapes(tmp_path_factory):
    """The shapes of those models, from files that are a header and a hole."""
    import gguf

    found = {}
    for name, shape in CARD_SHAPES.items():
        path = tmp_path_factory.mktemp("headers") / f"{name}.gguf"
        writer = gguf.GGUFWriter(str(path), shape.arch)
        synthetic._metadata(writer, shape, 0.7, False)
        end_in_a_hole(writer, path, ((t.name, t.shape, t.quant) for t in synthetic._plan(shape, False, 0.7, 1)))
        found[name] = shape_of(read_header(path))
    return found


@pytest.mark.parametrize(("name", "on_peer", "node", "weights", "context", "compute", "draft", "tps"), MEASURED)
def test_as_measured_on_a_card(card_shapes, name, on_peer, node, weights, context, compute, draft, tps):
    shape, setting, is_head = card_shapes[name], CARD_SETTINGS[name], node == "head"
    span = (on_peer, shape.n_layer) if is_head else (0, on_peer)
    found = node_bytes(shape, setting, Place(node, is_head, True), span)
    host = graph.input_bytes(shape, step_of(shape, setting)) if is_head else 0
    assert found.weights + (shape.embed_bytes if is_head else 0) == pytest.approx(weights, rel=0.001)
    assert found.kv + found.state == pytest.approx(context, rel=0.001)
    assert found.compute + host == pytest.approx(compute, rel=0.01)
    if draft:  # its mask and hidden rows lie in the head's own memory
        assert found.draft == pytest.approx(draft - 2 * 32768 * 512 - 4 * 5120 * 512, rel=0.01)


@pytest.mark.parametrize(("name", "on_peer", "tps"), sorted({(row[0], row[1], row[-1]) for row in MEASURED}))
def test_decode_as_measured_on_a_card(card_shapes, name, on_peer, tps):
    shape, setting = card_shapes[name], replace(CARD_SETTINGS[name], draft=False)
    places = [Place("mini", False, True, 0, CARD_BANDWIDTH[name]), Place("head", True, True, 0, CARD_BANDWIDTH[name])]
    found = speed.predict(shape, setting, places, {"mini": on_peer, "head": shape.n_layer - on_peer}, depth=356,
                          link_s=0.15e-3, wire_bytes_s=2.9e9)  # the link as the doctor measured it there
    assert found is not None and found.tokens_per_s == pytest.approx(tps, rel=0.15)


@pytest.mark.parametrize(("on_peer", "tps"), MEASURED_MTP)
def test_mtp_as_measured_on_a_card(card_shapes, on_peer, tps):
    shape, bandwidth = card_shapes["hybrid"], CARD_BANDWIDTH["hybrid"]
    places = [Place("mini", False, True, 0, bandwidth), Place("head", True, True, 0, bandwidth)]
    found = speed.predict(shape, CARD_SETTINGS["hybrid"], places, {"mini": on_peer, "head": 16 - on_peer}, depth=356,
                          acceptance=0.2406, link_s=0.15e-3, wire_bytes_s=2.9e9)
    assert found is not None and found.mtp_tokens_per_s == pytest.approx(tps, rel=0.15)


# ---- other architectures: a header and a hole is enough for llama.cpp's own estimate ---------------------------------


def sparse_model(path: Path, arch: str, meta: dict[str, int], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A model of q8_0 matrices and f32 vectors, all zero, that takes no room on the disk."""
    import gguf

    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in meta.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 1e6)
    synthetic._vocabulary(writer, replace(synthetic.SHAPES["toy-llama"], n_vocab=1024))
    end_in_a_hole(writer, path, (
        (name, shape, "f32" if len(shape) == 1 or "gate_inp" in name else "q8_0") for name, shape in tensors.items()
    ))
    return path


def dense_tensors(n_layer: int, d: int, ff: int, heads: int, kv: int, head: int, *, qk_norm: bool = False,
                  bias: bool = False, gate: bool = True) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (1024, d), "output_norm.weight": (d,),
                                         "output.weight": (1024, d)}
    for il in range(n_layer):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,), "attn_q": (heads * head, d), "attn_k": (kv * head, d), "attn_v": (kv * head, d),
            "attn_output": (d, heads * head), "ffn_norm": (d,), "ffn_up": (ff, d), "ffn_down": (d, ff)}
        if gate:
            block["ffn_gate"] = (ff, d)
        if qk_norm:
            block |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        found |= {f"blk.{il}.{name}.weight": shape for name, shape in block.items()}
        if bias:
            sizes = {"q": heads, "k": kv, "v": kv}
            found |= {f"blk.{il}.attn_{name}.bias": (size * head,) for name, size in sizes.items()}
    return found


def expert_tensors(n_layer: int, d: int, ff: int, experts: int, heads: int, kv: int, head: int, *, shared: int = 0,
                   qk_norm: bool = True, bias: bool = False) -> dict[str, tuple[int, ...]]:
    found = dense_tensors(n_layer, d, ff, heads, kv, head, qk_norm=qk_norm, bias=bias)
    for il in range(n_layer):
        for name in ("ffn_up", "ffn_gate", "ffn_down"):
            del found[f"blk.{il}.{name}.weight"]
        found |= {f"blk.{il}.ffn_gate_inp.weight": (experts, d), f"blk.{il}.ffn_up_exps.weight": (experts, ff, d),
                  f"blk.{il}.ffn_gate_exps.weight": (experts, ff, d),
                  f"blk.{il}.ffn_down_exps.weight": (experts, d, ff)}
        if shared:
            found |= {f"blk.{il}.ffn_gate_inp_shexp.weight": (d,), f"blk.{il}.ffn_up_shexp.weight": (shared, d),
                      f"blk.{il}.ffn_gate_shexp.weight": (shared, d), f"blk.{il}.ffn_down_shexp.weight": (d, shared)}
    return found


def numbers(n_layer: int, d: int, ff: int, heads: int, kv: int, head: int, **more: int) -> dict[str, int]:
    return {"block_count": n_layer, "context_length": 32768, "embedding_length": d, "feed_forward_length": ff,
            "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": head,
            "attention.value_length": head, "rope.dimension_count": head, **more}


OTHERS = {
    "qwen3": ("qwen3", numbers(6, 1024, 3072, 16, 8, 128), dense_tensors(6, 1024, 3072, 16, 8, 128, qk_norm=True)),
    "qwen2": ("qwen2", numbers(6, 1024, 2816, 16, 2, 64), dense_tensors(6, 1024, 2816, 16, 2, 64, bias=True)),
    "qwen3moe": ("qwen3moe", numbers(4, 1024, 4096, 16, 4, 128, expert_count=16, expert_used_count=4,
                                     expert_feed_forward_length=512),
                 expert_tensors(4, 1024, 512, 16, 16, 4, 128)),
    "qwen2moe": ("qwen2moe", numbers(4, 1024, 4096, 16, 16, 64, expert_count=16, expert_used_count=4,
                                     expert_feed_forward_length=512, expert_shared_feed_forward_length=2048),
                 expert_tensors(4, 1024, 512, 16, 16, 16, 64, shared=2048, qk_norm=False, bias=True)),
}


@pytest.mark.parametrize("setting", [PLAIN, replace(PLAIN, ctx_size=8192, type_k="q8_0", type_v="q8_0"),
                                     replace(PLAIN, flash=False, ubatch_size=256)],
                         ids=["f16", "q8_0", "no-fa"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(tmp_path, name, setting):
    arch, meta, tensors = OTHERS[name]
    path = sparse_model(tmp_path / "m.gguf", arch, meta, tensors)
    s = setting
    spec = EngineSpec(str(path), ctx_size=s.ctx_size, ubatch_size=s.ubatch_size, cache_type_k=s.type_k,
                      cache_type_v=s.type_v, flash_attn="on" if s.flash else "off", threads=1, use_extra_bufts=False,
                      draft=DraftSpec("none"))
    place = loading.find_devices(spec, loading.read_shape(str(path)))
    real = loading.estimate(spec, place).by_node["head"]
    shape = shape_of(read_header(path))
    found = node_bytes(shape, s, Place("head", True, False), (0, shape.n_layer))
    assert found.weights == pytest.approx(real.model, rel=TOLERANCE)
    assert found.kv == pytest.approx(real.context, rel=TOLERANCE)
    assert found.compute == pytest.approx(real.compute, rel=COMPUTE_TOLERANCE)
    total = found.weights + found.kv + found.compute
    assert total == pytest.approx(real.model + real.context + real.compute, rel=TOLERANCE)
