"""hydra service: what the unit says for which node, what systemd thinks of it, and that every step is told first."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from hydra import config, service
from hydra.commands import service as command
from hydra.errors import ConfigError, HydraError

EXAMPLE = Path(__file__).parent.parent / "hydra.toml.example"
ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hydra.toml").write_text(EXAMPLE.read_text())
    return config.load(tmp_path / "hydra.toml", env={})


def lines(cfg, node: str) -> list[str]:
    return command.plan(cfg, node, ME, Path(os.environ["HOME"]), ["/opt/hydra"]).text().splitlines()


def test_each_node_gets_what_it_needs_and_no_more(cfg, monkeypatch):
    monkeypatch.setattr(service, "NVIDIA_MODPROBE", Path("/bin/true"))
    head, peer = lines(cfg, "tower"), lines(cfg, "mini")
    assert f"ExecStart=/opt/hydra up --config {cfg.path} --node mini" in peer
    assert "ExecReload=/bin/sh -c 'kill -HUP $MAINPID'" in head
    assert not any(line.startswith("ExecReload") for line in peer)
    for unit in (head, peer):
        assert "DeviceAllow=char-nvidia* rw" in unit and "ExecStartPre=-+/bin/true -c 0 -u" in unit
        assert {"Restart=on-failure", "NoNewPrivileges=yes", "ProtectSystem=strict", "DevicePolicy=closed",
                "CapabilityBoundingSet=", f"User={ME}"} <= set(unit)
        home = os.environ["HOME"]
        # The weights of the example are below the cache, so there is nothing to add for the peer.
        assert f"ReadWritePaths={home}/.cache/hydra {home}/.local/state/hydra" in unit


def test_a_cpu_node_has_no_device(tmp_path, cfg):
    text = EXAMPLE.read_text().replace('device = "CUDA0"', 'device = "cpu"')
    (tmp_path / "hydra.toml").write_text(text)
    unit = lines(config.load(tmp_path / "hydra.toml", env={}), "mini")
    assert not any(line.startswith(("DeviceAllow", "ExecStartPre")) for line in unit) and "DevicePolicy=closed" in unit


def test_weights_on_another_disk_may_be_written_and_may_be_missing(tmp_path, cfg):
    other = config.load(cfg.path, env={"HYDRA_PEER_CACHE_DIR": "/srv/my weights"})
    assert f'ReadWritePaths={tmp_path}/.cache/hydra {tmp_path}/.local/state/hydra "-/srv/my weights"' in lines(
        other, "mini")
    assert not any("my weights" in line for line in lines(other, "tower"))


def test_the_time_to_end_is_longer_than_the_heads_own(cfg):
    longer = config.load(cfg.path, env={"HYDRA_HEAD_GRACE_S": "100"})
    assert "TimeoutStopSec=115" in lines(longer, "tower")


@pytest.mark.parametrize(("word", "written"), [
    ("/opt/hydra", "/opt/hydra"),
    ("/home/a b/hydra.toml", '"/home/a b/hydra.toml"'),
    ('say "x\\y"', '"say \\"x\\\\y\\""'),
    ("100%", "100%%"),
    ("", '""'),
])
def test_words_reach_the_program_as_they_are(word, written):
    assert service.quoted(word) == written


def test_a_dollar_is_no_variable_and_a_program_has_its_whole_path():
    assert service.command_line(["/opt/$x", "up"]) == '"/opt/$$x" up'
    for words in ([], ["hydra", "up"]):
        with pytest.raises(ConfigError, match="whole path"):
            service.command_line(words)
    with pytest.raises(ConfigError, match="control characters"):
        service.literal("a\nExecStartPost=/bin/sh")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this box")
def test_systemd_accepts_the_unit_and_refuses_a_broken_one(cfg, tmp_path):
    for node in ("tower", "mini"):
        made = command.plan(cfg, node, ME, tmp_path, ["/bin/true"])
        command.verify(made.text())
        unit = tmp_path / service.NAME
        unit.write_text(made.text())
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
        # Unknown directives are only warnings to systemd: there may be none about this unit.
        assert done.returncode == 0 and service.NAME not in done.stderr, done.stderr
    with pytest.raises(HydraError, match="refuses the unit"):
        command.verify(made.text().replace("/bin/true", "/nowhere/hydra"))


@pytest.fixture
def box(cfg, tmp_path, monkeypatch):
    """A box whose systemctl only writes down what it is asked for, and where we seem to be root."""
    told: list[str] = []
    unit = tmp_path / "etc" / service.NAME
    unit.parent.mkdir()
    monkeypatch.setattr(service, "UNIT_FILE", unit)
    monkeypatch.setattr(command, "_need_root", lambda: None)
    monkeypatch.setattr(command, "_not_in_tmp", lambda path: None)
    monkeypatch.setattr(command, "program", lambda: ["/bin/true"])
    monkeypatch.setattr(command, "_account", lambda user: _Account(tmp_path))
    monkeypatch.setattr("hydra.console.note", told.append)

    def run(words, **_):
        told.append(f"ran {' '.join(words[:2])}")
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    return cfg, unit, told


class _Account:
    def __init__(self, home: Path) -> None:
        self.pw_name, self.pw_dir, self.pw_uid, self.pw_gid = ME, str(home), os.geteuid(), os.getegid()


def test_install_says_each_step_before_it(box):
    cfg, unit, told = box
    command.install(str(cfg.path), "mini", "", start=True, dry_run=False)
    assert "ExecStart=/bin/true up --config" in unit.read_text() and unit.stat().st_mode & 0o777 == 0o644
    assert (Path(os.environ["HOME"]) / ".cache" / "hydra").is_dir()
    text = "\n".join(told)
    for step, ran in (("systemctl daemon-reload", "ran systemctl daemon-reload"),
                      ("systemctl enable", "ran systemctl enable"), ("systemctl restart", "ran systemctl restart")):
        assert text.index(f"Running {step}") < text.index(ran)
    assert text.index(f"Writing {unit}") < text.index("NoNewPrivileges") < text.index("Running systemctl daemon-reload")
    assert [p.name for p in unit.parent.iterdir()] == [service.NAME]

    told.clear()
    command.uninstall(dry_run=False)
    assert not unit.exists() and f"Removing {unit}." in told
    with pytest.raises(HydraError, match="no service of hydra"):
        command.uninstall(dry_run=False)


def test_dry_run_changes_nothing(box, capsys):
    cfg, unit, told = box
    command.install(str(cfg.path), "mini", "", start=True, dry_run=True)
    assert not unit.exists() and told == []
    assert capsys.readouterr().out.startswith("# Written by `hydra service install`")


def test_status_in_one_object(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    shown = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\nSubState=running\nMainPID=7\nNRestarts=2\n"
    monkeypatch.setattr("subprocess.run",
                        lambda words, **_: subprocess.CompletedProcess(words, 0, shown, ""))
    assert command.status(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["running"] and found["enabled"] and (found["pid"], found["restarts"]) == (7, 2)
    shown = "LoadState=not-found\nActiveState=inactive\n"
    assert command.status(as_json=False) == 1
    assert "hydra service install" in capsys.readouterr().out


def test_a_place_that_the_service_would_not_see_is_refused():
    with pytest.raises(ConfigError, match="/tmp of its own"):
        command._not_in_tmp(Path("/tmp/hydra.toml"))


def test_an_unknown_user_is_refused():
    with pytest.raises(ConfigError, match="no user 'nobody-of-that-name'"):
        command._account("nobody-of-that-name")
