"""The conversation of `hydra chat` at a terminal: lines in, answers out, Ctrl-C for the answer and Ctrl-D for the chat.

Knows keys and the prompt; what is said and asked is chat_commands.py, how an answer looks chat_view.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .. import console
from ..errors import HydraError
from .chat import stream, view_for, wait_ready
from .chat_client import ContextFull, HeadClient
from .chat_commands import Conversation, command, fence_open, figures, help_rows, split, unfenced
from .chat_complete import SlashCompleter
from .chat_view import renders

PROMPT, MORE = ">>> ", "... "


class Terminal:
    """One conversation. stats: figures after each answer. plain: answers as they are, without Markdown drawn."""

    def __init__(self, head: HeadClient, talk: Conversation, *, stats: bool, plain: bool) -> None:
        self.head = head
        self.talk = talk
        self.stats = stats
        self.plain = plain
        # Enter ends a message, but not inside three quotes.
        inside = Condition(lambda: fence_open(get_app().current_buffer.text))
        self.session: PromptSession[str] = PromptSession(
            history=_history(), completer=SlashCompleter(), complete_while_typing=False, key_bindings=self._keys(),
            multiline=inside, prompt_continuation=lambda width, number, wrapped: "" if wrapped else MORE)

    def read(self) -> str:
        """One message or command, as it was typed."""
        return self.session.prompt(PROMPT)

    def run(self) -> None:
        """Until Ctrl-D, /bye or /exit."""
        console.note(f"Talking to {self.head.url}; /help lists the commands, Ctrl-D leaves.")
        while True:
            try:
                line = self.read()
            except KeyboardInterrupt:
                # Drops the line, as in a shell. What was typed is still to be seen.
                console.note("Ctrl-D or /bye leaves.")
                continue
            except EOFError:
                return
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    name = split(line)[0]
                    told = command(line, self.talk)
                    if name in ("/bye", "/exit"):
                        return
                    if told is not None:
                        console.note(told)
                    if told is not None or not self._do(name):
                        continue
                else:
                    self.talk.ask(unfenced(line.strip()))
                self.answer()
            except HydraError as error:
                console.error(error.message, error.hint)

    def _do(self, name: str) -> bool:
        """/help, /copy, /think, /regen and /edit. True where the last question is to be asked (again)."""
        if name == "/help":
            console.table(["COMMAND", "DOES"], help_rows(), stderr=True)
            return False
        if name == "/think":
            self._toggle()
            return False
        return again(name, self.talk)

    def _toggle(self) -> None:
        self.talk.think = not self.talk.think
        console.note(f"Reasoning is {'shown' if self.talk.think else 'folded'}.")
        if self.talk.think and self.talk.reasoning:
            console.write_dim(f"{self.talk.reasoning.strip()}\n")

    def answer(self) -> None:
        """Ask, show, and keep what was said. Without an answer the question is taken back, so that the chat goes on.

        Raises: HydraError.
        """
        view = view_for(self.talk, plain=self.plain)
        stopped = False
        try:
            wait_ready(self.head, plain=self.plain)
            stream(self.head, self.talk, view, self.session.input)
        except KeyboardInterrupt:
            stopped = True
        except HydraError as error:
            view.close()
            self.talk.take_back()
            if isinstance(error, ContextFull):
                raise HydraError(error.message, "/clear begins anew; /save FILE keeps this conversation.") from error
            raise HydraError(error.message, error.hint or "/regen asks again.") from error
        view.close()
        self.talk.think, self.talk.reasoning = view.shown, view.reasoning
        if view.text:
            self.talk.turns.append({"role": "assistant", "content": view.text})
        else:
            self.talk.take_back()
        if stopped:
            console.note("[stopped]" if view.text else "[stopped; /regen asks again]")
        elif self.talk.last.get("finish_reason") == "length":
            console.note("[cut off: the context is full, or max_tokens was reached]")
        if self.stats and not stopped:
            self._footer()

    def _footer(self) -> None:
        """The figures, in as many lines as they need."""
        said = figures(self.talk.last)
        lines: list[str] = []
        for part in said.split(" · "):
            if lines and len(lines[-1]) + 3 + len(part) < console.err().width:
                lines[-1] += f" · {part}"
            else:
                lines.append(part)
        console.err().print("\n".join(lines), style="dim" if renders(self.plain) else "", soft_wrap=True)

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-t")
        def _(event: KeyPressEvent) -> None:
            run_in_terminal(self._toggle)

        return keys


def converse(head: HeadClient, talk: Conversation, *, stats: bool, plain: bool) -> None:
    """Until Ctrl-D, /bye or /exit."""
    Terminal(head, talk, stats=stats, plain=plain).run()


def again(name: str, talk: Conversation) -> bool:
    """/copy, /regen and /edit. True where the last question is to be asked (again). Raises: HydraError."""
    if name == "/copy":
        last = talk.last_of("assistant")
        console.clipboard(last)
        console.note(f"{len(last)} characters given to the terminal." if last else "There is no answer yet.")
        return False
    question = talk.last_question()
    if not question:
        console.note("There is no question to ask again.")
        return False
    if name == "/edit":
        changed = edited(question)
        if changed in ("", question):
            console.note("Left as it was.")
            return False
        question = changed
    talk.ask_again(question)
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


def history_file(env: Any = None) -> Path:
    """Where the questions of earlier conversations are kept."""
    env = os.environ if env is None else env
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "hydra" / "chat_history"


def _history() -> History:
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()  # a read-only home is no reason not to talk
    return FileHistory(str(path))
