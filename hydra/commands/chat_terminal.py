"""The conversation of `hydra chat` at a terminal: lines in, answers out, Ctrl-C for the answer and Ctrl-D for the chat.

Knows keys and the screen; what is said and asked is hydra/commands/chat.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .. import console
from ..errors import HydraError
from .chat import Conversation, command, figures, history_file, show_answer
from .chat_client import HeadClient, Piece

PROMPT, MORE, FENCE = ">>> ", "... ", '"""'
COMMANDS = ["/help", "/clear", "/system", "/set", "/show", "/regen", "/edit", "/read", "/save", "/load",
            "/copy", "/stats", "/bye", "/exit"]


def converse(head: HeadClient, talk: Conversation, *, think: bool, stats: bool) -> None:
    """Until Ctrl-D, /bye or /exit."""
    session: PromptSession[str] = PromptSession(history=_history(), completer=WordCompleter(COMMANDS, sentence=True),
                                                complete_while_typing=False, key_bindings=_keys())
    console.note(f"Talking to {head.url}; /help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            line = read(session.prompt)
        except KeyboardInterrupt:
            continue  # drops the line, as in a shell
        except EOFError:
            return
        if not line:
            continue
        if line.startswith("/"):
            if line in ("/bye", "/exit"):
                return
            try:
                told = command(line, talk)
            except HydraError as error:
                console.error(error.message, error.hint)
                continue
            if told is not None:
                console.note(told)
                continue
            try:
                if not again(line, talk):
                    continue
            except HydraError as error:
                console.error(error.message, error.hint)
                continue
        else:
            talk.ask(line)
        answer(head, talk, think=think, stats=stats)


def again(line: str, talk: Conversation) -> bool:
    """/copy, /regen and /edit. True where the last question is to be asked (again)."""
    if line == "/copy":
        last = talk.last_of("assistant")
        console.clipboard(last)
        console.note(f"{len(last)} characters given to the terminal." if last else "There is no answer yet.")
        return False
    question = talk.last_of("user")
    if not question:
        console.note("There is no question to ask again.")
        return False
    if line == "/edit":
        changed = edited(question)
        if changed in ("", question):
            console.note("Left as it was.")
            return False
        question = changed
    _drop_last_answer(talk)
    talk.turns[-1]["content"] = question
    return True


def edited(text: str) -> str:
    """The text after $VISUAL or $EDITOR had it. Raises: HydraError where that cannot be run."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.NamedTemporaryFile("w+", suffix=".md", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            subprocess.run([*shlex.split(editor), file.name], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise HydraError(f"The editor {editor!r} failed: {error}.",
                             "Set EDITOR to one that is installed.") from error
        # Editors that write a new file and rename it leave ours behind: read by name.
        return Path(file.name).read_text(encoding="utf-8").strip("\n")


def read(ask: Callable[[str], str]) -> str:
    """One message: a line, or several between two lines of three quotes. Raises what `ask` raises."""
    line = ask(PROMPT).strip()
    if not line.startswith(FENCE):
        return line
    lines = [line[len(FENCE):]]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(ask(MORE))
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def answer(head: HeadClient, talk: Conversation, *, think: bool, stats: bool) -> None:
    """Ask, show, and keep what was said. An error is told and the question is taken back, so that the chat goes on."""
    text = ""
    pieces = head.chat(talk.messages(), talk.params)
    seen: list[str] = []

    def noted() -> Iterator[Piece]:
        for piece in pieces:
            seen.append(piece.text)
            yield piece

    try:
        text, _ = show_answer(noted(), talk, think=think)
        talked = True
    except KeyboardInterrupt:
        text, talked = "".join(seen), False
        console.note(" [stopped]")
    except HydraError as error:
        console.write("\n")
        console.error(error.message, error.hint)
        talk.turns.pop()
        return
    finally:
        pieces.close()
    console.write("\n")
    talk.turns.append({"role": "assistant", "content": text})
    if stats and talked:
        console.note(figures(talk.last))


def _drop_last_answer(talk: Conversation) -> None:
    """Back to the last question."""
    while talk.turns and talk.turns[-1]["role"] != "user":
        talk.turns.pop()


def _history() -> History:
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()  # a read-only home is no reason not to talk
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
