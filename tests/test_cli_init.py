"""`hydra init`: a usable file with every comment, from flags or answers, and nothing overwritten unasked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hydra import cli, config
from hydra.commands import init
from hydra.errors import ConfigError


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = cli.run(["init", *arguments])
    return code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "this_card", lambda: ("RTX 5060 Ti", 15.9))
    monkeypatch.setattr(init, "own_address", lambda: "192.168.1.10")


def test_from_flags(capsys, tmp_path):
    code, err = run(capsys, "--model", "/m/27b.gguf", "--peer", "mini.lan")
    assert code == 0, err
    got = config.load(tmp_path / "hydra.toml", {})
    assert (got.model.path, got.head_node.host, got.peers[0].host) == ("/m/27b.gguf", "192.168.1.10", "mini.lan")
    assert (got.head_node.gpu, got.head_node.memory_gib) == ("RTX 5060 Ti", 15.9)
    assert (got.peers[0].gpu, got.peers[0].memory_gib) == ("", 0.0), "nothing is made up about the other box"
    assert [node.layers for node in got.nodes] == ["auto", "auto"]
    text = (tmp_path / "hydra.toml").read_text()
    assert text.count("#") > 40 and "reference rig" not in text


def test_nothing_is_overwritten(capsys, tmp_path):
    (tmp_path / "hydra.toml").write_text("mine")
    code, err = run(capsys, "--model", "m", "--peer", "p")
    assert code == 2 and "--force" in err and (tmp_path / "hydra.toml").read_text() == "mine"
    assert run(capsys, "--model", "m", "--peer", "p", "--force")[0] == 0
    assert run(capsys, "--model", "m", "--peer", "p", "-o", "other.toml")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hydra.toml", "other.toml"]


def test_what_is_missing_is_named(capsys, tmp_path):
    assert "Add --peer" in run(capsys, "--model", "m")[1]
    assert "Add --model" in run(capsys, "--peer", "p")[1]
    assert "Add --head" in run(capsys, "--model", "m", "--role", "peer")[1]
    code, err = run(capsys, "--model", "m", "--peer", "http://p")
    assert code == 2 and "is not an address" in err
    assert list(tmp_path.iterdir()) == []


def test_asked_at_a_terminal(tmp_path):
    said = iter(["pear", "Peer", "", "tower.lan", "models/m.gguf"])
    questions: list[tuple[str, str]] = []

    def ask(question: str, default: str) -> str:
        questions.append((question, default))
        return next(said) or default

    init.run("hydra.toml", init.Answers(), force=False, ask=ask)
    got = config.load(tmp_path / "hydra.toml", {})
    assert (got.head_node.host, got.peers[0].host, got.peers[0].gpu) == ("tower.lan", "192.168.1.10", "RTX 5060 Ti")
    assert len(questions) == 5 and questions[1] == ("Write head or peer", "head")
    assert questions[2] == ("Address of this box", "192.168.1.10")
    with pytest.raises(ConfigError, match="exists already"):
        init.run("hydra.toml", init.Answers("m", "h", "p", "head"), force=False, ask=lambda *_: "no")
    init.run("hydra.toml", init.Answers("m", "h", "p", "head"), force=False, ask=lambda *_: "yes")


def test_ask_at_terminal(capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(" typed \n\n"))
    assert init.ask_at_terminal("Q?", "d") == "typed" and init.ask_at_terminal("Q?", "d") == "d"
    assert capsys.readouterr().err == "Q? [d]: Q? [d]: "
