"""A real terminal for tests: a program on a pseudo-terminal, keystrokes in, and the screen that a person would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).parent.parent
WAIT_S = 30.0
HISTORY_LINES = 2000


def resize(screen: pyte.HistoryScreen, columns: int, rows: int) -> None:
    """As terminals do it: a lower window lets lines out at its top, into the scrollback. pyte drops them, and lets the
    cursor stay where it was."""
    out = max(0, screen.cursor.y - rows + 1)
    for line in range(out):
        screen.history.top.append(screen.buffer[line])
    screen.cursor.y, screen.lines, lost = screen.cursor.y - out, rows, screen.lines
    for line in range(lost):
        if line + out < lost:
            screen.buffer[line] = screen.buffer[line + out]
        else:
            screen.buffer.pop(line, None)
    screen.resize(rows, columns)
    screen.dirty.update(range(rows))


class Terminal:
    """`hydra ARGUMENTS` on a terminal of so many columns and rows, at home in `home`. `raw`: all that was written."""

    def __init__(self, arguments: Sequence[str], columns: int, home: Path, rows: int = 30, *,
                 python: str = sys.executable, **env: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=HISTORY_LINES, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.raw = ""
        self._over = False
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        self.child = pexpect.spawn(python, ["-m", "hydra", *arguments], dimensions=(rows, columns),
                                   timeout=WAIT_S, encoding="utf-8", cwd=str(home),
                                   env={**clean, "HOME": str(home), "TERM": "xterm-256color",
                                        "PYTHONPATH": str(ROOT), **env})
        # Programs ask a terminal where its cursor is, and wait for the answer.
        self.screen.write_process_input = self.child.send

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def take(self, wait_s: float = 0.1) -> None:
        """Read what there is."""
        try:
            piece = self.child.read_nonblocking(4096, wait_s)
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            self._over = True
            return
        self.raw += piece
        self._stream.feed(piece)

    def wait_for(self, condition: Callable[[], bool], what: str = "") -> None:
        """Until the condition holds; the screen is in the error where it does not."""
        deadline = time.monotonic() + WAIT_S
        while not condition() and time.monotonic() < deadline and not self._over:
            self.take()
        assert condition(), f"{what} not on the screen:\n{self.all()}"

    def until(self, text: str) -> str:
        """The screen once `text` is on it."""
        self.wait_for(lambda: text in self.text(), text)
        return self.text()

    def until_gone(self, text: str) -> str:
        self.wait_for(lambda: text not in self.text(), f"still {text}")
        return self.text()

    def text(self) -> str:
        """What is to be seen now."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def all(self) -> str:
        """The same, and what has scrolled out above it."""
        above = ["".join(line[column].data for column in range(self.screen.columns)).rstrip()
                 for line in self.screen.history.top]
        return "\n".join([*above, self.text()])

    def resize(self, columns: int, rows: int) -> None:
        resize(self.screen, columns, rows)
        self.child.setwinsize(rows, columns)

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        deadline = time.monotonic() + WAIT_S
        while not self._over and time.monotonic() < deadline:
            self.take()
        if not self.child.closed:
            self.child.close()
        return int(self.child.exitstatus or 0)

    def close(self) -> None:
        """End it, whatever it does."""
        self.child.close(force=True)
