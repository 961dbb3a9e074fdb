"""`hydra chat` in a real terminal against real heads: the API and its supervisor, over an engine that dies in the
middle of an answer, and over llama.cpp with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hydra.commands.chat_markdown import harmless
from tests.api_support import running_head
from tests.engine_support import toy, toy_spec
from tests.fake_engine import say
from tests.terminal_support import ROOT, Terminal

ANSWER = "<think>\nI weigh this, and that.\n</think>\n\nThe **answer** is a list:\n\n" + "".join(
    f"{number}. item number {number}\n" for number in range(1, 9))


def written(terminal):
    """All that was written, in one line without colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.raw).split())


@pytest.mark.parametrize("columns", [80, 40])
def test_an_engine_that_dies_while_it_answers(tmp_path, columns):
    # The second time it takes its time to come back.
    faults = [{"life": 1, "after": 120, "do": "abort"}, {"life": 2, "do": "load_failed", "kind": "DeviceError"}]
    with running_head(tmp_path, faults=faults, backoff_first_s=2.0, backoff_max_s=2.0) as head:
        terminal = Terminal(["chat", "--url", head.url], columns, tmp_path)
        try:
            terminal.until(">>>")
            terminal.send(f"\x1b[200~{say(ANSWER)}[[delay:4]]\x1b[201~\r")
            # Of what was written, not of what is to be seen: it may be gone again, and lines break anywhere.
            said = "recovering: .*; the answer goes on by itself"
            terminal.wait_for(lambda: re.search(said, written(terminal)) is not None, said)
            terminal.wait_for(lambda: terminal.text().endswith(">>>"), "the end of the answer")
            screen = terminal.text()
        finally:
            terminal.close()
        assert head.supervisor.status()["restarts"] == 2
    assert "I weigh this, and that.\nthought: 31 tokens, " in screen, "a byte is a token here"
    assert "The answer is a list:\n\n" in screen and "recovering" not in screen
    items = [line for line in screen.splitlines() if "item number" in line]
    assert items == [f" {number}. item number {number}" for number in range(1, 9)], "whole, and nothing twice"
    assert "context " in screen


def test_a_tiny_model(tmp_path):
    with running_head(tmp_path, spec=toy_spec(toy()), real=True, step_deadline_s=60.0, silence_s=30.0,
                      suspect_s=10.0) as head:
        request = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 24, "temperature": 0}
        whole = httpx.post(f"{head.url}/v1/chat/completions", json=request, timeout=60).json()
        said = whole["choices"][0]["message"]["content"]
        asked = ["chat", "abc", "--url", head.url, "-n", "24", "--temp", "0"]
        piped = subprocess.run([sys.executable, "-m", "hydra", *asked], capture_output=True, timeout=60, cwd=ROOT,
                               stdin=subprocess.DEVNULL)
        assert (piped.returncode, piped.stderr) == (0, b"")
        assert piped.stdout.decode().removesuffix("\n") == said.removesuffix("\n")
        terminal = Terminal([*asked, "--plain", "--stats"], 80, Path(tmp_path))
        try:
            assert terminal.end() == 0
        finally:
            terminal.close()
    figures = terminal.text().splitlines()[-1]
    assert "prompt " in figures and " tok/s · answer " in figures and " · context 4 %" in figures
    assert harmless(said).strip()[:20] in terminal.text()


def test_a_model_without_a_template_ends_where_chatml_does(tmp_path):
    (tmp_path / "none").touch()
    with running_head(tmp_path, env={"FAKE_ENGINE_TEMPLATE": str(tmp_path / "none")}) as head:
        asked = ["chat", say("Yes.<|im_end|>\n<|im_start|>user\nAnd now?"), "--url", head.url]
        done = subprocess.run([sys.executable, "-m", "hydra", *asked], capture_output=True, timeout=60, cwd=ROOT,
                              stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, b"Yes.\n")
