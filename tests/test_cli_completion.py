"""Tab in real shells: bash by keystrokes on a terminal, zsh and fish where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from hydra import cli

ROOT = Path(__file__).parent.parent
TOML = """\
[model]
path = "m.gguf"
ctx_size = 65536
[[nodes]]
name = "tower"
role = "head"
host = "10.0.0.1"
[[nodes]]
name = "mini"
role = "peer"
host = "10.0.0.2"
"""
# Few files to look through: a shell's own completion scripts are not what is tested.
PROMPT = "ready> "


@pytest.fixture
def box(tmp_path) -> Path:
    """A home with a `hydra` program on the PATH, a hydra.toml and a model file."""
    (tmp_path / "hydra.toml").write_text(TOML)
    (tmp_path / "model.gguf").write_text("")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hydra"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m hydra \"$@\"\n")
    program.chmod(0o755)
    return tmp_path


def environment(box: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HYDRA_", "PYTHON", "COMP_"))}
    return {**kept, "HOME": str(box), "PATH": f"{box}/bin:{kept['PATH']}", "PS1": PROMPT, "TERM": "dumb"}


def asked(box: Path, line: str, shell: str = "bash") -> list[str]:
    """What hydra offers for a line, the last word of which is being typed."""
    words = line.split(" ")
    env = {**environment(box), "_HYDRA_COMPLETE": f"complete_{shell}", "COMP_WORDS": line,
           "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([str(box / "bin/hydra")], env=env, cwd=box, capture_output=True, text=True, timeout=60)
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.parametrize(("line", "want"), [
    ("hydra p", ["pull", "peer", "ps", "plan"]), ("hydra config ", ["check", "show"]),
    ("hydra up --node ", ["tower", "mini"]), ("hydra down --node m", ["mini"]),
    ("hydra up -ctk q8", ["q8_0"]), ("hydra up -fa ", ["on", "off", "auto"]),
    ("hydra up --set model.ctx", ["model.ctx_size=65536"]), ("hydra up --set model.c", [
        "model.ctx_size=", "model.cache_type_k=", "model.cache_type_v="]),
    ("hydra up --set mtp.enabled=", ["mtp.enabled=true", "mtp.enabled=false"]),
    ("hydra up --set nodes.mini.r", ["nodes.mini.role=head", "nodes.mini.role=peer"]),
    ("hydra config show --set head.api_key", ["head.api_key="]),
    ("hydra up --log-format ", ["text", "json"]), ("hydra completion z", ["zsh"]), ("hydra up --spec-draft-n", [
        "--spec-draft-n-max"]), ("hydra up -m ", []),
])
def test_what_is_offered(box, line, want):
    assert asked(box, line) == want


def test_without_a_usable_file(box):
    (box / "hydra.toml").write_text("nonsense")
    assert asked(box, "hydra up --node ") == []
    assert asked(box, "hydra up --set model.ctx") == ["model.ctx_size="]


def test_bash_with_keystrokes(box):
    shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=environment(box), cwd=str(box), encoding="utf-8",
                          timeout=30, dimensions=(30, 120))
    try:
        shell.expect_exact(PROMPT)
        shell.sendline("bind 'set bell-style none'; bind 'set enable-bracketed-paste off'; "
                       "source <(hydra completion bash)")
        shell.expect_exact(PROMPT)
        for typed, line in (
                ("hydra relo\t", "hydra reload "), ("hydra up --node mi\t", "hydra up --node mini "),
                ("hydra up --set model.cache_type_k=q8\t", "hydra up --set model.cache_type_k=q8_0 "),
                ("hydra up --set model.ct\t", "hydra up --set model.ctx_size=65536 "),
                ("hydra up --set head.api_ke\t", "hydra up --set head.api_key="),
                ("hydra up -m mod\t", "hydra up -m model.gguf "), ("bin/hydra conf\t", "bin/hydra config ")):
            shell.send(typed)
            shell.expect_exact(line)
            shell.send("\x15")  # Ctrl-U: the next line begins empty
        shell.send("hydra p\t\t")
        shell.expect(r"peer\s+plan\s+ps\s+pull")
    finally:
        shell.close(force=True)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_with_keystrokes(box):
    shell = pexpect.spawn("zsh", ["-f"], env=environment(box), cwd=str(box), encoding="utf-8", timeout=30,
                          dimensions=(30, 120))
    try:
        shell.sendline(f"PROMPT='{PROMPT}'; unsetopt zle_bracketed_paste beep; autoload -Uz compinit; compinit -u; "
                       "source <(hydra completion zsh); echo loaded")
        shell.expect_exact("\nloaded")
        for typed, line in (("hydra relo\t", "ad"), ("hydra up --node mi\t", "ni"),
                            ("hydra up --set mtp.enabled=t\t", "rue")):
            shell.send(typed)
            shell.expect_exact(line)
            shell.send("\x15")
    finally:
        shell.close(force=True)


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish(box):
    folder = box / ".config/fish/completions"
    folder.mkdir(parents=True)
    script = subprocess.run([str(box / "bin/hydra"), "completion", "fish"], env=environment(box), capture_output=True,
                            text=True, timeout=60)
    (folder / "hydra.fish").write_text(script.stdout)
    for line, want in (("hydra relo", "reload"), ("hydra up --node mi", "mini"), ("hydra up -ctk q8", "q8_0")):
        done = subprocess.run(["fish", "--command", f"complete --do-complete '{line}'"], env=environment(box), cwd=box,
                              capture_output=True, text=True, timeout=60)
        assert [answer.split("\t")[0] for answer in done.stdout.splitlines()] == [want], done.stderr


def test_the_command(capsys, monkeypatch):
    for shell in ("bash", "zsh", "fish"):
        assert cli.run(["completion", shell]) == 0
        assert "_HYDRA_COMPLETE" in capsys.readouterr().out
        if shutil.which(shell):
            cli.run(["completion", shell])
            checked = subprocess.run([shell, "-n"], input=capsys.readouterr().out, text=True, capture_output=True)
            assert checked.returncode == 0, checked.stderr
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert cli.run(["completion"]) == 0 and "compdef" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert cli.run(["completion"]) == 2
    err = capsys.readouterr().err
    assert "no completion for tcsh" in err and "hydra completion bash|zsh|fish" in err


def test_help_as_a_word(capsys):
    assert cli.run(["help", "config", "show"]) == 0
    assert capsys.readouterr().out.startswith("Usage: hydra config show")
    assert cli.run(["help"]) == 0 and "Commands:" in capsys.readouterr().out
