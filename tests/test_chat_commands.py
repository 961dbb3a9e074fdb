"""The slash commands of `hydra chat`: each with what it tells, what it changes, and how it can go wrong."""

from __future__ import annotations

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from hydra.commands import chat_commands, chat_complete, chat_terminal
from hydra.commands.chat_commands import COMMANDS, Conversation, command, fence_open, unfenced
from hydra.errors import HydraError
from tests.fake_head import END


@pytest.fixture
def talk() -> Conversation:
    return Conversation("Be kind.", {"top_k": 3}, [{"role": "user", "content": "q"},
                                                   {"role": "assistant", "content": "a"}], last=END)


def test_set_show_and_stats(talk):
    assert command("/set temperature 0.5", talk) == "temperature = 0.5" and talk.params["temperature"] == 0.5
    assert command("/set parameter seed 7", talk) == "seed = 7", "as ollama has it"
    assert command("/set seed", talk) == "seed = 7"
    assert command("/set seed default", talk) and "seed" not in talk.params
    shown = str(command("/show", talk))
    assert "temperature = 0.5" in shown and "2 messages" in shown and "Be kind." in shown
    assert command("/stats", talk) == "prompt 504 tok/s · answer 29.2 tok/s · accepted 70 % · context 12 %"


def test_system_and_clear(talk):
    assert command('/system """Be\nbrief."""', talk)
    assert talk.messages() == [{"role": "system", "content": "Be\nbrief."}]
    talk.ask("y")
    assert command("/clear", talk) and not talk.turns and talk.system
    assert command("/system", talk) == "No system prompt." and talk.messages() == []


@pytest.mark.parametrize("line", ["/set nonsense 1", "/set", "/set top_k x", "/set temperature 1,5", "/nonsense"])
def test_what_cannot_be_is_told_with_a_hint(talk, line):
    before = (dict(talk.params), list(talk.turns))
    with pytest.raises(HydraError) as caught:
        command(line, talk)
    assert caught.value.hint and (talk.params, talk.turns) == before


@pytest.mark.parametrize(("line", "meant"), [("/sytem x", "/system"), ("/halp", "/help"), ("/regenerate", "/regen"),
                                             ("/set temprature 1", "temperature")])
def test_a_slip_gets_a_suggestion(talk, line, meant):
    with pytest.raises(HydraError) as caught:
        command(line, talk)
    assert f"Did you mean {meant}?" in caught.value.hint


def test_help_names_all_commands():
    rows = chat_commands.help_rows()
    for name in COMMANDS:
        assert [row for row in rows if row[0].split()[0] == name and row[1]]
    assert chat_commands.split("/?")[0] == "/help" and chat_commands.split("/quit")[0] == "/exit"


def test_files_of_a_conversation(talk, tmp_path):
    assert "2 messages" in str(command(f"/save {tmp_path}/talk.json", talk))
    assert "2 messages" in str(command(f"/save {tmp_path}/talk.json", talk)), "again over itself"
    other = Conversation()
    assert "2 messages" in str(command(f"/load {tmp_path}/talk.json", other))
    assert (other.system, other.params, other.turns) == (talk.system, talk.params, talk.turns)
    (tmp_path / "my notes.txt").write_text("some notes")
    assert "10 characters" in str(command(f"/read {tmp_path}/my notes.txt", other))
    other.ask("What do they say?")
    other.ask("Next.")
    assert [turn["content"] for turn in other.turns[2:]] == ["my notes.txt:\nsome notes\n\nWhat do they say?", "Next."]


def test_files_that_cannot_be_used(talk, tmp_path):
    (tmp_path / "notes.txt").write_text("some notes")
    (tmp_path / "bad.json").write_text('{"messages": 3}')
    (tmp_path / "latin").write_bytes(b"\xe9")
    for bad in ("/read", f"/read {tmp_path}/none", f"/read {tmp_path}/latin", f"/load {tmp_path}/bad.json",
                f"/load {tmp_path}/notes.txt", f"/save {tmp_path}", f"/save {tmp_path}/notes.txt"):
        with pytest.raises(HydraError) as caught:
            command(bad, talk)
        assert caught.value.hint
    assert len(talk.turns) == 2 and (tmp_path / "notes.txt").read_text() == "some notes", "no other file is overwritten"


def test_again(talk, monkeypatch, tmp_path, capsys):
    turns = list(talk.turns)
    assert chat_terminal.again("/copy", talk) is False and talk.turns == turns
    assert chat_terminal.again("/regen", talk) is True and talk.turns == turns[:1]
    talk.turns = list(turns)
    monkeypatch.setenv("EDITOR", "true")
    assert chat_terminal.again("/edit", talk) is False and talk.turns == turns, "unchanged: nothing is asked"
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nprintf "better question\\n" > "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(script))
    assert chat_terminal.again("/edit", talk) is True and talk.turns == [{"role": "user", "content": "better question"}]
    monkeypatch.setenv("EDITOR", "no-such-editor")
    with pytest.raises(HydraError, match="no-such-editor"):
        chat_terminal.again("/edit", talk)
    assert chat_terminal.again("/regen", Conversation()) is False


def test_a_question_without_an_answer_can_be_asked_again(talk):
    talk.ask("lost")
    talk.take_back()
    assert len(talk.turns) == 2, "what was said before stays"
    assert chat_terminal.again("/regen", talk) is True
    assert [turn["content"] for turn in talk.turns] == ["q", "a", "lost"]


@pytest.mark.parametrize(("text", "is_open"), [
    ('"""', True), ('"""one', True), ('"""one\ntwo', True), ('"""one\ntwo"""', False), ('"""a"""', False),
    ("one", False), ('a """', False), ('/system """Be', True), ('/system """Be\nkind."""', False), ('""" ', True)])
def test_three_quotes(text, is_open):
    assert fence_open(text) is is_open


def test_without_three_quotes():
    assert unfenced('"""one\ntwo\nthree"""') == "one\ntwo\nthree"
    assert unfenced('"""\none\n"""') == "one"
    assert unfenced("plain") == "plain"


def completions(text: str) -> list[str]:
    found = chat_complete.SlashCompleter().get_completions(Document(text, len(text)), CompleteEvent())
    return [one.text for one in found]


def test_completion(tmp_path):
    assert completions("/s") == ["/system ", "/set ", "/show", "/save ", "/stats"]
    assert completions("/set to") == ["top_p ", "top_k "]
    assert completions("/set top_k d") == ["default"] and completions("/set nonsense d") == []
    (tmp_path / "notes.txt").touch()
    (tmp_path / "sub").mkdir()
    assert completions(f"/read {tmp_path}/no") == ["tes.txt"]
    assert completions(f"/load {tmp_path}/") == ["notes.txt", "sub"]
    assert completions("/system /") == [] and completions("tell me /s") == [] and completions("") == []
