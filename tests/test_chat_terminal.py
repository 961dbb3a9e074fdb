"""`hydra chat` in a real terminal: keystrokes in, screen out, wide and narrow, with and without colour.

The head is a small one of our own that streams what a test says, and waits at gates until the test has seen the screen.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_head import READY, Head, ending, said, thought
from tests.terminal_support import Terminal

Open = Callable[..., Terminal]
ANSWER = """\
# Water

It is **wet**, and `H2O` is what it is made of, as anybody will tell you.

1. one
2. two

```python
def f(x):
    return x
```

Done."""
FIGURES = "context 12 %"


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.fixture
def chat(head: Head, tmp_path: Path) -> Iterator[Open]:
    """Starts `hydra chat`; every terminal is closed at the end."""
    opened: list[Terminal] = []

    def start(*arguments: str, columns: int = 80, rows: int = 30, **env: str) -> Terminal:
        opened.append(Terminal(["chat", "--url", head.url, *arguments], columns, tmp_path, rows, **env))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def ask(terminal: Terminal, question: str) -> str:
    """One question and the screen after its answer."""
    before = terminal.all().count(FIGURES)
    terminal.send(f"{question}\r")
    terminal.wait_for(lambda: terminal.all().count(FIGURES) > before and terminal.text().endswith(">>>"), "the answer")
    return terminal.text()


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("colour", [True, False])
def test_a_conversation(head, chat, tmp_path, columns, colour):
    head.says(*(ANSWER[start:start + 7] for start in range(0, len(ANSWER), 7)), reasoning="let me think")
    terminal = chat(columns=columns, **({} if colour else {"NO_COLOR": "1"}))
    terminal.until(">>>")
    screen = ask(terminal, "hi there")
    assert "let me think\nthought: 1 token, " in screen
    if colour:
        assert "\nWater\n" in screen and "**" not in screen and " 1. one\n 2. two\n" in screen
        assert "\n```python\ndef f(x):\n    return x\n```\n\nDone.\n" in screen
        assert "\x1b[1mwet\x1b[0m" in terminal.raw
        assert re.search(r"\x1b\[[0-9;]*3[0-7]", terminal.raw)
    else:
        assert "# Water\n" in screen and "**wet**" in screen, "the text as it is"
        assert not re.search(r"\x1b\[(\d+;)*[349]\d[;m]", terminal.raw), "no colour at all"
    assert all(len(line) <= columns for line in screen.splitlines())
    figures = screen.splitlines()[-3 if columns == 40 else -2:-1]
    assert " · ".join(figures) == "prompt 504 tok/s · answer 29.2 tok/s · accepted 70 % · context 12 %"
    terminal.send("/set top_k 5\r")
    terminal.until("top_k = 5")
    terminal.send("/nonsense\r")
    terminal.until("error: There is no command")
    terminal.send('"""one\r')
    terminal.until("...")
    ask(terminal, 'two"""')
    assert head.asked[1]["messages"] == [
        {"role": "user", "content": "hi there"}, {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "one\ntwo"}] and head.asked[1]["top_k"] == 5
    terminal.send("\x04")
    assert terminal.end() == 0
    assert "hi there" in (tmp_path / ".local/state/hydra/chat_history").read_text()


def test_an_answer_is_drawn_while_it_comes(head, chat):
    """Each gate is passed when the screen shows what came before it."""
    gates = [threading.Event() for _ in range(4)]
    head.script = [said("First **par"), gates[0], said("agraph**.\n\nSecond"), gates[1], said(".\n\n```c\nint x;\nint"),
                   gates[2], said(" y;\n```\n| a | b |\n|---|---|\n| 1 |"), gates[3], said(" 2 |\n"), *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    terminal.until("First par")
    gates[0].set()
    assert "First paragraph.\n\nSecond" in terminal.until("Second")
    gates[1].set()
    assert "```c\nint x;\nint" in terminal.until("\nint x;\nint")
    gates[2].set()
    terminal.until(" 1")
    gates[3].set()
    screen = terminal.until(FIGURES)
    assert "int y;\n```\n\n a  b\n ────\n 1  2\n" in screen
    assert screen.count("First") == screen.count("Second") == screen.count("int x;") == 1, "nothing is left behind"
    assert terminal.raw.count("First") <= 2, "what has not changed is not written again"


def test_an_answer_longer_than_the_window(head, chat):
    lines = [f"word {number} of an answer" for number in range(60)]
    gate = threading.Event()
    head.script = [said("  \n".join(lines[:40])), gate, said("  \n" + "  \n".join(lines[40:]) + "\n\nEnd."), *ending()]
    terminal = chat(columns=40, rows=10)
    terminal.until(">>>")
    terminal.send("hi\r")
    assert "word 10" not in terminal.until("word 39"), "its end, as high as the window"
    gate.set()
    terminal.until(FIGURES)
    assert [line for line in terminal.all().splitlines() if line.startswith("word")] == lines, "and then all of it"


def test_a_window_that_is_resized(head, chat):
    gates = [threading.Event(), threading.Event()]
    head.script = [said("One is finished.\n\nTwo comes, "), gates[0], said("three comes, and so on to"), gates[1],
                   said(" the end."), *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    terminal.until("Two comes,")
    terminal.resize(30, 12)
    gates[0].set()
    terminal.until("on to")
    terminal.resize(100, 30)
    gates[1].set()
    screen = terminal.until(FIGURES)
    assert screen.count("One is finished.") == 1
    assert "Two comes, three comes, and so on to the end." in screen


def test_reasoning_folds_and_unfolds(head, chat):
    gates = [threading.Event() for _ in range(2)]
    head.script = [thought("I weigh this.\nThen ", 7), gates[0], thought("that.", 123), gates[1], said("So."),
                   *ending()]
    terminal = chat("--hide-think")
    terminal.until(">>>")
    terminal.send("hi\r")
    assert "weigh" not in terminal.until("thinking… 7 tokens, ")
    terminal.send("\x14")
    screen = terminal.until("I weigh this.\nThen")
    assert "thinking…" not in screen
    gates[0].set()
    terminal.until("Then that.")
    terminal.send("\x14")
    terminal.until("thinking… 123 tokens")
    gates[1].set()
    screen = terminal.until(FIGURES)
    assert re.search(r"I weigh this\.\nThen that\.\nthought: 123 tokens, \d+\.\d s\n\nSo\.\n", screen)
    assert "\x1b[2mI weigh this.\x1b[0m" in terminal.raw
    terminal.send("/think\r")
    terminal.until("Reasoning is shown.")
    terminal.wait_for(lambda: terminal.text().count("Then that.") == 2, "the last reasoning once more")


def test_folded_from_the_start_and_left_so(head, chat):
    head.says("So.", reasoning="I weigh this.")
    terminal = chat("--hide-think", columns=40)
    terminal.until(">>>")
    assert "weigh" not in ask(terminal, "hi") and "thought: 1 token, " in terminal.text()
    terminal.send("\x14")
    terminal.until("Reasoning is shown.")
    assert "I weigh this." in ask(terminal, "hi again")


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(head, chat):
    gate = threading.Event()
    head.script = [said("It begins "), gate, *(said("and goes on ") for _ in range(2000)), *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    terminal.until("It begins")
    terminal.send("\x03")
    terminal.until("[stopped]")
    terminal.until("[stopped]\n>>>")
    gate.set()
    assert head.hung_up.wait(30), "the head is told by the end of the connection"
    head.says("fine")
    assert "fine" in ask(terminal, "again")
    assert [turn["content"] for turn in head.asked[1]["messages"]] == ["hi", "It begins ", "again"]
    terminal.send("half a line\x03")
    terminal.until("Ctrl-D or /bye leaves.")
    terminal.send("/bye\r")
    assert terminal.end() == 0


def test_ctrl_c_before_an_answer_takes_the_question_back(head, chat):
    gate = threading.Event()
    head.script = [gate, *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    terminal.until("reading the prompt… ")
    terminal.send("\x03")
    assert "reading" not in terminal.until("[stopped; /regen asks again]")
    gate.set()
    head.says("now")
    assert "now" in ask(terminal, "/regen")
    assert [turn["content"] for turn in head.asked[1]["messages"]] == ["hi"]


def test_keys_typed_during_an_answer_go_to_the_next_question(head, chat):
    gate = threading.Event()
    head.script = [said("First."), gate, *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    terminal.until("First.")
    terminal.send("typed ahead")
    gate.set()
    screen = terminal.until(">>> typed ahead")
    assert screen.count("typed ahead") == 1
    head.says("Second.")
    ask(terminal, "!")
    assert head.asked[1]["messages"][-1]["content"] == "typed ahead!"


def test_pasted_lines_and_alt_enter_are_one_message(head, chat):
    head.says("ok")
    terminal = chat()
    terminal.until(">>>")
    terminal.send("\x1b[200~one\r\ntwo\r\n/three\x1b[201~")
    terminal.until("/three")
    ask(terminal, "\x1b\rfour")
    assert head.asked[0]["messages"][0]["content"] == "one\ntwo\n/three\nfour"


def test_history_of_an_earlier_chat(head, chat):
    head.says("ok")
    terminal = chat()
    terminal.until(">>>")
    terminal.send('"""of two\r')
    terminal.until("...")
    ask(terminal, 'lines"""')
    terminal.send("/exit\r")
    assert terminal.end() == 0
    later = chat()
    later.until(">>>")
    later.send("\x1b[A")
    later.until("/exit")
    later.send("\x1b[A")
    later.until("of two")
    ask(later, "")
    assert head.asked[1]["messages"][0]["content"] == "of two\nlines", "a message of several lines is one entry"


def test_tab_completes(head, chat, tmp_path):
    (tmp_path / "notes.txt").write_text("some notes")
    terminal = chat()
    terminal.until(">>>")
    terminal.send("/sy\t")
    terminal.until(">>> /system")
    terminal.send("\x15/set see\t")
    terminal.until(">>> /set seed")
    terminal.send("7\r")
    terminal.until("seed = 7")
    terminal.send("/read no\t")
    terminal.until("/read notes.txt")
    terminal.send("\r")
    terminal.until("notes.txt (10 characters) goes before the next question.")


def test_commands_that_need_the_terminal(head, chat, tmp_path):
    head.says("an answer")
    terminal = chat(EDITOR="sh -c 'echo better > \"$0\"'")
    terminal.until(">>>")
    terminal.send("/regen\r")
    terminal.until("There is no question to ask again.")
    ask(terminal, "hi")
    terminal.send("/copy\r")
    terminal.until("9 characters given to the terminal.")
    assert "\x1b]52;c;YW4gYW5zd2Vy\x07" in terminal.raw
    ask(terminal, "/edit")
    assert head.asked[1]["messages"] == [{"role": "user", "content": "better"}]
    terminal.send("/save talk.json\r")
    terminal.until("Saved 2 messages")
    terminal.send("/clear\r")
    terminal.until("Forgotten.")
    terminal.send("/load talk.json\r")
    terminal.until("Loaded 2 messages")
    terminal.send("/sytem x\r")
    terminal.until("Did you mean /system?")
    ask(terminal, " /no command")
    assert [turn["content"] for turn in head.asked[2]["messages"]] == ["better", "an answer", "/no command"]
    terminal.send("/help\r")
    terminal.until("earlier questions")


@pytest.mark.parametrize("columns", [80, 40])
def test_a_head_that_loads_shows_how_far_it_is(head, chat, columns):
    loading = {"state": "loading", "stage": "weights", "node": "mini", "percent": 40.0, "eta_s": 9, "model": "m"}
    head.health = [loading]
    terminal = chat(columns=columns)
    screen = terminal.until("━")
    assert "the head loads: weights on mini · 40 %" in screen.replace("\n", " ") and "0:09 left" in screen
    bar = screen.splitlines()[-1]
    assert len(bar) <= columns and bar.count("━") == round(len(bar) * 0.4)
    head.health = [READY]
    assert "weights" not in terminal.until(">>>"), "gone, once it serves"


def test_a_head_that_recovers_is_waited_for(head, chat):
    gate = threading.Event()
    recovering = {"state": "loading", "recovering": True, "stage": "weights", "node": "mini", "percent": 10.0,
                  "eta_s": 30, "reason": "", "model": "m"}
    gone = {"state": "waiting", "recovering": True, "reason": "Peer mini is gone.", "model": "m"}
    head.health = [READY, READY, gone]  # at the start, before the question, and from then on
    head.script = [said("The answer is "), f": hydra {json.dumps(gone)}", gate, said("this."), *ending()]
    terminal = chat()
    terminal.until(">>>")
    terminal.send("hi\r")
    assert "The answer is" in terminal.until("recovering: waits: Peer mini is gone; the answer goes on by itself")
    head.health = [recovering]
    terminal.until("recovering: loads: weights on mini · 10 % · 0:30 left; the answer goes on by")
    terminal.until("━━━━╌╌╌╌")  # how far it is, from /health
    head.health = [READY]
    gate.set()
    screen = terminal.until(FIGURES)
    assert "\nThe answer is this.\n" in screen and "recovering" not in screen and "━" not in screen


def test_a_head_that_starts_anew_between_two_questions(head, chat):
    head.says("ok")
    terminal = chat()
    terminal.until(">>>")
    head.health = [{"state": "waiting", "reason": "Waiting for peer mini.", "model": "m"}]
    terminal.send("hi\r")
    terminal.until("the head waits: Waiting for peer mini")
    head.health = [READY]
    assert "ok" in terminal.until(FIGURES)


def test_errors_keep_the_chat(head, chat):
    terminal = chat(columns=40)
    terminal.until(">>>")
    head.status, head.refusal = 401, {"error": {"message": "No key."}}
    terminal.send("hi\r")
    screen = terminal.until("hint:")
    assert "error: No key." in screen
    terminal.until("HYDRA_API_KEY")
    head.status = 200
    head.script = [said("half "), {"error": {"message": "The context of 8 cells has no room.",
                                             "code": "context_length_exceeded", "type": "invalid_request_error"}}]
    terminal.send("/regen\r")
    screen = terminal.until("/save FILE")
    assert "half\nerror: The context of 8 cells" in screen and "/clear begins anew" in screen
    head.script = [said("cut"), *ending(reason="length")]
    assert "[cut off: " in ask(terminal, "/regen")
    assert [turn["content"] for turn in head.asked[2]["messages"]] == ["hi"]
    head.close()
    terminal.send("more\r")
    terminal.until("error: No head answers")


def test_nothing_in_an_answer_reaches_the_terminal_as_a_command(head, chat):
    head.says("a\x1b]0;title\x07b\x1b[2J", reasoning="x\x1b[1Ay")
    terminal = chat()
    terminal.until(">>>")
    assert "a]0;titleb[2J" in ask(terminal, "hi") and "x[1Ay" in terminal.text()
    assert "\x1b]0;title" not in terminal.raw and "\x1b[2J" not in terminal.raw


def test_one_question_on_a_terminal(head, chat):
    head.says("**yes**", reasoning="hm")
    drawn = chat("hi")
    assert drawn.end() == 0 and re.fullmatch(r"hm\nthought: 1 token, 0\.\d s\n\nyes", drawn.text())
    plain = chat("hi", "--plain", "--stats")
    assert plain.end() == 0 and "**yes**\nprompt 504 tok/s" in plain.text()
    assert "\x1b[?2026h" not in plain.raw
    dumb = chat("hi", TERM="dumb")
    assert dumb.end() == 0 and "\x1b" not in dumb.raw and "**yes**" in dumb.text()


def test_ctrl_c_ends_one_question(head, chat):
    head.script = [said("It begins"), threading.Event()]
    terminal = chat("hi")
    terminal.until("It begins")
    terminal.send("\x03")
    assert terminal.end() == 130 and terminal.text().startswith("It begins")


def test_no_color_means_none_for_errors_too(head, chat):
    head.health = [{"state": "failed", "reason": "broken", "model": "m"}]
    plain, coloured = chat("hi", NO_COLOR="1"), chat("hi")
    plain.until("error: The head has failed")
    coloured.until("error: The head has failed")
    assert "31m" not in plain.raw and "31m" in coloured.raw
    assert plain.end() == coloured.end() == 8
