"""build/progress.py: what it shows, what it keeps, and that the command's exit status is its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "build" / "progress.py"
_spec = importlib.util.spec_from_file_location("progress", SCRIPT)
assert _spec is not None and _spec.loader is not None
progress = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(progress)


def run(log: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--what", "thing", "--log", log, "--", *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.9, "1:15"), (3675, "1:01:15")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text


def test_percent_and_time_left_come_from_ninja_lines():
    state = progress.Progress("thing", 100.0)
    state.feed(b"*** Configuring CMake...", 105.0)
    assert state.text(110.0) == "thing: preparing, 0:10"
    state.feed(b"  [1/40] /usr/bin/g++ -c a.cpp", 110.0)
    assert state.text(111.0) == "thing:   2 % (1/40), 0:11 elapsed"
    state.feed(b"a.cpp:3: warning: [2/9] is not a step", 112.0)
    state.feed(b"  [10/40] /usr/bin/g++ -c b.cpp", 130.0)
    # 10 steps in the 20 s since the first: 30 more take 60 s.
    assert state.text(130.0) == "thing:  25 % (10/40), 0:30 elapsed, about 1:00 left"
    state.feed(b"  [40/40] link", 190.0)
    assert state.text(190.0) == "thing: 100 % (40/40), 1:30 elapsed, packing up"


def test_success_keeps_the_whole_log_and_says_done(tmp_path):
    log = tmp_path / "deeper" / "log"
    done = run(log, sys.executable, "-c", "print('[1/2] a'); print('[2/2] b', end='')")
    assert done.returncode == 0
    assert log.read_text() == "[1/2] a\n[2/2] b"
    assert "thing: done in 0:0" in done.stderr
    assert "\r" not in done.stderr, "no terminal, so no redrawing"
    assert done.stdout == ""


def test_failure_shows_the_end_of_the_log_and_its_name(tmp_path):
    log = tmp_path / "log"
    code = "import sys; [print('line', n) for n in range(100)]; print('boom', file=sys.stderr); sys.exit(3)"
    failed = run(log, sys.executable, "-u", "-c", code)
    assert failed.returncode == 3
    assert str(log) in failed.stderr
    assert "    boom\n" in failed.stderr
    assert "    line 99\n" in failed.stderr
    assert "    line 10\n" not in failed.stderr, "only the last lines"
    assert "first error" not in failed.stderr


def test_failure_shows_the_first_error_though_much_follows(tmp_path):
    code = "print('a.cpp:3: error: no such thing'); print('  in this line')\n"
    code += "[print('noise', n) for n in range(99)]; 1/0"
    failed = run(tmp_path / "log", sys.executable, "-c", code)
    assert failed.returncode == 1
    assert "  the first error:\n    a.cpp:3: error: no such thing\n      in this line\n" in failed.stderr
    assert "    noise 98\n" in failed.stderr
    assert "    noise 50\n" not in failed.stderr


def test_a_stop_reaches_the_command_below(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    ours = subprocess.Popen(
        [sys.executable, SCRIPT, "--what", "thing", "--log", tmp_path / "log", "--", "sh", "-c",
         f'"{sys.executable}" -c "{code}"; true'],
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline, "the command never started"
            time.sleep(0.05)
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(timeout=20) == 128 + signal.SIGTERM
        grandchild = int(pid_file.read_text())
        while _alive(grandchild):
            assert time.monotonic() < deadline, "the compiler outlived its build"
            time.sleep(0.05)
    finally:
        if ours.poll() is None:
            ours.kill()
            ours.wait(timeout=10)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")
