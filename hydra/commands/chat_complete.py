"""Tab in `hydra chat`: slash commands, the names and values that follow them, and paths.

Knows prompt_toolkit and the commands; questions are completed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from .chat_commands import COMMANDS, DEFAULT, PARAMETERS

PATHS = ("/read", "/save", "/load")


class SlashCompleter(Completer):
    """Completes a line that begins with a slash."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if not before.startswith("/"):
            return
        name, space, rest = before.partition(" ")
        if not space:
            for command, (follows, does) in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(command + (" " if follows else ""), -len(name), display=command, display_meta=does)
        elif name in PATHS:
            path = rest.lstrip()
            yield from self._paths.get_completions(Document(path, len(path)), complete_event)
        elif name == "/set":
            yield from _parameters(rest.lstrip())


def _parameters(rest: str) -> Iterable[Completion]:
    key, space, value = rest.partition(" ")
    if not space:
        for name in PARAMETERS:
            if name.startswith(key):
                yield Completion(f"{name} ", -len(key), display=name)
    elif key in PARAMETERS and DEFAULT.startswith(value):
        yield Completion(DEFAULT, -len(value), display_meta="the head's own")
