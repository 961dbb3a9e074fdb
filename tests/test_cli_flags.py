"""llama.cpp's names on `hydra up`: what each means here, and -ngl down to what llama.cpp does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydra import cli, config
from hydra.commands import translate, up
from hydra.errors import ConfigError, EngineError
from hydra.head import loading
from hydra.head.engine import Engine
from hydra.head.llama import Model, register_peer
from hydra.head.placement import verify
from hydra.head.spec import Endpoint, EngineSpec
from hydra.model_file import ModelFile
from hydra.peer.launch import start_peer
from tests.engine_support import PROMPTS, answers_of, ask, toy, toy_spec

MODEL = ModelFile(Path("m.gguf"), "qwen35", "m", 64, 1, 0, 0)
HEAD = """\
[model]
path = "m.gguf"
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
device = "CUDA0"
"""
PEER = """\
layers = 40
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
layers = 25
"""


@pytest.fixture
def given(monkeypatch, tmp_path, capsys):
    """Runs `hydra up ARGUMENTS` as far as the values that would be used."""
    file = tmp_path / "hydra.toml"
    file.write_text(HEAD)
    told: list[config.Config] = []
    monkeypatch.setattr(up, "run", lambda path, _node, overrides, **_: told.append(config.load(path, {}, overrides)))

    def run(*arguments: str) -> dict[str, Any]:
        code = cli.run(["up", "--config", str(file), *arguments])
        if code:
            return {"code": code, "err": capsys.readouterr().err}
        return told.pop().values()

    return run


@pytest.mark.parametrize(("arguments", "key", "want"), [
    (["-c", "8192"], "model.ctx_size", 8192), (["--ctx-size", "0"], "model.ctx_size", 0),
    (["-b", "512"], "model.batch_size", 512), (["-ub", "256"], "model.ubatch_size", 256),
    (["-ctk", "q8_0"], "model.cache_type_k", "q8_0"), (["-ctv", "q4_0"], "model.cache_type_v", "q4_0"),
    (["--cache-type-k", "q5_1"], "model.cache_type_k", "q5_1"), (["-fa", "off"], "model.flash_attn", "off"),
    (["-np", "4"], "model.parallel", 4), (["-t", "6"], "model.threads", 6), (["-t", "-1"], "model.threads", 0),
    (["--spec-draft-n-max", "5"], "mtp.draft_n_max", 5), (["--spec-draft-n-max", "0"], "mtp.enabled", False),
    (["--spec-draft-p-min", "0.4"], "mtp.draft_p_min", 0.4),
    (["--host", "0.0.0.0"], "head.api_host", "0.0.0.0"), (["--port", "9000"], "head.api_port", 9000),
    (["-ngl", "20"], "model.gpu_layers", 20), (["--n-gpu-layers", "0"], "model.gpu_layers", 0),
    (["--gpu-layers", "99"], "model.gpu_layers", 99), (["-ngl", "all"], "model.gpu_layers", "auto"),
    (["-ngl", "auto"], "model.gpu_layers", "auto"), (["-ngl", "-1"], "model.gpu_layers", "auto"),
])
def test_each_name(given, arguments, key, want):
    assert given(*arguments)[key] == want


def test_a_model_is_looked_for_from_where_one_types(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    assert given("-m", "models/x.gguf")["model.path"] == str(tmp_path.parent / "models/x.gguf")


@pytest.mark.parametrize("arguments", [["-ngl", "many"], ["-ctk", "q3_k"], ["-np", "0"], ["-ub", "4096"]])
def test_what_cannot_be_is_two_lines(given, arguments):
    got = given(*arguments)
    assert got["code"] == 2 and len(got["err"].splitlines()) == 2 and "command line" in got["err"].lower(), got


def load(tmp_path: Path, text: str, layers: int | str) -> config.Config:
    file = tmp_path / "hydra.toml"
    file.write_text(text)
    return config.load(file, {}, {"model.gpu_layers": layers})


@pytest.mark.parametrize(("layers", "want"), [("auto", -1), (66, -1), (99, -1), (65, 65), (20, 20), (0, 0)])
def test_ngl_of_a_single_box(tmp_path, layers, want):
    """64 layers, an MTP block and the output are 66, as llama.cpp counts."""
    spec = translate.engine_spec(load(tmp_path, HEAD, layers), MODEL)
    assert spec.n_gpu_layers == want
    spec.check()


def test_ngl_beside_a_split(tmp_path):
    assert translate.engine_spec(load(tmp_path, HEAD + PEER, 99), MODEL).n_gpu_layers == -1, "all is all"
    with pytest.raises(ConfigError, match=r"gpu_layers \(-ngl\) is 20 of 66 \(command line\), and there are p") as no:
        translate.engine_spec(load(tmp_path, HEAD + PEER, 20), MODEL)
    assert "nodes.mini.layers=N" in no.value.hint
    with pytest.raises(EngineError, match="n_gpu_layers"):
        EngineSpec("m", endpoints=(Endpoint("a", "b:1"),), n_gpu_layers=3).check()


@pytest.mark.parametrize(("layers", "on_device"), [(-1, 4), (6, 4), (5, 3), (4, 2), (2, 0), (0, 0)])
def test_llama_cpp_places_them_so(layers, on_device):
    """A peer stands in for a GPU: to llama.cpp both are devices. -ngl counts from the end: output, MTP, layers."""
    with start_peer(device="CPU", threads=1) as peer:
        device = register_peer(f"127.0.0.1:{peer.port}")
        with Model(toy("toy"), [device], [1.0], load_mtp=False, pipeline=False, use_extra_bufts=False,
                   n_gpu_layers=layers) as model:
            placed = [model.log.layers[il] for il in range(model.n_layer)]
            assert placed == ["CPU"] * (model.n_layer - on_device) + [device.name] * on_device
            whole = {"head": model.n_layer}
            assert verify(whole, model.log.layers, {device.name: "head", "CPU": "head"}, model.n_layer, "head") == whole


def test_an_answer_is_the_same_however_many_are_on_the_device(monkeypatch):
    with start_peer(device="CPU", threads=1) as peer:
        device = register_peer(f"127.0.0.1:{peer.port}")
        plain = answers_of(toy_spec(toy(), "none"), PROMPTS[:2])
        monkeypatch.setattr(loading, "local_devices", lambda _names: [device])
        for layers in (4, 0):
            with Engine(toy_spec(toy(), "none", n_gpu_layers=layers)) as engine:
                assert engine._loaded.layers == {"head": 4}, "all of them are the head's, wherever they lie"
                assert [a.tokens for a in ask(engine, PROMPTS[:2])] == [a.tokens for a in plain]
