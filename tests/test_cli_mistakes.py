"""Every error at the terminal: a line of what, a line of what to do, a documented exit code, no traceback unasked."""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import hydra
from hydra import cli, errors
from hydra.commands import reference

ROOT = Path(__file__).parent.parent
TOML = """\
[model]
path = "missing.gguf"
[head]
api_port = 9
[peer]
cache_dir = "kept"
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = 10
device = "CPU"
"""
HERE = ["--config", "hydra.toml"]
DOCUMENTED = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", reference.CLI_HEAD)}


def classes() -> list[type[errors.HydraError]]:
    """Every HydraError of the whole program, wherever it is defined."""
    for module in pkgutil.walk_packages(hydra.__path__, "hydra."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = [], [errors.HydraError]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    return found


def test_all_errors_of_the_tree(capsys, monkeypatch):
    from hydra.commands import config as command

    found = classes()
    assert len(found) > 15 and {cls.__name__ for cls in found} >= {"NoAnswer", "DeviceMissing", "Overloaded"}
    for cls in found:
        error: Any = cls.__new__(cls)
        errors.HydraError.__init__(error, "It broke:\n\n  all of it.")

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(command, "check", fail)
        code = cli.run(["config", "check"])
        lines = capsys.readouterr().err.splitlines()
        assert code == cls.exit_code and code in DOCUMENTED, cls
        assert lines[0] == "error: It broke: all of it." and len(lines) == 2, cls
        assert lines[1].startswith("hint:  ") and len(lines[1]) > 20, f"{cls.__name__} never leaves one without advice"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name in [name for name in os.environ if name.startswith("HYDRA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (tmp_path / "hydra.toml").write_text(TOML)
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "text.gguf").write_text("this is no model")
    return tmp_path


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["chta"], 2, "No such command 'chta'. Did you mean 'chat'?"),
    (["up", "--modle", "x"], 2, "No such option"),
    (["up", "-c", "many"], 2, "Invalid value for '--ctx-size' / '-c'"),
    (["up", "-c"], 2, "requires an argument"),
    (["pull"], 2, "Missing argument"),
    (["up", "--config", "nowhere.toml"], 2, "nowhere.toml does not exist"),
    (["up", "--config", "broken.toml"], 2, "is not valid TOML"),
    (["up", *HERE], 2, "could be tower"),
    (["up", *HERE, "--node", "towr"], 2, "There is no node 'towr'"),
    (["up", *HERE, "--node", "tower"], 7, "missing.gguf does not exist"),
    (["up", *HERE, "--node", "tower", "-m", "text.gguf"], 7, "is not a usable GGUF file"),
    (["up", *HERE, "--node", "tower", "-d"], 7, "missing.gguf does not exist"),
    (["up", *HERE, "--set", "model.ctxsize=5"], 2, "there is no key 'model.ctxsize'"),
    (["up", *HERE, "--set", "model.ctx_size"], 2, "has no value"),
    (["up", *HERE, "--log-format", "xml"], 2, "xml is not known"),
    (["down", *HERE, "--node", "tower"], 1, "does not run on this box"),
    (["reload", *HERE, "--node", "tower"], 1, "does not run on this box"),
    (["logs", *HERE, "--node", "mini"], 1, "There is no log of mini"),
    (["peer", "--bind", "127.0.0.1:high"], 2, "has no usable port"),
    (["peer", "--bind", "127.0.0.1:0", "--device", "CUDA9"], 4, "There is no device CUDA9; this box has"),
    (["peer", "--bind", "192.0.2.77:50099"], 2, "192.0.2.77 is not an address of this box, so the peer cannot"),
    (["chat", "hi", *HERE], 5, "No head answers at http://127.0.0.1:9"),
    (["chat", "hi", "--url", "http://127.0.0.1:9"], 5, "No head answers"),
    (["ps", "--url", "127.0.0.1:9"], 5, "No head answers"),
    (["ps", "--config", "broken.toml"], 2, "is not valid TOML"),
    (["plan", *HERE], 7, "missing.gguf"),
    (["plan", *HERE, "-m", "text.gguf"], 7, "text.gguf"),
    (["pull", "nonsense"], 2, "is not a model of Hugging Face"),
    (["pull", "a/b"], 7, "cannot be reached"),
    (["init", "--role", "boss", "-o", "new.toml"], 2, "'boss' is not known"),
    (["init", "--model", "m", "--peer", "p"], 2, "exists already"),
    (["config", "check", "--config", "broken.toml"], 2, "is not valid TOML"),
    (["config", "show", "--config", "nowhere.toml"], 2, "does not exist"),
    (["config"], 2, ""),
    (["cache", "list", "--config", "nowhere.toml"], 2, "does not exist"),
    (["certs", "init", "--config", "nowhere.toml"], 2, "does not exist"),
    (["demo", "-m", "text.gguf"], 7, "text.gguf"),
    (["doctor", "--peer", "nonsense:port"], 2, "nonsense:port"),
    (["completion", "tcsh"], 2, "no completion for tcsh"),
])
def test_typical_mistakes(folder, capfd, arguments, code, words):
    got = cli.run(arguments)
    out, err = capfd.readouterr()
    assert got == code and code in DOCUMENTED, err
    assert out == "" and "Traceback" not in err
    if not words:
        assert err.startswith("Usage:")
        return
    # A node that was starting has logged by then; the error is the last word.
    lines = err.splitlines()
    assert lines[-2].startswith("error: ") and words in lines[-2], err
    assert lines[-1].startswith("hint:  ") and len(lines[-1]) > 12, err
    assert not any(line.startswith(("error: ", "hint: ")) for line in lines[:-2]), err


def test_a_port_that_another_program_has(folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["peer", "--bind", f"127.0.0.1:{port}", "--device", "CPU"]) == 1
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 2 and f"127.0.0.1:{port} is already served by process {os.getpid()}" in err[0]


def test_debug_adds_the_traceback(folder):
    """--debug of a command, and of hydra itself for those that have none; the two lines stay the last ones."""
    for arguments in (["plan", *HERE, "--debug"], ["--debug", "plan", *HERE]):
        done = subprocess.run([sys.executable, "-m", "hydra", *arguments], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        lines = done.stderr.splitlines()
        assert done.returncode == 7 and lines[0].startswith("Traceback"), done.stderr
        assert lines[-2].startswith("error: ") and lines[-1].startswith("hint: ")
        assert any("hydra.errors.ModelError" in line for line in lines)


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command of hydra itself with its path; those of bench are a developer's."""
    if not hasattr(command, "list_commands"):
        return [(path, command)]
    context = command.context_class(command)
    return [found for name in command.list_commands(context) if name not in cli.LAZY
            for found in commands(command.get_command(context, name), (*path, name))]


def test_every_command_has_debug_and_a_line_of_help():
    found = commands(typer.main.get_command(cli.app))
    assert len(found) > 20
    for path, command in found:
        names = {name for each in command.params for name in each.opts}
        assert "--debug" in names, path
        assert command.help, path
        for each in command.params:
            assert each.name in ("temperature", "top_p", "top_k", "min_p") or each.help, (path, each.name)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_the_two_lines_in_a_narrow_pipe_stay_two(folder, columns):
    command = [sys.executable, "-m", "hydra", "up", *HERE, "--node", "tower"]
    done = subprocess.run(command, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "COLUMNS": columns, "PYTHONPATH": str(ROOT)})
    assert [line.split()[0] for line in done.stderr.splitlines()[-2:]] == ["error:", "hint:"]
