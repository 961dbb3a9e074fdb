"""`hydra ps`: a table where it fits, a few lines a node where not; the watched screen, at a real terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra import cli
from hydra.commands import ps
from hydra.commands.child import hydra_command
from hydra.peer.launch import start_peer
from tests.fake_head import Head
from tests.terminal_support import Terminal

TOWER = {"name": "tower", "role": "head", "state": "ready", "device": "NVIDIA GeForce RTX 5060 Ti", "layers": 40,
         "devices": [{"utilisation": 97, "temperature": 61}], "memory_used": 15 * 2**30, "memory_total": 2**34,
         "rtt_ms": None, "restarts": 0, "uptime_s": 43_390}
MINI = {"name": "mini", "role": "peer", "state": "up", "device": "NVIDIA GeForce RTX 3060", "layers": 25,
        "devices": [{"utilisation": 88, "temperature": 58, "memory_used": 2**33, "memory_total": 12 * 2**30}],
        "memory_used": 2**33, "memory_total": 12 * 2**30, "rtt_ms": 0.34, "restarts": 1, "uptime_s": 200_000}
REQUEST = {"id": 7, "state": "decode", "prompt_tokens": 12, "generated_tokens": 30, "tokens_per_s": 29.2, "age_s": 3.1,
           "resumed": 0, "pause": ""}
STATUS: dict[str, Any] = {"state": "ready", "reason": "", "model": {}, "nodes": [TOWER, MINI], "requests": [REQUEST]}


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    made.health = [STATUS]
    yield made
    made.close()


def test_a_row_a_node_where_there_is_room():
    lines = [text for text, _ in ps.view(STATUS, 120)]
    assert lines[0].split() == ps.COLUMNS
    assert re.split(r"\s{2,}", lines[1]) == ["tower", "head", "ready", "RTX 5060 Ti", "40", "15.0/16.0 GiB",
                                             "97 % 61 °C", "-", "0", "12:03:10"]
    assert re.split(r"\s{2,}", lines[2]) == ["mini", "peer", "up", "RTX 3060", "25", "8.0/12.0 GiB", "88 % 58 °C",
                                             "0.3 ms", "1", "2 d 7 h"]
    assert [line.index("RTX") for line in lines[1:3]] == [lines[0].index("DEVICE")] * 2, "left-aligned"
    assert lines[3].startswith("request 7: decode")
    assert ps.view(STATUS, None) == ps.view(STATUS, 120), "a pipe is as wide as it takes"


@pytest.mark.parametrize("columns", [80, 40])
def test_a_few_lines_a_node_where_there_is_none(columns):
    lines = [text for text, _ in ps.view(STATUS, columns)][:-1]
    assert max(map(len, lines)) <= columns
    said = " ".join(" ".join(lines).split())
    for words in ("tower head ready", "RTX 5060 Ti 40 layers 15.0/16.0 GiB 97 % 61 °C 0 restarts up 12:03:10",
                  "mini peer up", "RTX 3060 25 layers 8.0/12.0 GiB 88 % 58 °C rtt 0.3 ms 1 restarts up 2 d 7 h"):
        assert words in said
    assert len(lines) <= (6 if columns == 80 else 8)


def test_states_and_reasons():
    failed = {"state": "failed", "reason": "no peer", "nodes": [{**TOWER, "state": "failed"},
                                                                {"name": "x", "role": "peer", "state": "refused"}]}
    lines = ps.view(failed, 120)
    assert [style for _, style in lines] == ["bold", "red", "yellow", "yellow"]
    assert lines[3][0] == "failed: no peer"
    assert re.split(r"\s{2,}", lines[2][0]) == ["x", "peer", "refused", *"-------"], "unknown is a dash, not a nought"


def test_two_cards_and_times():
    assert "RTX 5060 Ti +1" in ps.view({"nodes": [{**TOWER, "devices": [{}, {}]}]}, None)[1][0]
    assert [ps.up_text(s) for s in (0, 75, 3700, 86400, 200_000)] == ["0:00", "1:15", "1:01:40", "1 d 0 h", "2 d 7 h"]


@pytest.mark.parametrize("columns", [80, 40])
def test_watched_at_a_terminal(head, tmp_path, columns):
    terminal = Terminal(["ps", "--watch", "0.2", "--url", head.url], columns, tmp_path, rows=16)
    screen = terminal.until("request 7: decode")
    assert max(map(len, screen.splitlines())) <= columns and "q leaves" in screen
    assert "\x1b[?1049h" in terminal.raw, "a screen of its own"
    drawn = terminal.raw
    head.health = [{**STATUS, "requests": [{**REQUEST, "generated_tokens": 31}]}]
    terminal.until("31 generated")
    assert "\x1b[2J" not in terminal.raw[len(drawn):], "drawn over, and never cleared: nothing flickers"
    terminal.resize(120, 16)
    assert "RESTARTS" in terminal.until("RESTARTS"), "there is room for the table now, and it is drawn at once"
    head.close()
    terminal.until("No head answers")
    assert "tower" in terminal.text(), "what was known stays to be seen"
    terminal.send("q")
    assert terminal.end() == 0
    assert terminal.raw.endswith("\x1b[?25h\x1b[?1049l"), "the cursor is seen again, and the screen is as it was before"


@pytest.mark.parametrize("how", ["q", "\x03"])
def test_the_terminal_is_left_as_it_was(head, tmp_path, how):
    terminal = Terminal(["ps", "-w", "--url", head.url], 80, tmp_path)
    before = termios.tcgetattr(terminal.child.child_fd)
    terminal.until("q leaves")
    assert termios.tcgetattr(terminal.child.child_fd)[3] != before[3], "no echo meanwhile"
    terminal.send("x")
    terminal.send(how)
    terminal.wait_for(lambda: terminal._over or "\x1b[?1049l" in terminal.raw)
    after = termios.tcgetattr(terminal.child.child_fd)
    assert terminal.end() == 0 and after[:4] == before[:4]


@pytest.mark.parametrize("colour", [True, False])
def test_colour(head, tmp_path, colour):
    head.health = [{**STATUS, "nodes": [{**TOWER, "state": "failed"}]}]
    terminal = Terminal(["ps", "--url", head.url], 120, tmp_path, NO_COLOR="" if colour else "1")
    terminal.until("request 7")
    assert terminal.end() == 0 and ("\x1b[31m" in terminal.raw) is colour


def test_every_so_often_without_a_terminal(head):
    process = subprocess.Popen(hydra_command("ps", "-w", "0.1", "--json", "--url", head.url), stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(3):
        assert json.loads(process.stdout.readline())["nodes"][0]["name"] == "tower"
    process.terminate()
    process.communicate(timeout=30)


def test_seconds_alone_are_an_error(head, capsys):
    assert cli.run(["ps", "5", "--url", head.url]) == 2
    assert "without --watch" in capsys.readouterr().err


TOML = """\
[model]
path = "m.gguf"
[[nodes]]
name = "tower"
role = "head"
host = "192.0.2.1"
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {port}
layers = 25
"""


def test_on_the_peer_box_the_peers_are_asked(tmp_path, capsys, monkeypatch):
    """The head's API is on its loopback by default: from the other box that is not it, and must not look like it."""
    for name in ("HYDRA_API", "HYDRA_NODE", "HYDRA_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with start_peer(device="CPU", threads=1, name="mini") as peer:
        Path("hydra.toml").write_text(TOML.format(port=peer.port))
        assert cli.run(["ps"]) == 0
        out, err = capsys.readouterr()
        assert "The API of tower is for its own box" in err
        lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
        assert lines[1][:3] == ["tower", "head", "not asked"]
        assert lines[2][:3] == ["mini", "peer", "ok"] and lines[2][4] == "25" and "GiB" in lines[2][5]
        assert lines[2][7].endswith(" ms") and lines[2][8] == "0"
        assert cli.run(["ps", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["nodes"][1]["heads"] == 0
    assert cli.run(["ps"]) == 5
    assert 'with [head] api_host = "0.0.0.0"' in capsys.readouterr().err


def test_on_the_heads_box_the_head_is_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_NODE", "tower")
    Path("hydra.toml").write_text(TOML.format(port=1).replace("[[nodes]]", "[head]\napi_port = 9\n[[nodes]]", 1))
    assert cli.run(["ps"]) == 5
    assert "No head answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert os.environ["HYDRA_NODE"] == "tower"
