"""Synthetic models: what is written is what was asked, they load, and they say what they were made to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hydra.bench import synthetic
from hydra.bench.synthetic import SHAPES, language, n_bytes, random_blocks
from hydra.errors import ModelError
from hydra.head.engine import Engine
from tests.engine_support import ask, toy, toy_language, toy_spec


@pytest.mark.parametrize("name", ["toy", "toy-llama", "toy-gemma"])
def test_they_load_and_speak(name: str) -> None:
    with Engine(toy_spec(toy(name))) as engine:
        assert engine.vocab.tokenize("Grüße, 你好!\n") == list("Grüße, 你好!\n".encode())
        assert engine.vocab.detokenize(engine.vocab.tokenize("Grüße  with two spaces")) == "Grüße  with two spaces"
        (answer,) = ask(engine, ["Hello\n"], max_tokens=96)
    assert answer.tokens == toy_language(name=name).say(10, 96)
    assert sorted(answer.tokens) == sorted(synthetic._CYCLE)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_the_share_of_right_guesses(acceptance: float) -> None:
    words = language(SHAPES["toy"], acceptance)
    right = sum(words.guess[t] == words.successor[t] for t in synthetic._CYCLE) / len(synthetic._CYCLE)
    assert right == pytest.approx(acceptance, abs=0.006)
    assert sorted(words.successor) == list(range(SHAPES["toy"].n_vocab))


@pytest.mark.parametrize("quant", ["q8_0", "q4_K", "q5_K", "q6_K", "f16", "f32"])
def test_random_blocks_are_weights(quant: str) -> None:
    """Decoded by gguf's own code they are finite, centred and of the deviation asked for."""
    from gguf import GGMLQuantizationType, quants

    data = random_blocks(np.random.default_rng(1), 256 * 400, quant, 0.02)
    assert len(data) == n_bytes((400, 256), quant)
    kind = getattr(GGMLQuantizationType, quant.upper() if quant[-1] != "K" else quant[:-1].upper() + "K")
    raw = np.frombuffer(data, {"f32": np.float32, "f16": np.float16}.get(quant, np.uint8))
    values = quants.dequantize(raw.reshape(400, -1), kind)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.004
    assert 0.01 < values.std() < 0.04


@pytest.mark.parametrize("quant", ["q8_0", "q4_K", "q5_K", "q6_K", "f16"])
def test_quantised_models_are_exact_too(quant: str, tmp_path: Path) -> None:
    path = synthetic.model("toy", acceptance=0.7, quant=quant, directory=tmp_path)
    with Engine(toy_spec(str(path), "mtp", 3)) as engine:
        (answer,) = ask(engine, ["abc"], max_tokens=96)
    assert answer.tokens == toy_language().say(ord("c"), 96)
    assert 0 < answer.stats["accepted"] < answer.stats["drafted"]


def test_sizes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    path = synthetic.model("toy", directory=tmp_path)
    assert 0 <= path.stat().st_size - synthetic.size_bytes(SHAPES["toy"]) < 64 << 10
    assert 18e9 < synthetic.size_bytes(SHAPES["27b"]) < 23e9
    asked: list[tuple[str, int]] = []

    def refuse(where: str, size: int) -> bool:
        asked.append((where, size))
        return False

    with pytest.raises(ModelError, match=r"GB"):
        synthetic.model("27b", directory=tmp_path, confirm=refuse)
    assert not asked or asked[0][1] == synthetic.size_bytes(SHAPES["27b"])  # a small disk is refused without asking
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_a_made_model_is_kept(tmp_path: Path) -> None:
    first = synthetic.model("toy-llama", directory=tmp_path)
    stamp = first.stat().st_mtime_ns
    assert synthetic.model("toy-llama", directory=tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert synthetic.model("toy-llama", directory=tmp_path, seed=2) != first
    with pytest.raises(ModelError, match="no synthetic model"):
        synthetic.model("13b", directory=tmp_path)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.build(tmp_path / "x.gguf", SHAPES["toy"], progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_big_shapes_are_the_real_ones() -> None:
    big = SHAPES["27b"]
    assert (big.n_layer, big.n_nextn, big.n_embd, big.n_ff, big.n_head, big.n_head_kv, big.head_dim,
            big.full_attn_interval) == (64, 1, 5120, 17408, 24, 4, 256, 4)
