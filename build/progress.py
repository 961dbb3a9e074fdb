"""Runs a build command, keeps its whole output in a log file, and shows one line: how far it is, and that it is alive.

    python3 progress.py --what "llama.cpp" --log build.log -- COMMAND [ARGUMENT …]

Progress comes from ninja's ``[n/m]`` line starts. On a terminal the line redraws itself every second; elsewhere a new
line appears every 15 s, also while nothing is printed (a CUDA file can compile for minutes). The exit status is the
command's; on failure the first error and the last lines of the log are shown with the log's name. Knows nothing of what
is built. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

NINJA = re.compile(rb"^\s*\[(\d+)/(\d+)\]")
# What compilers, linker and CMake say first when they fail; with parallel jobs and pip around, rarely at the end.
FIRST_ERROR = re.compile(rb"CMake Error|\b(fatal )?error: |undefined reference|Killed signal")
LINE_EVERY_S = 15.0
TAIL_LINES = 12
ERROR_LINES = 12


def clock(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """How far the command is, from the lines that it has printed."""

    def __init__(self, what: str, now: float) -> None:
        self.what = what
        self.started = now
        self.first_step_at = now
        self.done = 0
        self.total = 0
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self.first_error: list[bytes] = []

    def feed(self, line: bytes, now: float) -> None:
        self.tail.append(line)
        if self.first_error or FIRST_ERROR.search(line):
            self.first_error = [*self.first_error, line][:ERROR_LINES]
        match = NINJA.match(line)
        if match is None:
            return
        if self.total == 0:
            self.first_step_at = now
        self.done, self.total = int(match[1]), int(match[2])

    def text(self, now: float) -> str:
        elapsed = clock(now - self.started)
        if self.total == 0:
            return f"{self.what}: preparing, {elapsed}"
        line = f"{self.what}: {100 * self.done // self.total:3d} % ({self.done}/{self.total}), {elapsed} elapsed"
        if self.done >= self.total:
            return f"{line}, packing up"
        # The first steps say little: small C files, all cores starting at once.
        if self.done >= 8:
            left = (now - self.first_step_at) * (self.total - self.done) / self.done
            line += f", about {clock(left)} left"
        return line


class Display:
    """One line redrawn on a terminal; a line every LINE_EVERY_S elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.last = float("-inf")

    def show(self, text: str, now: float, *, force: bool = False) -> None:
        if not force and now - self.last < (1.0 if self.terminal else LINE_EVERY_S):
            return
        self.last = now
        sys.stderr.write(f"\r\033[K{text}" if self.terminal else f"{text}\n")
        sys.stderr.flush()

    def finish(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}\n" if self.terminal else f"{text}\n")
        sys.stderr.flush()


def run(what: str, log_path: Path, command: list[str]) -> int:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    progress, display = Progress(what, time.monotonic()), Display()
    with log_path.open("wb") as log, selectors.DefaultSelector() as selector:
        # A session of its own, so that a stop reaches the compilers below pip and cmake too.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert child.stdout is not None

        def stop(number: int, _frame: object) -> None:
            os.killpg(child.pid, signal.SIGTERM)
            display.finish(f"{what}: stopped by signal {number}")
            sys.exit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        selector.register(child.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if selector.select(timeout=1.0):
                data = os.read(child.stdout.fileno(), 65536)
                if not data:
                    break
                log.write(data)
                log.flush()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    progress.feed(line, time.monotonic())
            display.show(progress.text(time.monotonic()), time.monotonic())
        if rest:
            progress.feed(rest, time.monotonic())
        status = child.wait()
    took = clock(time.monotonic() - progress.started)
    if status == 0:
        display.finish(f"{what}: done in {took}")
        return 0
    display.finish(f"{what}: failed after {took} (status {status}). The whole log is {log_path}")
    for title, lines in (("the first error", progress.first_error), ("the last lines", list(progress.tail))):
        if lines:
            sys.stderr.write(f"  {title}:\n")
        for raw in lines:
            sys.stderr.write(f"    {raw.decode(errors='replace')[:400]}\n")
    return status if status > 0 else 128 - status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--what", required=True, help="the name at the start of the line")
    parser.add_argument("--log", required=True, type=Path, help="where the whole output goes")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    return run(arguments.what, arguments.log, arguments.command)


if __name__ == "__main__":
    sys.exit(main())
