"""`hydra chat` in a real terminal: keystrokes in, screen out, wide and narrow, with and without colour."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from tests.fake_head import Head

WAIT_S = 30.0


class Terminal:
    """One hydra process on a pseudo-terminal, and the screen that a person would see."""

    def __init__(self, arguments: list[str], columns: int, home: Path, **env: str) -> None:
        self.screen = pyte.Screen(columns, 30)
        self.stream = pyte.Stream(self.screen)
        self.raw = ""
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        self.child = pexpect.spawn(sys.executable, ["-m", "hydra", *arguments], dimensions=(30, columns),
                                   timeout=WAIT_S, encoding="utf-8", cwd=str(home),
                                   env={**clean, "HOME": str(home), "TERM": "xterm-256color",
                                        "PYTHONPATH": str(Path(__file__).parent.parent), **env})

    def until(self, text: str) -> str:
        """The screen once `text` is on it."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                piece = self.child.read_nonblocking(4096, 0.1)
                self.raw += piece
                self.stream.feed(piece)
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                break
            if text in self.text():
                return self.text()
        assert text in self.text(), self.text()
        return self.text()

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus or 0)


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


@pytest.mark.parametrize("columns", [80, 40])
def test_a_conversation(head, tmp_path, columns):
    head.says("Hello from the other side.", reasoning="let me think")
    terminal = Terminal(["chat", "--url", head.url, "--stats"], columns, tmp_path)
    terminal.until(">>>")
    terminal.child.send("hi there\r")
    screen = terminal.until("context 12 %")
    assert "let me think" in screen and "Hello from the other side." in screen
    terminal.child.send("/set top_k 5\r")
    terminal.until("top_k = 5")
    terminal.child.send("/nonsense\r")
    terminal.until("error: There is no command")
    terminal.child.send('"""one\r')
    terminal.until("...")
    terminal.child.send('two"""\r')
    deadline = time.monotonic() + WAIT_S
    while len(head.asked) < 2 and time.monotonic() < deadline:
        terminal.until(">>>")
    assert head.asked[1]["messages"] == [
        {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "Hello from the other side."},
        {"role": "user", "content": "one\ntwo"}] and head.asked[1]["top_k"] == 5
    terminal.until(">>>")
    terminal.child.send("\x04")
    assert terminal.end() == 0
    assert "hi there" in (tmp_path / ".local/state/hydra/chat_history").read_text(), "kept for the next conversation"


def test_no_color_means_none(head, tmp_path):
    head.says("plain")
    terminal = Terminal(["chat", "hi", "--url", head.url], 80, tmp_path, NO_COLOR="1")
    terminal.until("plain")
    assert terminal.end() == 0 and "\x1b[3" not in terminal.raw
    head.health = [{"state": "failed", "reason": "broken", "model": "m"}]
    plain = Terminal(["chat", "hi", "--url", head.url], 80, tmp_path, NO_COLOR="1")
    plain.until("error: The head has failed")
    coloured = Terminal(["chat", "hi", "--url", head.url], 80, tmp_path)
    coloured.until("error: The head has failed")
    assert "\x1b[31m" not in plain.raw and "31m" in coloured.raw
    assert plain.end() == coloured.end() == 8
