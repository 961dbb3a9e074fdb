"""hydra doctor as a whole: from hydra.toml to exit code, with real peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydra import cli, config
from hydra.bench.process import free_port
from hydra.doctor import ask, examine, fit, inside, link, peers, system
from hydra.doctor.finding import GROUPS, fail, ok, summary, warn
from tests.doctor_support import listener

TOML = """\
[model]
path = "{model}"
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
device = "CPU"
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {port}
layers = 2
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(link, "BANDWIDTH_S", 0.02)
    monkeypatch.setattr(link, "STEPS", 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from hydra.bench import synthetic

    return synthetic.model("toy", directory=tmp_path_factory.mktemp("models"))


def toml(folder: Path, port: int, model: object = "m.gguf") -> str:
    file = folder / "hydra.toml"
    file.write_text(TOML.format(port=port, model=model))
    return str(file)


def run(capsys, *arguments: str) -> tuple[int, dict]:
    code = cli.run(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def statuses(report: dict, group: str) -> list[str]:
    return [f["status"] for f in report["findings"] if f["group"] == group]


def test_a_head_and_a_good_peer(capsys, tmp_path, model, monkeypatch):
    monkeypatch.setattr(system, "LOW_MEMORY_BYTES", 0)
    port = free_port()
    file = toml(tmp_path, port, model)
    with listener(port=port, config_digest=config.load(file).digest()):
        code, report = run(capsys, "--config", file, "--node", "tower")
    assert code == 0, [finding for finding in report["findings"] if finding["status"] == "fail"]
    assert "the same on both boxes" in json.dumps(report)
    assert {f["group"] for f in report["findings"]} >= {"config", "library", "system", "peer", "protocol", "sockets",
                                                        "link", "compute"}


def test_a_peer_box_before_hydra_up(capsys, tmp_path):
    code, report = run(capsys, "--config", toml(tmp_path, free_port()), "--node", "mini")
    assert code == 0 and "skip" in statuses(report, "peer")


def test_a_head_whose_peer_refuses(capsys, tmp_path, model):
    code, report = run(capsys, "--config", toml(tmp_path, free_port(), model), "--node", "tower")
    assert code == 1 and statuses(report, "peer") == ["fail"]


def test_no_file_at_all(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    code, report = run(capsys)
    assert code == 1 and statuses(report, "config") == ["fail"]
    assert "ok" in statuses(report, "library"), "the rest is examined all the same"


def test_a_peer_named_on_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with listener() as running:
        code, report = run(capsys, "--peer", f"127.0.0.1:{running.port}")
    assert code == 0, report
    with pytest.raises(Exception, match="not HOST:PORT"):
        list(examine.examine(None, None, ["nonsense"]))


def test_the_report_for_people(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.run(["doctor", "--peer", f"127.0.0.1:{free_port()}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [n for n, line in enumerate(lines) if "refuses the connection" in line]
    assert lines[at].split()[0] == "fail" and "→ Start `hydra up`" in lines[at + 1]
    assert lines[-1].startswith("1 failure") and "peer" in lines and lines.index("library") < lines.index("peer")


def test_a_check_with_a_bug_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(inside, "run", lambda question: 1 / 0)
    monkeypatch.setattr(peers, "look", lambda *_, **__: 1 / 0)
    found = list(examine.examine(toml(tmp_path, 1), "tower"))
    assert len([f for f in found if "ZeroDivisionError" in f.seen]) == 2
    assert all(f.group in GROUPS for f in found)


def test_summary():
    assert summary([ok("gpu", "a", ""), warn("gpu", "b", "", "x"), fail("gpu", "c", "", "y"), fail("gpu", "d", "", "y")]
                   ) == "2 failures, 1 warning, 1 checks passed."


# ---- does it fit? ----------------------------------------------------------------------------------------------------


def fit_statuses(tmp_path, model, memory: float) -> dict[str, str]:
    file = toml(tmp_path, 1, model)
    overrides = {"nodes.mini.memory_gib": memory, "nodes.tower.memory_gib": 8.0}
    return {f.check: f.status for f in fit.check(config.load(file, overrides=overrides), "")}


def test_fit(tmp_path, model):
    assert fit_statuses(tmp_path, model, 4.0) == {"memory fit": "ok"}
    assert fit_statuses(tmp_path, model, 0.1) == {"memory fit: mini": "fail"}
    assert fit_statuses(tmp_path, tmp_path / "none.gguf", 4.0) == {"memory fit": "skip"}


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_a_peer_behind_tls(tmp_path):
    from hydra import security

    security.init_certs(tmp_path, ["tower", "mini"])
    context = security.client_context(security.load_identity(tmp_path, "tower"))
    with listener(name="mini", tls_dir=str(tmp_path)) as running:
        seen = peers.look(ask.Target("mini", "127.0.0.1", running.port, context))
        try:
            assert seen.hydra and seen.client is not None, seen.findings
            found = [*seen.findings, *link.check(seen.client, "mini", seen.connect_s), *peers.sockets(seen)]
        finally:
            seen.close()
        plain = peers.look(ask.Target("mini", "127.0.0.1", running.port))
        plain.close()
    assert not [f for f in found if f.status == "fail"], found
    refused = plain.findings[-1]
    assert refused.status == "fail" and "security.tls" in refused.fix, "a client without TLS is not let in"
