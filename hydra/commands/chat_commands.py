"""The conversation of `hydra chat` and its slash commands, but for those that need a screen or the head.

Knows nothing of terminals: a line in, what to tell out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import HydraError

FENCE = '"""'
# Names of /set and their types; the API checks the ranges.
PARAMETERS: dict[str, Callable[[str], Any]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int, "max_tokens": int,
    "repeat_penalty": float, "presence_penalty": float, "frequency_penalty": float,
}
DEFAULT = "default"  # /set NAME default: the head's own value again
# Every command, with what follows it and what it does.
COMMANDS = {
    "/help": ("", "this"),
    "/clear": ("", "forget the conversation"),
    "/system": ("TEXT", "set the system prompt, and forget the conversation"),
    "/set": ("NAME VALUE", f"{', '.join(PARAMETERS)}; VALUE {DEFAULT}: the head's own"),
    "/show": ("", "what is set"),
    "/regen": ("", "answer the last question again"),
    "/edit": ("", "change the last question in $EDITOR and ask again"),
    "/read": ("FILE", "put a text file before the next question"),
    "/save": ("FILE", "keep the conversation"),
    "/load": ("FILE", "take a conversation up again"),
    "/copy": ("", "put the last answer on the clipboard, where the terminal allows it"),
    "/think": ("", "fold the model's reasoning or show it (Ctrl-T, also during an answer)"),
    "/stats": ("", "figures of the last answer"),
    "/bye": ("", "leave; so do /exit and Ctrl-D"),
    "/exit": ("", "leave"),
}
# What people type who come from ollama, llama-cli or lms.
ALIASES = {"/?": "/help", "/quit": "/exit"}
KEYS = (("Ctrl-C", "stop an answer, or drop the line"),
        ("Alt-Enter", f"a new line; so is Enter between {FENCE} and {FENCE}"),
        ("Tab", "complete a command, a parameter or a path"), ("Up, Ctrl-R", "earlier questions, of earlier days too"))


@dataclass
class Conversation:
    """What was said so far, and how to ask."""

    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)
    think: bool = True
    """Show reasoning, rather than a line about it."""
    last: dict[str, Any] = field(default_factory=dict)
    """Of the newest answer: finish_reason, usage, timings."""
    reasoning: str = ""
    """Of the newest answer."""
    attached: str = ""
    """Text of /read, for the next question."""
    unanswered: str = ""
    """The newest question, where no answer came: it is not among the turns."""

    def ask(self, question: str) -> None:
        """Add a question, with what was attached before it."""
        self.turns.append({"role": "user", "content": "\n\n".join(part for part in (self.attached, question) if part)})
        self.attached = self.unanswered = ""

    def take_back(self) -> None:
        """The last question was not answered; /regen asks it again."""
        self.unanswered = self.turns.pop()["content"]

    def last_question(self) -> str:
        return self.unanswered or self.last_of("user")

    def ask_again(self, question: str) -> None:
        """In the place of the last question and its answer."""
        if not self.unanswered:
            while self.turns and self.turns.pop()["role"] != "user":
                pass
        self.unanswered = ""
        self.turns.append({"role": "user", "content": question})

    def last_of(self, role: str) -> str:
        """The newest message of that role, or an empty text."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == role), "")

    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]


def split(line: str) -> tuple[str, str]:
    """`/name rest` → the command's own name and what follows it."""
    name, *rest = line.split(maxsplit=1)
    return ALIASES.get(name, name), rest[0].strip() if rest else ""


def command(line: str, talk: Conversation) -> str | None:
    """Carry out one slash command. Returns what to tell; None for those that the terminal does (/bye, /regen).

    Raises: HydraError for a command or value that is not known.
    """
    name, rest = split(line)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
        raise HydraError(f"There is no command {name}.", f"{f'Did you mean {near[0]}? ' if near else ''}/help lists "
                         "them; a space before the slash makes it a question.")
    if name == "/clear":
        talk.turns.clear()
        talk.attached = talk.unanswered = ""
        return "Forgotten."
    if name == "/system":
        text = unfenced(rest)
        talk.system = text
        talk.turns.clear()
        return "System prompt set; the conversation begins anew." if text else "No system prompt."
    if name == "/set":
        return _set(rest.removeprefix("parameter "), talk)
    if name == "/show":
        return _show(talk)
    if name in ("/read", "/save", "/load"):
        return _file_command(name, rest, talk)
    if name == "/stats":
        return figures(talk.last)
    return None


def help_rows() -> list[tuple[str, str]]:
    """All commands and keys, and what they do."""
    return [*((f"{name} {follows}".strip(), does) for name, (follows, does) in COMMANDS.items()), *KEYS]


def _set(rest: str, talk: Conversation) -> str:
    key, _, value = rest.partition(" ")
    value = value.strip()
    if not key:
        raise HydraError("/set needs a name and a value.", f"Names: {', '.join(PARAMETERS)}.")
    if key not in PARAMETERS:
        near = difflib.get_close_matches(key, PARAMETERS, 1, 0.5)
        raise HydraError(f"There is no parameter {key!r}.",
                         f"Did you mean {near[0]}?" if near else f"There are: {', '.join(PARAMETERS)}.")
    if value == DEFAULT:
        talk.params.pop(key, None)
    elif value:
        try:
            talk.params[key] = PARAMETERS[key](value)
        except ValueError:
            kind = "a whole number" if PARAMETERS[key] is int else "a number"
            raise HydraError(f"{key} cannot be {value!r}.", f"It is {kind}, or {DEFAULT}.") from None
    return f"{key} = {talk.params.get(key, 'the head’s own')}"


def _show(talk: Conversation) -> str:
    lines = [f"system: {talk.system or '-'}"]
    lines += [f"{key} = {value}" for key, value in talk.params.items()] or ["all parameters are the head's own"]
    lines.append(f"reasoning is {'shown' if talk.think else 'folded'}")
    count = len(talk.turns)
    lines.append(f"{count} message{'' if count == 1 else 's'} so far")
    if talk.attached:
        lines.append(f"{len(talk.attached)} characters of /read wait for the next question")
    return "\n".join(lines)


def unfenced(text: str) -> str:
    """Without the three quotes around it, where they are."""
    if not text.startswith(FENCE):
        return text
    inner = text[len(FENCE):]
    return inner.removesuffix(FENCE).strip("\n")


def fence_open(text: str) -> bool:
    """Whether three quotes were opened, as a message or after /system, and not closed yet."""
    start = text.lstrip()
    if start.startswith("/system "):
        start = start[len("/system "):].lstrip()
    return start.startswith(FENCE) and not (start.rstrip().endswith(FENCE) and len(start.rstrip()) >= 2 * len(FENCE))


def figures(last: dict[str, Any]) -> str:
    """`prompt 504 tok/s · answer 29.2 tok/s · accepted 71 % · context 12 %`, as far as the head says."""
    timings = last.get("timings") or {}
    parts = []
    for name, key in (("prompt", "prompt_per_second"), ("answer", "predicted_per_second")):
        if timings.get(key):
            parts.append(f"{name} {timings[key]:.{0 if timings[key] >= 100 else 1}f} tok/s")
    if timings.get("draft_n"):
        parts.append(f"accepted {100 * timings.get('draft_n_accepted', 0) / timings['draft_n']:.0f} %")
    if timings.get("n_ctx") and timings.get("context_n"):
        parts.append(f"context {100 * timings['context_n'] / timings['n_ctx']:.0f} %")
    return " · ".join(parts) or "no figures"


def _file_command(name: str, rest: str, talk: Conversation) -> str:
    """/read, /save and /load. Raises: HydraError for a file that cannot be used; the conversation is then unchanged."""
    if not rest:
        raise HydraError(f"{name} needs a file.", f"Write {name} FILE.")
    path = Path(rest).expanduser()
    try:
        if name == "/read":
            text = path.read_text(encoding="utf-8")
            talk.attached = "\n\n".join(part for part in (talk.attached, f"{path.name}:\n{text}") if part)
            return f"{path.name} ({len(text)} characters) goes before the next question."
        if name == "/save":
            if path.is_file() and path.stat().st_size and not _is_conversation(path):
                raise HydraError(f"{path} is there, and is no conversation.", "Name another file.")
            kept = {"system": talk.system, "params": talk.params, "messages": talk.turns}
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            return f"Saved {len(talk.turns)} messages to {path}."
        kept = json.loads(path.read_text(encoding="utf-8"))
        turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in kept["messages"]]
        params = {key: value for key, value in dict(kept.get("params") or {}).items() if key in PARAMETERS}
        talk.system, talk.params, talk.turns = str(kept.get("system") or ""), params, turns
        talk.unanswered = ""
        return f"Loaded {len(turns)} messages from {path}."
    except OSError as error:
        raise HydraError(f"{path}: {error.strerror}.", "Check the path.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = "a saved conversation" if name == "/load" else "a text file (UTF-8)"
        raise HydraError(f"{path} is not {what}.", "Name another file.") from error


def _is_conversation(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8"))["messages"], list)
    except (ValueError, KeyError, TypeError):
        return False
