"""hydra/console.py: plain lines off a terminal, bars and colour only on one, nothing on stdout but results."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from hydra import console


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    """A console made for this test's own stderr, and the root logger put back afterwards."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    console.err.cache_clear()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    console.err.cache_clear()


def test_error_is_two_plain_lines(capsys):
    console.error("what [bold]happened[/bold] " + "x" * 200, "do\nthis")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: what [bold]happened[/bold] " + "x" * 200 + "\nhint:  do this\n"


def test_log_lines(capsys):
    console.log_to_stderr("mini")
    console.log_to_stderr("mini")
    logging.getLogger("hydra.peer").warning("closed %s:\n  %d bytes", "10.0.0.1", 7)
    logging.getLogger("hydra.peer").debug("not shown")
    out, err = capsys.readouterr()
    level, stamp, node, message = err.split(maxsplit=3)
    assert (out, level, node, message) == ("", "warning", "mini", "closed 10.0.0.1: 7 bytes\n")
    assert len(stamp.split(":")) == 3


def test_log_as_json(capsys):
    console.log_to_stderr("mini", as_json=True, debug=True)
    logging.getLogger("hydra.peer").debug("seen")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["node"], line["message"], line["time"][-1]) == ("debug", "mini", "seen", "Z")


def test_a_logged_exception_shows_where(capsys):
    console.log_to_stderr("mini")
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("hydra").exception("outer")
    assert "Traceback" in capsys.readouterr().err


def test_table_in_a_pipe_is_aligned_and_whole(capsys):
    console.table(["NAME", "LAYERS"], [["tower-of-power", 40], ["x", "y" * 300]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NAME            LAYERS" and lines[1] == "tower-of-power  40"
    assert lines[2].endswith("y" * 300)


def test_loading_off_a_terminal(capsys):
    now = [0.0]
    console.log_to_stderr("tower")
    with console.Loading(logging.getLogger("hydra").info, clock=lambda: now[0]) as loading:
        for step in range(10):
            now[0] = step * 0.5
            loading.update("loading", node="mini", layers_done=step, layers_total=25, bytes_done=step * 10**8,
                           bytes_total=10**9, eta_s=75.0 - step)
        loading.update("warming up")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, "one line each two seconds, and one when the stage changes"
    assert lines[0].endswith("loading mini · 0/25 layers · 0 B of 1.0 GB · 1:15 left")
    assert lines[1].endswith("loading mini · 4/25 layers · 400.0 MB of 1.0 GB · 1:11 left")
    assert lines[3].endswith("warming up")


def test_loading_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    with console.Loading(print) as loading:
        loading.update("loading", node="mini", bytes_done=5, bytes_total=10)
        loading.update("loading", node="mini", bytes_done=10, bytes_total=10)
    err = capsys.readouterr().err
    assert "100 %" in err and "\x1b[" in err and "\x1b[3" not in err, "redrawn, and without colour"


def test_units():
    assert [console.bytes_text(n) for n in (0, 999, 1234, 5_600_000, 7.8e9, 3e12)] == [
        "0 B", "999 B", "1.2 kB", "5.6 MB", "7.8 GB", "3000.0 GB"]
    assert [console.seconds_text(s) for s in (-1, 0.4, 59.6, 3700)] == ["0:00", "0:00", "1:00", "61:40"]


def test_in_a_json_log_everything_is_a_record(capsys):
    console.log_to_stderr("mini", as_json=True)
    console.note("a note")
    console.table(["A"], [["b"]], stderr=True)
    console.error("what\nhappened", "do this", ValueError("inner"))
    try:
        raise ValueError("outer")
    except ValueError:
        logging.getLogger("hydra").exception("with\na trace")
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [record["message"] for record in records] == ["a note", "A", "b", "what happened", "with a trace"]
    assert (records[3]["level"], records[3]["hint"]) == ("error", "do this") and "inner" in records[3]["exception"]
    assert "Traceback" in records[4]["exception"] and "outer" in records[4]["exception"]
