"""hydra/cli.py: exit codes, one error line and one hint line, JSON, and docs that match what --help says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydra import __version__, cli, errors
from hydra.commands import reference

ROOT = Path(__file__).parent.parent
TOML = """\
[model]
path = "m.gguf"
[head]
api_key = "hush"
[[nodes]]
name = "big"
role = "head"
host = "127.0.0.1"
layers = 40
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
layers = 25
"""


@pytest.fixture
def toml(tmp_path, monkeypatch):
    for name in ("HYDRA_CONFIG", "HYDRA_NODE", "HYDRA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "hydra.toml"
    file.write_text(TOML)
    return file


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"hydra {__version__}\n")
    code, out, _ = run(capsys, "version", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["ggml_rpc"] == "7.0.0"


def test_usage_errors_are_two_lines(capsys):
    code, out, err = run(capsys, "config", "chek")
    assert (code, out) == (2, "")
    assert err.splitlines() == ["error: No such command 'chek'. Did you mean 'check'?",
                                "hint:  `hydra config --help` lists what there is."]
    assert run(capsys, "config", "check", "--nonsense")[0] == 2
    assert run(capsys, "config", "check", "--set", "model.path")[0] == 2


def test_config_error(capsys, toml):
    toml.write_text(TOML.replace("layers = 25", "layer = 25"))
    code, out, err = run(capsys, "config", "check", "--config", toml)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 2 and "line 14" in err and "Did you mean layers?" in err


def test_config_check(capsys, toml):
    code, out, _ = run(capsys, "config", "check", "--config", toml)
    assert code == 0
    assert "could be big" in out and "--node" in out, "not knowing the node is told, and is no fault of the file"
    code, out, _ = run(capsys, "config", "check", "--config", toml, "--node", "mini", "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, report["this_node"], [n["layers"] for n in report["nodes"]]) == (0, "mini", [40, 25])
    assert run(capsys, "config", "check", "--config", toml, "--node", "nobody")[0] == 2


def test_config_show(capsys, toml, monkeypatch):
    monkeypatch.setenv("HYDRA_MODEL_UBATCH_SIZE", "128")
    code, out, _ = run(capsys, "config", "show", "--origin", "--config", toml, "--set", "model.ctx_size=99")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert code == 0 and "hush" not in out
    assert rows["model.ctx_size"] == ["99", "command line"]
    assert rows["model.ubatch_size"] == ["128", "HYDRA_MODEL_UBATCH_SIZE"]
    assert rows["nodes.mini.layers"] == ["25", "hydra.toml line 14"]
    code, out, _ = run(capsys, "config", "show", "--origin", "--json", "--config", toml)
    assert json.loads(out)["values"]["model.path"]["origin"] == "hydra.toml line 2"
    code, out, _ = run(capsys, "config", "show", "--json", "--config", toml)
    assert json.loads(out)["values"]["model.ubatch_size"] == 128


@pytest.mark.parametrize("kind", [errors.HydraError, errors.LibraryError, errors.DeviceError, errors.PeerUnreachable,
                                  errors.VersionMismatch, errors.ProtocolError, errors.ModelError, errors.EngineError,
                                  errors.RequestError])
def test_exit_codes_are_those_of_the_error_tree(capsys, toml, monkeypatch, kind):
    from hydra.commands import config as command

    def fail(*_, **__):
        raise kind("It\nbroke.", "Mend it.")

    monkeypatch.setattr(command, "check", fail)
    code, _, err = run(capsys, "config", "check")
    assert code == kind.exit_code
    assert err.splitlines() == ["error: It broke.", "hint:  Mend it."]
    assert f"| {code} |" in reference.CLI_HEAD


def test_a_bug_says_so_and_debug_shows_where(capsys, toml, monkeypatch):
    from hydra.commands import config as command

    monkeypatch.setattr(command, "check", lambda *_, **__: 1 / 0)
    code, _, err = run(capsys, "config", "check")
    assert code == cli.EXIT_BUG and "ZeroDivisionError" in err and "Traceback" not in err
    monkeypatch.setenv("HYDRA_DEBUG", "")
    code, _, err = run(capsys, "config", "check", "--debug")
    assert code == cli.EXIT_BUG and "Traceback" in err


def test_interrupt(capsys, monkeypatch):
    from hydra.commands import config as command

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check", interrupt)
    assert run(capsys, "config", "check")[0] == 130


def test_docs_are_what_the_program_says():
    """After a change: python -m hydra.commands.reference"""
    assert (ROOT / "docs" / "config.md").read_text() == reference.config_page()
    assert (ROOT / "docs" / "cli.md").read_text() == reference.cli_page()


def test_cache(capsys, toml, tmp_path):
    code, _, err = run(capsys, "cache", "list", "--config", toml)
    assert code == 2 and "sets no [peer] cache_dir" in err
    toml.write_text(TOML.replace("[head]", '[peer]\ncache_dir = "kept"\n[head]'))
    code, out, _ = run(capsys, "cache", "list", "--json", "--config", toml)
    assert (code, json.loads(out)) == (0, {"directory": str(tmp_path / "kept"), "entries": [], "stored_bytes": 0})
    from hydra.peer import weights_store
    from hydra.peer.weights_file import entry_name

    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / entry_name(0xABC, 20_000_000)).write_bytes(b"x" * 1000)
    assert len(weights_store.list_entries(tmp_path / "kept")) == 1
    code, out, err = run(capsys, "cache", "list", "--config", toml)
    assert code == 0 and "0000000000000abc" in out and "20.0 MB" in out and "1 tensors" in err
    code, out, _ = run(capsys, "cache", "clear", "--json", "--cache-dir", tmp_path / "kept")
    assert (code, json.loads(out)["removed"], json.loads(out)["freed_bytes"]) == (0, 1, 1000)
    assert run(capsys, "cache", "clear", "--config", toml)[0] == 0


def test_certs_init(capsys, toml, tmp_path):
    toml.write_text(TOML.replace("[head]", '[security]\ncert_dir = "certs"\n[head]'))
    code, out, err = run(capsys, "certs", "init", "--config", toml)
    names = {Path(line).name for line in out.splitlines()}
    assert code == 0 and names == {"ca.pem", "ca.key", "big.pem", "big.key", "mini.pem", "mini.key"}
    assert "TLS is off" in err and "mini.key" in err
    code, out, _ = run(capsys, "certs", "init", "--config", toml, "--json")
    assert (code, json.loads(out)["written"]) == (0, [])
    code, out, _ = run(capsys, "certs", "init", "--config", toml, "--json", "--renew")
    assert len(json.loads(out)["written"]) == 4
