"""hydra/commands/translate.py and `hydra peer --bind`: what each part is told, from what hydra.toml says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra import config
from hydra.commands import peer, translate
from hydra.errors import ConfigError, ModelError
from hydra.model_file import ModelFile

MODEL = ModelFile(Path("m.gguf"), "qwen35", "m", 64, 1, 0, 0)
TOML = """\
[model]
path = "m.gguf"
ctx_size = 65536
cache_type_k = "q8_0"
parallel = 4
[mtp]
draft_n_max = 2
adaptive = false
[head]
queue_max = 5
grace_s = 3
exact_resume = false
[link]
silence_s = 7
[peer]
max_connections = 2
allow = ["10.1.1.1"]
cache_dir = "weights"
cache_max_gib = 0.5
[[nodes]]
name = "tower"
role = "head"
host = "192.168.1.10"
layers = 40
device = "CUDA0"
[[nodes]]
name = "mini"
role = "peer"
host = "192.168.1.11"
layers = 25
device = "CUDA1"
"""


def load(tmp_path: Path, text: str = TOML) -> config.Config:
    file = tmp_path / "hydra.toml"
    file.write_text(text)
    return config.load(file, {})


def test_engine_spec(tmp_path):
    spec = translate.engine_spec(load(tmp_path), MODEL)
    assert spec.layers == {"tower": 39, "mini": 25} and spec.head == "tower"
    assert [(e.node, e.address) for e in spec.endpoints] == [("mini", "192.168.1.11:50052")]
    assert spec.devices == ("CUDA0",)
    assert (spec.ctx_size, spec.cache_type_k, spec.parallel) == (65536, "q8_0", 4)
    assert not spec.exact_resume
    assert (spec.draft.kind, spec.draft.n_max, spec.draft.adaptive) == ("auto", 2, False)
    spec.check()
    off = TOML.replace("[mtp]", "[mtp]\nenabled = false").replace('device = "CUDA0"\n', "")
    spec = translate.engine_spec(load(tmp_path, off), MODEL)
    assert spec.draft.kind == "none" and spec.devices == ()


def test_a_split_left_to_auto_is_left_to_the_engine(tmp_path):
    text = TOML.replace("= 40", '= "auto"').replace("= 25", '= "auto"')
    assert translate.engine_spec(load(tmp_path, text), MODEL).layers == {}
    assert translate.engine_spec(load(tmp_path, TOML.replace("= 40", '= "auto"')), MODEL).layers["tower"] == 39


def test_a_wrong_split_never_reaches_the_engine(tmp_path):
    with pytest.raises(ConfigError, match="does not add up"):
        translate.engine_spec(load(tmp_path, TOML.replace("= 25", "= 26")), MODEL)
    with pytest.raises(ModelError, match="does not exist"):
        translate.engine_spec(load(tmp_path))


def test_supervisor_settings_and_targets(tmp_path):
    cfg = load(tmp_path)
    got = translate.supervisor_settings(cfg)
    assert (got.queue_max, got.grace_s, got.silence_s, got.peer_wait_s) == (5, 3.0, 7.0, 300.0)
    assert [target.endpoint for target in translate.peer_targets(cfg)] == ["192.168.1.11:50052"]


def test_peer_settings(tmp_path):
    cfg = load(tmp_path)
    got = translate.peer_settings(cfg, cfg.node("mini"))
    assert (got.name, got.host, got.port, got.devices) == ("mini", "192.168.1.11", 50052, ("CUDA1",))
    assert got.allow == ("192.168.1.10", "192.168.1.11", "10.1.1.1"), "the nodes and what is allowed, nobody else"
    assert (got.max_connections, got.cache_max_bytes) == (2, 1 << 29)
    assert got.cache_dir == str(tmp_path / "weights") and got.config_digest == cfg.digest()
    assert (got.tls_dir, got.tls_nodes) == ("", ())
    cfg = load(tmp_path, TOML.replace("[link]", '[security]\ntls = true\ncert_dir = "certs"\n[link]'))
    got = translate.peer_settings(cfg, cfg.node("mini"))
    assert (got.tls_dir, got.tls_nodes) == (str(tmp_path / "certs"), ("tower", "mini"))
    cfg = load(tmp_path, TOML.replace('device = "CUDA1"', 'bind = "0.0.0.0"'))
    got = translate.peer_settings(cfg, cfg.node("mini"))
    assert got.host == "0.0.0.0" and got.devices == ("auto",)


def test_an_unresolvable_node_is_an_error_and_not_an_open_door(tmp_path, monkeypatch):
    names = {"tower.lan": frozenset({"10.0.0.9"})}
    monkeypatch.setattr(translate, "resolve", lambda host: names.get(host, frozenset()))
    cfg = load(tmp_path, TOML.replace("192.168.1.10", "tower.lan"))
    assert "10.0.0.9" in translate.allowed(cfg)
    with pytest.raises(ConfigError, match=r"'nowhere\.lan' of node tower does not resolve .*hydra\.toml line 23"):
        translate.allowed(load(tmp_path, TOML.replace("192.168.1.10", "nowhere.lan")))


@pytest.mark.parametrize(("text", "want"), [
    ("192.168.1.11:50060", ("192.168.1.11", 50060)), ("192.168.1.11", ("192.168.1.11", 50052)),
    (":50060", ("127.0.0.1", 50060)), ("[::1]:50060", ("::1", 50060)), ("::1", ("::1", 50052)),
    ("[::1]", ("::1", 50052)),
])
def test_bind(text, want):
    assert peer.split_bind(text) == want


@pytest.mark.parametrize("text", ["host:", "host:x", "host:70000"])
def test_bind_faults(text):
    with pytest.raises(ConfigError, match="no usable port"):
        peer.split_bind(text)
