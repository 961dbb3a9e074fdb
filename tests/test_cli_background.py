"""`hydra up --detach`, `hydra logs`, `hydra down`, `hydra reload`: a node without a terminal."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hydra import cli, config
from hydra.commands import background
from tests.test_cli_up import Rig, health


@pytest.fixture
def rig(tmp_path: Path, monkeypatch) -> Rig:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Rig(tmp_path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_peer_in_the_background(rig, capsys):
    where = ["--config", str(rig.file), "--node", "mini"]
    assert run(capsys, "down", *where)[0] == 1, "nothing runs yet"
    assert run(capsys, "logs", *where)[0] == 1
    code, _, err = run(capsys, "up", "--detach", *where, "--set", "peer.max_connections=2")
    assert code == 0, err
    try:
        assert "mini runs in the background" in err
        deadline = time.monotonic() + 60
        while health(rig.peer)[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert health(rig.peer)[1]["max_connections"] == 2, "what the command line said goes along"
        code, _, err = run(capsys, "up", "--detach", *where)
        assert code == 1 and "mini runs already" in err
        code, out, _ = run(capsys, "logs", *where)
        assert code == 0 and "This box is mini (peer)" in out
        assert run(capsys, "reload", *where)[0] == 2, "a peer has nothing to reload"
    finally:
        code, _, err = run(capsys, "down", *where)
    assert code == 0 and "mini has stopped" in err
    assert health(rig.peer) == (0, {})
    assert "Stopped." in run(capsys, "logs", *where, "-n", "1")[1]


def test_what_ends_at_once_says_why(rig, capsys):
    rig.file.write_text(rig.file.read_text().replace('device = "CPU"', 'device = "CUDA9"'))
    code, _, err = run(capsys, "up", "-d", "--config", str(rig.file), "--node", "mini")
    assert code == 4 and "There is no device CUDA9; this box has " in err and "CPU" in err, "as in the foreground"
    assert len(err.splitlines()) == 2 and "mini.log" in err.splitlines()[1]


def test_a_stale_pid_file_is_not_believed(rig, tmp_path):
    background.state_dir().mkdir(parents=True)
    (background.state_dir() / "mini.pid").write_text('{"pid": 1}')
    cfg = config.load(rig.file, {})
    assert background.process_of(cfg, cfg.node("mini")) == 0
    (background.state_dir() / "mini.pid").write_text("nonsense")
    assert background.process_of(cfg, cfg.node("mini")) == 0


def test_tail_follows(tmp_path):
    file = tmp_path / "log"
    file.write_text("one\ntwo\nthree\n")
    assert list(background.tail(file, 2, follow=False)) == ["two", "three"]
    following = background.tail(file, 1, follow=True)
    assert next(following) == "three"

    def later() -> None:
        with file.open("a") as out:
            out.write("fo")
            out.flush()
            out.write("ur\n")

    writer = threading.Thread(target=later)
    writer.start()
    assert next(following) == "four"
    writer.join()
