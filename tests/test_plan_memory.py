"""hydra/plan: predicted bytes against what llama.cpp really allocates, for several architectures and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hydra.bench import synthetic
from hydra.head import loading
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec
from hydra.peer.launch import start_peer
from hydra.plan.gguf import Header, read_header
from hydra.plan.memory import Place, Setting, node_bytes
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
