"""`hydra pull`: where a file goes, what is told, hydra.toml's line, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra import cli, config
from hydra.commands import pull
from hydra.commands.child import hydra_command
from tests.hub_server import HubServer
from tests.terminal_support import Terminal

REPO = "someone/Small-1B-GGUF"
TOML = """\
# My boxes.
[model]
path = "weights/old.gguf"  # the one before
ctx_size = 4096

[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
"""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[HubServer]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "HYDRA_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    made = HubServer()
    made.repos[REPO] = {"Small-1B-Q4_K_M.gguf": b"four" * 1000, "Small-1B-Q8_0-00001-of-00002.gguf": b"one" * 1000,
                        "Small-1B-Q8_0-00002-of-00002.gguf": b"two" * 1000}
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield made
    made.close()


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["pull", *(str(each) for each in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_file(server, tmp_path, capsys):
    code, out, err = run(capsys, REPO)
    path = tmp_path / "models" / "Small-1B-Q4_K_M.gguf"
    assert (code, out) == (0, f"{path}\n"), "stdout is the path and nothing else"
    assert path.read_bytes() == b"four" * 1000
    assert f"Fetching {path.name} from {REPO} (4.0 kB)" in err and "the checksum is right" in err
    assert f'[model] path = "{path}"' in err and "--use" not in err, "there is no hydra.toml to write it into"
    server.ranges.clear()
    code, out, err = run(capsys, f"{REPO}/Small-1B-Q4_K_M.gguf")
    assert (code, out) == (0, f"{path}\n") and "is there already (4.0 kB)" in err and server.ranges == []


def test_all_parts_and_json(server, tmp_path, capsys):
    code, out, err = run(capsys, f"{REPO}:Q8_0", "--to", tmp_path / "disk", "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and report["path"] == str(tmp_path / "disk/Small-1B-Q8_0-00001-of-00002.gguf")
    assert [(each["name"].split("-")[3], each["fetched"]) for each in report["files"]] == [
        ("00001", True), ("00002", True)]
    assert (tmp_path / "disk/Small-1B-Q8_0-00002-of-00002.gguf").read_bytes() == b"two" * 1000
    assert "2 files" in err and "6.0 kB" in err and "the checksums are right" in err
    (tmp_path / "disk/Small-1B-Q8_0-00002-of-00002.gguf").unlink()
    code, out, _ = run(capsys, f"{REPO}:Q8_0", "--to", tmp_path / "disk", "--json")
    assert [each["fetched"] for each in json.loads(out)["files"]] == [False, True], "only what is missing"


def test_verify_and_force(server, tmp_path, capsys):
    assert run(capsys, REPO)[0] == 0
    path = tmp_path / "models" / "Small-1B-Q4_K_M.gguf"
    assert "checksum right" in run(capsys, REPO, "--verify")[2]
    path.write_bytes(b"five" * 1000)
    code, out, err = run(capsys, REPO, "--verify")
    assert (code, out) == (7, "") and "is damaged" in err and "--force" in err
    assert run(capsys, REPO, "--force")[0] == 0 and path.read_bytes() == b"four" * 1000


def test_use_exchanges_one_value(server, tmp_path, capsys):
    file = tmp_path / "hydra.toml"
    file.write_text(TOML)
    code, out, err = run(capsys, REPO)
    assert out == f"{tmp_path}/weights/Small-1B-Q4_K_M.gguf\n", "beside the model that hydra.toml has"
    assert 'path = "weights/Small-1B-Q4_K_M.gguf" (or run it again with --use)' in err and file.read_text() == TOML
    code, _, err = run(capsys, REPO, "--use")
    assert code == 0 and "uses it now" in err
    assert file.read_text() == TOML.replace("old.gguf", "Small-1B-Q4_K_M.gguf"), "comments and all else stay"
    assert run(capsys, REPO, "--use", "--to", tmp_path.parent / "elsewhere")[0] == 0
    assert config.load(file, {}).model.path == str(tmp_path.parent / "elsewhere" / "Small-1B-Q4_K_M.gguf")


def test_use_where_it_cannot_be_written(server, tmp_path, capsys):
    (tmp_path / "hydra.toml").write_text(TOML.replace('path = "weights/old.gguf"', 'path = """weights/old.gguf"""'))
    before = (tmp_path / "hydra.toml").read_text()
    code, _, err = run(capsys, REPO, "--use")
    assert code == 2 and 'Write path = "weights/Small-1B-Q4_K_M.gguf" there.' in err
    assert (tmp_path / "hydra.toml").read_text() == before
    (tmp_path / "hydra.toml").unlink()
    code, out, _ = run(capsys, REPO, "--use")
    assert (code, out) == (2, ""), "what cannot be done is told before anything is fetched"


def test_errors_are_two_lines(server, tmp_path, capsys, monkeypatch):
    for arguments, want, words in ((["nonsense"], 2, "is not a model of Hugging Face"),
                                   (["a/b"], 7, "There is no repository a/b"),
                                   ([f"{REPO}:F16"], 7, "nothing with the quant F16"),
                                   ([REPO, "--to", "/proc/nowhere"], 2, "cannot be made")):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (want, "") and len(err.splitlines()) == 2 and words in err, err
    monkeypatch.setattr("shutil.disk_usage", lambda _p: type("Usage", (), {"free": 1000})())
    code, _, err = run(capsys, REPO)
    assert code == 7 and "0.0 GB free" in err and "--to" in err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_killed_pull_goes_on(server, tmp_path):
    """Ctrl-C in the middle: 130, the part is kept, and the next run asks for the rest only."""
    data = os.urandom(6_000_000)
    server.repos[REPO]["Small-1B-F16.gguf"] = data
    server.pause_after = 2_500_000
    command = hydra_command("pull", f"{REPO}:F16")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                               env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(
            each.stat().st_size >= 2_000_000 for each in tmp_path.glob("models/*.part")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "Kept 2.1 MB of 6.0 MB" in err and "Traceback" not in err
    server.pause_after = 0
    server.ranges.clear()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    assert done.returncode == 0 and "of it are there and kept" in done.stderr, done.stderr
    assert (tmp_path / "models/Small-1B-F16.gguf").read_bytes() == data
    assert len(server.ranges) == 1 and server.ranges[0] == "bytes=2097152-"


def test_speed_and_time_left():
    class Loading:
        def update(self, stage, **told):
            self.told = told

    now, loading = [0.0], Loading()
    show = pull._shown(loading, "", 1000, 500, clock=lambda: now[0])  # type: ignore[arg-type]
    show(0)
    now[0] = 2.0
    show(100)
    assert loading.told == {"bytes_done": 600, "bytes_total": 1000, "rate": 50.0, "eta_s": 8.0}
    now[0] = 3.0
    show(20)
    assert loading.told["rate"] == 0.0 and loading.told["eta_s"] is None, "a file that began anew"


@pytest.mark.parametrize("columns", [80, 40])
def test_at_a_terminal(server, tmp_path, columns):
    """A bar while it comes, its time left last where there is little room, and nothing of it left behind."""
    server.repos[REPO]["Small-1B-F16.gguf"] = os.urandom(6_000_000)
    server.pause_after = 3_000_000
    terminal = Terminal(["pull", f"{REPO}:F16"], columns, tmp_path, HF_ENDPOINT=server.url)
    screen = terminal.until("2.1 MB of 6.0 MB")
    terminal.until("35 %")
    assert "━" in terminal.text() if columns == 80 else "━" not in terminal.text()
    assert max(map(len, screen.splitlines())) <= columns
    terminal.child.sendintr()
    assert terminal.end() == 130
    screen = terminal.text()
    assert "Kept 2.1 MB of 6.0 MB" in screen and "35 %" not in screen
    assert "\x1b[?25h" in terminal.raw, "the cursor is shown again"
