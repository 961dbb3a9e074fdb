"""hydra/config.py: what is understood, which source wins, and one clear error for every fault."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hydra import config, keys
from hydra.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
GOOD = """\
[model]
path = "models/m.gguf"
ctx_size = 8192

[[nodes]]
name = "big"
role = "head"
host = "192.168.1.10"
layers = 40

[[nodes]]
name = "mini"
role = "peer"
host = "192.168.1.11"
layers = 25
"""


def load(tmp_path: Path, text: str = GOOD, env: dict | None = None, overrides: dict | None = None) -> config.Config:
    file = tmp_path / "hydra.toml"
    file.write_text(text)
    return config.load(file, env or {}, overrides)


def fault(tmp_path: Path, text: str = GOOD, env: dict | None = None, overrides: dict | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env, overrides)
    assert caught.value.hint, "every fault says what to do"
    assert "\n" not in str(caught.value)
    return caught.value


def test_good_file(tmp_path):
    got = load(tmp_path)
    assert got.model.ctx_size == 8192 and got.model.ubatch_size == 512
    assert got.model.path == str(tmp_path / "models/m.gguf"), "relative paths count from the file"
    assert got.head_node.name == "big" and [n.name for n in got.peers] == ["mini"]
    assert got.node("mini").endpoint == "192.168.1.11:50052"
    assert got.head.api_host == "127.0.0.1" and got.node("mini").bind == ""
    with pytest.raises(ConfigError, match="no node 'minni'") as caught:
        got.node("minni")
    assert "Did you mean mini?" in caught.value.hint


@pytest.mark.parametrize(("old", "new", "line", "words", "hint"), [
    ("ctx_size", "ctx_siz", 3, "no key 'ctx_siz'", "ctx_size"),
    ("[model]", "[modle]", 1, "[modle] is not a table", "model"),
    ("8192", '"8192"', 3, "ctx_size must be a whole number, not '8192'", ""),
    ("8192", "true", 3, "ctx_size must be a whole number, not true", ""),
    ("8192", "-1", 3, "at least 0, not -1", ""),
    ("8192", "[1]", 3, "not a list", ""),
    ('ctx_size = 8192', 'cache_type_k = "q8"', 3, "cache_type_k must be one of", "q8_0"),
    ('ctx_size = 8192', 'flash_attn = "yes"', 3, "flash_attn must be one of on, off, auto", ""),
    ('ctx_size = 8192', 'use_extra_bufts = 1', 3, "must be true or false", ""),
    ('ctx_size = 8192', 'ubatch_size = 4096', 3, "ubatch_size 4096 is larger than batch_size 2048", ""),
    ('ctx_size = 8192', 'flash_attn = false\ncache_type_v = "q8_0"', 4, "needs flash attention", "flash_attn"),
    ('"models/m.gguf"', '""', 2, "path must be given", ""),
    ('path = "models/m.gguf"', "", 1, "lacks the key 'path'", "path ="),
    ('"mini"', '"big"', 12, "Two nodes have the name 'big'", "line 6"),
    ('"mini"', '"mi ni"', 12, "not a usable name", ""),
    ('role = "peer"', 'role = "head"', 13, "Two nodes have role", "peer"),
    ('role = "peer"', 'role = "pier"', 13, "role must be one of head, peer", "peer"),
    ('role = "peer"', "", 11, "lacks the key 'role'", ""),
    ("layers = 25", "layers = -25", 15, "layers must be at least 0, not -25", ""),
    ("layers = 25", 'layers = "some"', 15, 'a whole number or "auto"', ""),
    ("layers = 25", "layer = 25", 15, "no key 'layer'", "layers"),
    ("layers = 25", "port = 0", 15, "port must be at least 1", ""),
    ("layers = 40", "port = 50052", 9, "port is a key of peers", "api_port"),
    ('"192.168.1.11"', '"http://192.168.1.11"', 14, "is not an address", "http"),
    ('"192.168.1.11"', '"192.168.1.11:50052"', 14, "has a port in it", "port = 50052"),
    ('"192.168.1.11"', '"0.0.0.0"', 14, "not the address of a box", "bind"),
    ('ctx_size = 8192', '[peer]\nallow = ["192.168.1.x"]', 4, "no IP address", "192.168.1.20"),
    ('ctx_size = 8192', '[mtp]\ndraft_n_max = 99', 4, "at most 16, not 99", ""),
    ('ctx_size = 8192', '[mtp]\ndraft_p_min = nan', 4, "must be a number", ""),
    ('ctx_size = 8192', '[head]\ncors_origins = "x"', 4, "a list of texts", ""),
])
def test_each_fault_names_its_key_line_and_mend(tmp_path, old, new, line, words, hint):
    assert old in GOOD
    error = fault(tmp_path, GOOD.replace(old, new, 1))
    assert words in error.message
    assert f"hydra.toml line {line}" in error.message
    assert hint in str(error)


def test_no_head_and_no_nodes(tmp_path):
    assert 'no node has role = "head" (nodes: big, mini)' in fault(tmp_path, GOOD.replace('"head"', '"peer"')).message
    assert "has no nodes" in fault(tmp_path, GOOD.split("[[nodes]]")[0]).message
    assert "must be a list of tables" in fault(tmp_path, '[model]\npath="m"\n[nodes]\nname="x"').message
    assert "model must be a table" in fault(tmp_path, "model = 3").message


def test_one_address_twice(tmp_path):
    third = '\n[[nodes]]\nname = "third"\nrole = "peer"\nhost = "192.168.1.11"\n'
    error = fault(tmp_path, GOOD + third)
    assert "192.168.1.11:50052 is used twice: by node third and by node mini" in error.message
    assert load(tmp_path, GOOD + third + "port = 50053\n").node("third").port == 50053
    same = GOOD.replace('host = "192.168.1.11"', 'host = "localhost"\nport = 8080')
    assert "the API of big" in fault(tmp_path, same).message


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        config.load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes(b'[model]\npath = "\xe9"\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load(tmp_path / "latin.toml", {})
    error = fault(tmp_path, "[model]\npath = models/m.gguf\n")
    assert "not valid TOML" in error.message and "line 2" in error.message


def test_find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match=r"no hydra\.toml \(looked at hydra\.toml, .*home/\.config/hydra/hydra\.toml"):
        config.find(env={})
    (tmp_path / "hydra.toml").write_text(GOOD)
    assert config.find(env={}) == Path("hydra.toml")
    assert config.find(env={"HYDRA_CONFIG": "/elsewhere.toml"}) == Path("/elsewhere.toml")
    assert config.find("/named.toml", {"HYDRA_CONFIG": "/elsewhere.toml"}) == Path("/named.toml")


def test_precedence_and_origin(tmp_path):
    env = {"HYDRA_MODEL_CTX_SIZE": "4096", "HYDRA_MODEL_UBATCH_SIZE": "256", "HYDRA_NODES_MINI_LAYERS": "auto",
           "HYDRA_HEAD_CORS_ORIGINS": "http://a, http://b", "HYDRA_MTP_ENABLED": "off", "HYDRA_PEER_MESSAGE_S": "2.5",
           "HYDRA_MODEL_FLASH_ATTN": "1"}
    got = load(tmp_path, env=env, overrides={"model.ctx_size": 1024, "nodes.big.layers": "64", "model.threads": None})
    assert (got.model.ctx_size, got.model.ubatch_size, got.model.batch_size) == (1024, 256, 2048)
    assert (got.node("big").layers, got.node("mini").layers) == (64, "auto")
    assert got.head.cors_origins == ("http://a", "http://b") and got.mtp.enabled is False and got.peer.message_s == 2.5
    assert got.model.flash_attn == "on"
    assert got.origins["model.ctx_size"] == "command line"
    assert got.origins["model.ubatch_size"] == "HYDRA_MODEL_UBATCH_SIZE"
    assert got.origins["model.batch_size"] == got.origins["model.threads"] == "default"
    assert got.origins["model.path"] == "hydra.toml line 2"
    assert got.origins["nodes.mini.layers"] == "HYDRA_NODES_MINI_LAYERS"
    assert set(got.origins) == set(got.values()), "every value has an origin"


def test_environment_faults(tmp_path):
    assert "environment: HYDRA_MODEL_CTX_SIZE must be a whole number, not '4k'" in fault(
        tmp_path, env={"HYDRA_MODEL_CTX_SIZE": "4k"}).message
    assert "HYDRA_MODEL_CTX_SIZE" in fault(tmp_path, env={"HYDRA_MODEL_CTX_SIZ": "4"}).hint
    assert "HYDRA_MODEL_CTX_SIZE" in fault(tmp_path, env={"HYDRA_MODLE_CTX_SIZE": "4"}).hint
    assert "HYDRA_NODES_MINI_LAYERS" in fault(tmp_path, env={"HYDRA_NODES_MINY_LAYERS": "4"}).hint
    load(tmp_path, env={"HYDRA_FULL_ERROR": "1", "HYDRA_NODE": "big"})


def test_command_line_faults(tmp_path):
    error = fault(tmp_path, overrides={"model.ctx_sise": 1})
    assert "no key 'model.ctx_sise'" in error.message and "model.ctx_size" in error.hint
    error = fault(tmp_path, overrides={"model.ctx_size": -4})
    assert "command line: model.ctx_size must be at least 0" in error.message


def test_secrets_are_masked(tmp_path):
    got = load(tmp_path, GOOD.replace("[[nodes]]", '[head]\napi_key = "hush"\n[[nodes]]', 1))
    assert "hush" not in str(got.values().values())
    assert got.values(secrets=True)["head.api_key"] == "hush"


def test_digest(tmp_path):
    base = load(tmp_path).digest()
    assert re.fullmatch("[0-9a-f]{16}", base)
    assert load(tmp_path, "# a comment\n" + GOOD).digest() == base
    assert load(tmp_path, GOOD.replace("models/m.gguf", "/other/m.gguf")).digest() == base, "paths differ between boxes"
    assert load(tmp_path, env={"HYDRA_HEAD_API_KEY": "x"}).digest() == base, "a secret must not leak by its hash"
    assert load(tmp_path, GOOD.replace("25", "24")).digest() != base
    blocks = GOOD.split("[[nodes]]")
    assert load(tmp_path, "[[nodes]]".join([blocks[0], blocks[2] + "\n", blocks[1]])).digest() == base


@pytest.mark.parametrize(("head", "peer", "n_layer", "n_nextn", "want"), [
    ("40", "25", 65, 0, {"big": 40, "mini": 25}),
    ("40", "25", 64, 1, {"big": 39, "mini": 25}),
    ("39", "25", 64, 1, {"big": 39, "mini": 25}),
    ('"auto"', "25", 64, 1, {"big": 39, "mini": 25}),
    ("0", '"auto"', 18, 0, {"big": 0, "mini": 18}),
])
def test_check_split(tmp_path, head, peer, n_layer, n_nextn, want):
    got = load(tmp_path, GOOD.replace("= 40", f"= {head}").replace("= 25", f"= {peer}"))
    assert config.check_split(got, n_layer, n_nextn) == want


@pytest.mark.parametrize(("head", "peer", "n_layer", "n_nextn", "words"), [
    ("40", "25", 64, 0, "40 on big + 25 on mini = 65, the model has 64 layers (big: hydra.toml line 9; "),
    ("40", "20", 64, 1, "= 60, the model has 64 layers (or 65 with its MTP block, counted on big)"),
    ("0", "65", 64, 1, "does not add up"),
    ('"auto"', "65", 64, 0, "more layers than the model: 65 on mini = 65, the model has 64"),
    ('"auto"', '"auto"', 64, 0, "auto on big and mini"),
])
def test_check_split_faults(tmp_path, head, peer, n_layer, n_nextn, words):
    got = load(tmp_path, GOOD.replace("= 40", f"= {head}").replace("= 25", f"= {peer}"))
    with pytest.raises(ConfigError) as caught:
        config.check_split(got, n_layer, n_nextn)
    assert words in caught.value.message and caught.value.hint


def test_lines_of_unusual_but_valid_toml(tmp_path):
    text = GOOD.replace("[model]", 'mtp.draft_n_max = 2\nhead = {api_port = 9000}\n[model]')
    text = text.replace("ctx_size = 8192", "cache_type_k = '''\nctx_size = 1'''")
    error = fault(tmp_path, text)
    assert "hydra.toml line 5" in error.message and "cache_type_k" in error.message
    got = load(tmp_path, text.replace("'''\nctx_size = 1'''", "'q8_0'"))
    assert got.mtp.draft_n_max == 2 and got.head.api_port == 9000
    assert got.origins["mtp.draft_n_max"] == "hydra.toml line 1"
    assert got.origins["head.api_port"] == "hydra.toml line 2"


def test_example_describes_the_reference_rig():
    got = config.load(ROOT / "hydra.toml.example", {})
    assert (got.head_node.layers, got.peers[0].layers) == (40, 25)
    assert (got.model.ctx_size, got.model.cache_type_k, got.model.cache_type_v) == (65536, "q8_0", "q8_0")
    assert (got.model.flash_attn, got.model.ubatch_size, got.mtp.draft_n_max) == ("on", 512, 3)
    assert config.check_split(got, 64, 1) == {"tower": 39, "mini": 25}


def test_example_shows_every_key_with_its_default(tmp_path):
    """Each key of each table stands in the example, with a comment; a line `# key = value` shows the default."""
    text = (ROOT / "hydra.toml.example").read_text()
    bare = tmp_path / "bare.toml"
    bare.write_text('[model]\npath = "m"\n[[nodes]]\nname = "n"\nrole = "head"\nhost = "h"\n')
    defaults = config.load(bare, {})
    for table, cls in {**keys.TABLES, "nodes": keys.NodeConfig}.items():
        head = f"[[{table}]]" if table == "nodes" else f"[{table}]"
        body = text.split(f"\n{head}\n", 1)[1]
        if table != "nodes":
            body = re.split(r"\n\[", body)[0]
        for name in keys.keys_of(cls):
            assert re.search(rf"(?m)^(# )?{name} = ", body), f"{head} {name} is missing from hydra.toml.example"
            shown = re.search(rf'(?m)^# {name} = ("[^"]*"|\[\]|\S+)', body)
            if shown:
                value = getattr(defaults.nodes[0] if table == "nodes" else getattr(defaults, table), name)
                got = tomllib.loads(f"x = {shown[1]}")["x"]
                want = Path(got).expanduser() if str(got).startswith("~") else tuple(got) if got == [] else got
                assert str(want) == str(value) and type(got) in (type(value), list), name


def test_a_clash_names_where_the_newcomer_came_from(tmp_path):
    file = tmp_path / "hydra.toml"
    file.write_text('[model]\npath = "m"\nubatch_size = 512\n[[nodes]]\nname = "a"\nrole = "head"\nhost = "h"\n')
    for env, given, want in (({}, {"model.batch_size": "256"}, "command line: "),
                             ({"HYDRA_MODEL_BATCH_SIZE": "256"}, {}, "HYDRA_MODEL_BATCH_SIZE: ")):
        with pytest.raises(ConfigError) as caught:
            config.load(file, env, given)
        assert caught.value.message.startswith(f"{want}[model] ubatch_size 512 is larger than batch_size 256")
