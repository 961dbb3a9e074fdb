"""hydra/commands/chat_view.py: what is waited for in words, and reasoning line by line, with a clock of our own."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from hydra.commands.chat_client import Piece
from hydra.commands.chat_view import PATIENCE_S, AnswerView, Thought, waiting_lines, waiting_text


class Paper:
    """A screen that keeps what it is given. `width` columns."""

    height = 24

    def __init__(self, width: int) -> None:
        self.width = width
        self.fixed: list[str] = []
        self.tail: list[str] = []

    def draw(self, fixed: list[str], tail: list[str]) -> None:
        self.fixed += [plain(line) for line in fixed]
        self.tail = [plain(line).rstrip() for line in tail]


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


class Rig:
    def __init__(self, width: int = 40, think: bool = True) -> None:
        self.now = 100.0
        self.paper = Paper(width)
        self.view = AnswerView(self.paper, "standard", think=think, clock=lambda: self.now)  # type: ignore[arg-type]

    def feed(self, text: str = "", reasoning: str = "", tokens: int = 0) -> None:
        self.now += 1.0
        self.view.feed(Piece(text=text, reasoning=reasoning, tokens=tokens))


@pytest.mark.parametrize(("health", "answering", "said"), [
    ({}, False, "reading the prompt… 3 s"),
    ({"state": "ready"}, True, ""),
    ({"state": "loading", "stage": "weights", "node": "mini", "percent": 41.6, "eta_s": 75.0}, False,
     "the head loads: weights on mini · 42 % · 1:15 left"),
    ({"state": "loading"}, False, "the head loads: the model"),
    ({"state": "waiting", "reason": "Peer mini refuses."}, False, "the head waits: Peer mini refuses"),
    ({"state": "loading", "recovering": True, "node": "mini"}, True,
     "recovering: loads: the model on mini; the answer goes on by itself"),
    ({"state": "odd"}, False, "the head is odd")])
def test_what_is_waited_for(health, answering, said):
    assert waiting_text(health, 3.0, answering=answering) == said


@pytest.mark.parametrize("width", [12, 40, 100])
def test_the_bar_fits(width):
    health = {"state": "loading", "percent": 50.0, "node": "mini", "stage": "weights"}
    lines = [plain(line) for line in waiting_lines(health, 0.0, width, answering=False)]
    assert all(cell_len(line) <= width for line in lines)
    assert lines[-1].count("━") == lines[-1].count("╌") == min(width, 40) // 2
    assert "━" not in "".join(waiting_lines({"state": "waiting"}, 0.0, width, answering=False)), "where it is known"


def test_the_line_about_reasoning():
    now = [10.0]
    thought = Thought(lambda: now[0])
    thought.more(0)
    now[0] += 4.2
    assert thought.line() == "thinking… 1 token, 4.2 s"
    thought.more(0)
    assert thought.line() == "thinking… 2 tokens, 4.2 s", "a head that does not count: a token a piece"
    thought.more(123)
    thought.end()
    now[0] += 9
    thought.end()
    assert thought.line() == "thought: 123 tokens, 4.2 s"


def test_reasoning_is_printed_line_by_line():
    rig = Rig(width=20)
    for word in ["\n\nWhat", "is", "there", "to", "be", "weighed,", "and", "what", "is", "not?\nA", "second", "line"]:
        rig.feed(reasoning=f"{word} ")
    assert rig.paper.fixed == ["What is there to be", "weighed, and what is", "not?"]
    assert rig.paper.tail == ["A second line"]
    rig.feed("Yes.\n\nAnd\n")
    assert rig.paper.fixed[3:] == ["A second line", "thought: 12 tokens, 12.0 s", "", "Yes."]
    assert rig.paper.tail == ["", "And"]
    rig.view.close()
    assert rig.paper.fixed[7:] == ["", "And"] and rig.paper.tail == []
    assert rig.view.text == "Yes.\n\nAnd\n"


@pytest.mark.parametrize("width", [11, 33, 80])
def test_folding_at_any_moment_loses_and_repeats_no_word(width):
    words = [f"word{number}" for number in range(60)]
    for moment in range(0, 60, 7):
        rig = Rig(width, think=False)
        for number, word in enumerate(words):
            rig.feed(reasoning=word + ("\n" if number % 9 == 8 else " "))
            if number in (moment, moment + 3, moment + 4):
                rig.view.toggle()
        rig.feed("So.")
        rig.view.close()
        shown = " ".join(rig.paper.fixed).split()
        end = shown.index("thought:")
        # Unfolded, folded, unfolded: at the end everything was shown once.
        assert shown[:end] == words and rig.view.reasoning.split() == words


def test_folded_reasoning_is_one_line():
    rig = Rig(80, think=False)
    rig.feed(reasoning="weigh", tokens=3)
    rig.feed(reasoning=" this", tokens=5)
    assert rig.paper.tail == ["thinking… 5 tokens, 1.0 s (Ctrl-T unfolds)"] and rig.paper.fixed == []
    rig.feed("So.")
    rig.view.close()
    assert rig.paper.fixed == ["thought: 5 tokens, 2.0 s", "", "So."]


def test_silence_is_explained_after_a_moment():
    rig = Rig(80)
    rig.view.tick()
    assert rig.paper.tail == []
    rig.now += PATIENCE_S
    rig.view.tick()
    assert rig.paper.tail == ["reading the prompt… 0 s"] or rig.paper.tail == ["reading the prompt… 1 s"]
    rig.feed("word")
    assert rig.paper.tail == ["word"]
    rig.now += 9
    rig.view.tick()
    assert rig.paper.tail == ["word"], "a slow answer is no news"
    rig.view.waiting({"state": "waiting", "recovering": True, "reason": "Peer mini is gone."})
    rig.view.tick()
    assert rig.paper.tail == ["word", "recovering: waits: Peer mini is gone; the answer goes on by itself"]
    rig.feed(" more")
    assert rig.paper.tail == ["word more"]
