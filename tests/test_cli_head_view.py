"""hydra/commands/head_view.py: the wait and the load of a head, told from the supervisor's events."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from hydra import config, console
from hydra.commands.head_view import HeadView
from hydra.head.supervisor import Event

TOML = """\
[model]
path = "m.gguf"
[head]
peer_wait_s = 90
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
"""
WAITS = Event("peer", "Waiting for peer mini (10.0.0.2:50052) refuses the connection; next look in 4 s, 80 s left.",
              "mini", "warning", {"retry_s": 4.0, "state": "refused"})
INFO = {"model": "Qwen", "n_layer": 64, "layers": {"mini": 25, "tower": 39}, "n_ctx": 65536,
        "mtp": {"enabled": True, "n_max": 3}, "notes": ["A note."]}


@pytest.fixture
def view(tmp_path: Path, monkeypatch):
    file = tmp_path / "hydra.toml"
    file.write_text(TOML)
    console.err.cache_clear()
    console.log_to_stderr("tower")
    now = [100.0]
    made = HeadView(config.load(file, {}), 1_000_000_000, clock=lambda: now[0])
    made.now = now  # type: ignore[attr-defined]
    yield made
    made.close()
    logging.getLogger().handlers[:] = []
    console.err.cache_clear()


def told(capsys) -> list[str]:
    return [line.split(maxsplit=3)[3] for line in capsys.readouterr().err.splitlines()]


def test_lines_off_a_terminal(view, capsys):
    view.on_event(Event("state", "waiting: waiting for peer mini", data={"state": "waiting"}))
    view.on_event(WAITS)
    view.on_event(Event("state", "loading: …", data={"state": "loading"}))
    view.on_event(Event("progress", "weights", "mini", data={"stage": "weights", "fraction": 0.25, "layers_done": 16,
                                                            "layers_total": 64, "eta_s": 75.0}))
    view.on_event(Event("state", "ready", data={"state": "ready"}))
    view.ready(INFO)
    view.on_event(Event("failure", "The engine ended by SIGABRT.", level="error"))
    assert told(capsys) == [
        WAITS.message, "Loading the model.", "weights mini · 16/64 layers · 250.0 MB of 1.0 GB · 1:15 left",
        "Qwen: 64 layers (25 on mini, 39 on tower), context 65536, MTP up to 3.", "A note.",
        "Serving http://127.0.0.1:8080/v1; talk to it with `hydra chat`. Ctrl-C stops it.",
        "The engine ended by SIGABRT."]


def test_a_countdown_on_a_terminal(view, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    console.err.cache_clear()
    view.on_event(WAITS)
    view.now[0] += 3
    view.tick()
    view.close()
    err = capsys.readouterr().err
    assert "next look 4 s · giving up 1:30 · Waiting for peer mini" in err
    assert "next look 1 s · giving up 1:27" in err
    assert "warning" not in err, "redrawn, not logged"
    view.on_event(Event("peer", "peer mini runs hydra 0.0.9, this head 0.1.0; …", "mini", "error", {"retry_s": 9.0}))
    assert "runs hydra 0.0.9" in capsys.readouterr().err, "what will not mend itself is said as a line"


def test_once_served_it_does_not_speak_of_giving_up(view, capsys, monkeypatch):
    view.ready(INFO)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console.err.cache_clear()
    view.on_event(WAITS)
    view.close()
    assert "giving up" not in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 100])
def test_a_block_on_a_terminal(view, capsys, monkeypatch, columns):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    console.err.cache_clear()
    view.ready(INFO)
    err = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    rows = dict(line.rstrip().split(maxsplit=1) for line in err.splitlines() if line.startswith("  ") and line.strip())
    assert rows["model"] == "Qwen, 64 layers" and rows["layers"] == "25 on mini, 39 on tower"
    assert rows["context"] == "65536 tokens" and rows["drafts"] == "MTP up to 3"
    assert rows["API"] == "http://127.0.0.1:8080/v1"
    curl = [line for line in err.splitlines() if line.startswith("  curl")]
    assert curl and curl[0].endswith("""-d '{"messages":[{"role":"user","content":"Hello"}]}'"""), "to be copied"
    view.ready(INFO)
    assert "curl" not in capsys.readouterr().err, "after a recovery a line is enough"
