"""The conversation of `hydra chat` at a terminal: lines in, answers out, Ctrl-C for the answer and Ctrl-D for the chat.

Knows keys and the screen; what is said and asked is hydra/commands/chat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .. import console
from ..errors import HydraError
from .chat import Conversation, command, figures, history_file, show_answer
from .chat_client import HeadClient, Piece

PROMPT, MORE, FENCE = ">>> ", "... ", '"""'
COMMANDS = ["/help", "/clear", "/system", "/set", "/show", "/regen", "/stats", "/bye", "/exit"]


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
            if not _drop_last_answer(talk):
                console.note("There is no question to answer again.")
                continue
        else:
            talk.turns.append({"role": "user", "content": line})
        answer(head, talk, think=think, stats=stats)


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


def _drop_last_answer(talk: Conversation) -> bool:
    """For /regen: back to the last question. False where there is none."""
    while talk.turns and talk.turns[-1]["role"] == "assistant":
        talk.turns.pop()
    return bool(talk.turns)


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
