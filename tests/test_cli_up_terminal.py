"""`hydra up` as people and programs see it: at terminals of 80 and 40 columns, as JSON, in the background."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hydra.commands.child import NodeProcess, hydra_command
from hydra.embedded import embedded_model
from tests.terminal_support import Terminal
from tests.test_cli_up import Rig, health, until

WAIT_S = 60.0
CURL = re.compile(r"curl (http://127\.0\.0\.1:\d+/v1/chat/completions) -d '(.*?)'")


@pytest.mark.parametrize(("columns", "colour"), [(80, True), (40, False)])
def test_a_head_that_waits(tmp_path, columns, colour):
    """One line that counts down in its place, whatever the width; Ctrl-C leaves the terminal in order."""
    rig = Rig(tmp_path, wait=100.0)
    terminal = Terminal(["up", "--config", str(rig.file), "--node", "tower"], columns, tmp_path,
                        NO_COLOR="" if colour else "1")
    first = terminal.until("giving up")
    assert "next look" in first and max(map(len, first.splitlines())) <= columns
    count = len(first.splitlines())
    left = re.search(r"giving up 1:(\d+)", first)
    assert left is not None
    terminal.wait_for(lambda: f"giving up 1:{int(left[1]) - 2:02d}" in terminal.text(), "the countdown")
    assert len(terminal.text().splitlines()) == count, "in its place"
    terminal.child.sendintr()
    assert terminal.end() == 0
    assert "Stopped." in terminal.text() and "giving up" not in terminal.text() and "Traceback" not in terminal.raw
    assert ("\x1b[32m" in terminal.raw) is colour and terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l")


@pytest.mark.parametrize(("columns", "colour"), [(80, False), (40, True)])
def test_a_peer(tmp_path, columns, colour):
    rig = Rig(tmp_path)
    terminal = Terminal(["up", "--config", str(rig.file), "--node", "mini"], columns, tmp_path,
                        NO_COLOR="" if colour else "1")
    terminal.wait_for(lambda: f"127.0.0.1:{rig.peer}" in terminal.text() and "Ctrl-C" in terminal.text())
    screen = terminal.text()
    assert max(map(len, screen.splitlines())) <= columns
    words = " ".join(screen.split())
    assert re.search(r"info +\d\d:\d\d:\d\d mini This box is mini \(peer\): named by --node\.", words)
    assert re.search(r"mini ready: CPU \(.*\), [\d.]+ of [\d.]+ GiB free", words)
    terminal.child.sendintr()
    assert terminal.end() == 0 and terminal.text().rstrip().endswith("Stopped.")
    assert ("\x1b[32m" in terminal.raw) is colour


@pytest.mark.model
@pytest.mark.parametrize("columns", [80, 40])
def test_a_head_that_serves_says_where_and_how(tmp_path, columns):
    """One block: what lies where, the address, and a curl line that works as it is copied from the screen."""
    rig = Rig(tmp_path)
    path = f"path = {json.dumps(str(embedded_model().path))}\nctx_size = 512"
    text = rig.file.read_text().replace('path = "m.gguf"', path)
    rig.file.write_text(text.replace("layers = 2", "layers = 11", 1).replace("layers = 2", "layers = 7"))
    with NodeProcess(rig.file, "mini") as peer:
        until(peer, rig.peer, 200, "ok")
        terminal = Terminal(["up", "--config", str(rig.file), "--node", "tower"], columns, tmp_path, rows=40)
        terminal.wait_for(lambda: '"Hello"}]}' in "".join(terminal.text().splitlines()), "the curl line")
        shown = terminal.text()
        words = " ".join(shown.split())
        assert "7 on mini" in words and "11 on tower" in words and f"http://127.0.0.1:{rig.api}/v1" in words
        # A terminal joins what it has wrapped; what hydra itself had broken would be broken in the clipboard, too.
        line = CURL.search("".join(each.ljust(columns) for each in shown.splitlines()))
        assert line is not None, shown
        assert line[1] == f"http://127.0.0.1:{rig.api}/v1/chat/completions"
        body = {**json.loads(line[2]), "max_tokens": 4}
        done = subprocess.run(["curl", "-s", line[1], "-d", json.dumps(body)], capture_output=True, timeout=WAIT_S)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4
        terminal.child.sendintr()
        assert terminal.end() == 0 and terminal.text().rstrip().endswith("Stopped.")


def records(lines: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines.splitlines()]
    assert all({"level", "time", "node", "logger", "message"} <= set(record) for record in found)
    return found


@pytest.mark.parametrize("node", ["mini", "tower"])
def test_json_lines_are_json_to_the_last(tmp_path, node):
    rig = Rig(tmp_path)
    process = subprocess.Popen(hydra_command("up", "--config", str(rig.file), "--node", node, "--log-format", "json",
                                             "--debug"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port, state = (rig.peer, "ok") if node == "mini" else (rig.api, "waiting")
    deadline = time.monotonic() + WAIT_S
    while health(port)[1].get("state") != state and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    try:
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    found = records(err)
    assert (process.returncode, out) == (0, "")
    assert found[-1]["message"] == "Stopped." and {record["node"] for record in found} <= {node, "mini"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found[0]["time"])


@pytest.mark.parametrize("fault", ["device", "file"])
def test_an_error_is_a_record_too(tmp_path, fault):
    rig = Rig(tmp_path)
    text = rig.file.read_text()
    rig.file.write_text(text.replace('"CPU"', '"CUDA9"') if fault == "device" else text + "[nonsense")
    done = subprocess.run(hydra_command("up", "--config", str(rig.file), "--node", "mini", "--log-format", "json"),
                          capture_output=True, text=True, timeout=WAIT_S)
    last = records(done.stderr)[-1]
    assert done.returncode == (4 if fault == "device" else 2) and last["level"] == "error" and last["hint"]
    assert ("CUDA9" if fault == "device" else "not valid TOML") in last["message"]


def test_logs_follow_a_node_in_the_background(tmp_path, monkeypatch):
    """Detached, followed while it runs and stops, and told why where it ends at once; as JSON, too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rig = Rig(tmp_path)
    where = ["--config", str(rig.file), "--node", "mini"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(hydra_command(*arguments, *where), capture_output=True, text=True, timeout=WAIT_S)

    assert run("up", "-d", "--log-format", "json").returncode == 0
    follower = subprocess.Popen(hydra_command("logs", "-f", *where), stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        first = json.loads(follower.stdout.readline())
        assert first["node"] == "mini" and "This box is mini" in first["message"]
        assert run("down").returncode == 0
        lines = iter(follower.stdout.readline, "")
        assert any(json.loads(line)["message"] == "Stopped." for line in lines), "to its end"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(WAIT_S) == 130
    finally:
        follower.kill()
        follower.communicate()
    rig.file.write_text(rig.file.read_text().replace('"CPU"', '"CUDA9"'))
    failed = run("up", "-d", "--log-format", "json")
    assert failed.returncode == 4 and len(failed.stderr.splitlines()) == 2
    assert "error: mini ended at once: There is no device CUDA9" in failed.stderr and "mini.log" in failed.stderr
    assert Path(tmp_path / "state/hydra/mini.log").exists()
