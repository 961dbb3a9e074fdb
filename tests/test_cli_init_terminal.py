"""`hydra init` at a real terminal: what it asks, what Enter means, and that nothing is overwritten without a yes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra import config
from tests.terminal_support import Terminal


def answer(terminal: Terminal, question: str, reply: str) -> str:
    """The screen when the question is there; then the reply is typed."""
    screen = terminal.until(question)
    terminal.send(f"{reply}\r")
    return screen


@pytest.mark.parametrize("columns", [80, 40])
def test_questions_and_answers(tmp_path, columns):
    terminal = Terminal(["init"], columns, tmp_path)
    first = answer(terminal, "[head]:", "")
    assert "This box: " in first and "(it has the model)" in " ".join(first.split())
    answer(terminal, "Address of this box [", "10.1.2.3")
    answer(terminal, "of the peer box:", "mini.lan")
    answer(terminal, "head box:", "models/m.gguf")
    terminal.until("hydra.toml")
    assert terminal.end() == 0
    words = " ".join(terminal.text().split())
    assert "Wrote hydra.toml. Copy it to the other box, then run `hydra config check` and `hydra up` on both." in words
    got = config.load(tmp_path / "hydra.toml", {})
    assert (got.head_node.host, got.peers[0].host) == ("10.1.2.3", "mini.lan")
    assert got.model.path == str(tmp_path / "models/m.gguf")


@pytest.mark.parametrize(("reply", "code"), [("", 2), ("no", 2), ("yes", 0)])
def test_a_file_that_is_there(tmp_path, reply, code):
    file = tmp_path / "hydra.toml"
    file.write_text("# mine\n")
    terminal = Terminal(["init", "--model", "m", "--peer", "p", "--head", "h", "--role", "head"], 80, tmp_path)
    answer(terminal, "hydra.toml exists. Overwrite it? [no]:", reply)
    assert terminal.end() == code
    assert (file.read_text() == "# mine\n") is bool(code)
    assert ("error: hydra.toml exists already." in terminal.text()) is bool(code)


@pytest.mark.parametrize("how", ["\x03", "\x04"])
def test_leaving_in_the_middle_writes_nothing(tmp_path, how):
    """Ctrl-C, and Ctrl-D at a question that has no answer of its own."""
    terminal = Terminal(["init", "--role", "head", "--head", "h"], 80, tmp_path)
    terminal.until("of the peer box:")
    terminal.send(how)
    assert terminal.end() == (130 if how == "\x03" else 2)
    assert "Traceback" not in terminal.raw and list(Path(tmp_path).glob("*.toml*")) == []
    assert how == "\x03" or "Add --peer" in terminal.text()
