"""hydra/commands/chat_screen.py on a terminal emulator: what is printed stays, what is drawn anew leaves no trace."""

from __future__ import annotations

import random

import pyte
import pytest

from hydra.commands.chat_screen import Screen
from tests.terminal_support import resize


class Rig:
    def __init__(self, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        self.emulator = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self.stream = pyte.Stream(self.emulator)
        self.written: list[str] = []
        self.screen = Screen(self.write, lambda: self.size)

    def write(self, text: str) -> None:
        self.written.append(text)
        self.stream.feed(text)

    def resize(self, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        resize(self.emulator, columns, rows)

    def lines(self) -> list[str]:
        """Everything, from the scrollback on."""
        columns = range(self.emulator.columns)
        above = ["".join(line[column].data for column in columns).rstrip() for line in self.emulator.history.top]
        return ended([*above, *(line.rstrip() for line in self.emulator.display)])


def ended(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (20, 5)])
def test_any_order_of_pictures(columns, rows):
    random.seed(columns)
    for _ in range(60):
        rig = Rig(columns, rows)
        printed: list[str] = []
        tail: list[str] = []
        for _ in range(40):
            fixed = [text(columns) for _ in range(random.choice([0, 0, 1, 2, 9]))]
            if tail and random.random() < 0.5:
                cut = random.randint(0, len(tail))
                fixed, tail = tail[:cut] + fixed, tail[cut:]
            elif random.random() < 0.5:
                tail = [text(columns) for _ in range(random.choice([0, 1, 3, 30]))]
            elif tail:
                tail = [*tail[:-1], (tail[-1] + "x")[:columns - 1]]
            rig.screen.draw(fixed, tail)
            printed += fixed
            assert rig.lines() == ended(printed + tail[1 - rows:])


def text(columns: int) -> str:
    return "".join(random.choice("ab ") for _ in range(random.randint(0, columns - 1))).rstrip()


def test_only_what_changes_is_written():
    rig = Rig(40, 10)
    rig.screen.draw(["title"], ["one", "two"])
    rig.written.clear()
    rig.screen.draw([], ["one", "two more"])
    assert "one" not in rig.written[0] and "two" not in rig.written[0] and " more" in rig.written[0]
    rig.written.clear()
    rig.screen.draw([], ["one", "two more"])
    assert rig.written == [], "nothing changes, nothing is written"
    rig.screen.draw(["one", "two more"], [])
    assert "one" not in rig.written[0], "what stands there already is printed by leaving it"
    assert rig.lines() == ["title", "one", "two more"]


def test_a_picture_is_one_write():
    rig = Rig(40, 10)
    rig.screen.draw(["a", "b"], ["c", "d"])
    assert len(rig.written) == 1 and rig.written[0].startswith("\x1b[?2026h") and rig.written[0].endswith("\x1b[?2026l")


@pytest.mark.parametrize(("columns", "rows"), [(80, 10), (30, 10), (40, 5), (25, 4), (90, 40)])
def test_a_window_that_changes_loses_nothing_that_was_printed(columns, rows):
    rig = Rig(40, 10)
    printed = [f"line {number}" for number in range(25)]
    rig.screen.draw(printed, ["tail one", "tail two", "tail three"])
    rig.resize(columns, rows)
    rig.screen.draw(["last"], ["tail"])
    rig.screen.draw([], [])
    lines = rig.lines()
    assert lines[-1] == "last" and [line for line in lines if line.startswith("line")] == printed


def test_a_tail_never_is_higher_than_the_window():
    rig = Rig(40, 6)
    rig.screen.draw(["kept"], [f"row {number}" for number in range(50)])
    assert rig.lines() == ["kept", *[f"row {number}" for number in range(45, 50)]]
    rig.screen.draw(["done"], [])
    assert rig.lines() == ["kept", "done"]
