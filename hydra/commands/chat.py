"""`hydra chat`: talk to a running head. One question and its answer, or a conversation at a terminal.

The answer goes to stdout, and nothing else does; reasoning, waits and figures go to stderr. Knows the API only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config, console
from ..errors import ConfigError, EngineError, HydraError
from .chat_client import HeadClient, Piece

READY_POLL_S = 0.3
# Names of /set and their types; the API checks the ranges.
PARAMETERS: dict[str, Callable[[str], Any]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int, "max_tokens": int,
    "repeat_penalty": float, "presence_penalty": float, "frequency_penalty": float,
}
HELP = """\
/help              this
/clear             forget the conversation
/system TEXT       set the system prompt (and forget the conversation)
/set NAME VALUE    {names}
/show              what is set
/regen             answer the last question again
/edit              change the last question in $EDITOR and ask again
/read FILE         put a text file before the next question
/save FILE         keep the conversation; /load FILE takes it up again
/copy              put the last answer on the clipboard (of terminals that allow it)
/stats             figures of the last answer
/bye, /exit        leave (or Ctrl-D); Ctrl-C stops an answer; Alt-Enter or \"\"\" … \"\"\" for several lines""".format(
    names=", ".join(PARAMETERS))


@dataclass
class Conversation:
    """What was said so far, and how to ask."""

    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    attached: str = ""
    """Text of /read, for the next question."""

    def ask(self, question: str) -> None:
        """Add a question, with what was attached before it."""
        self.turns.append({"role": "user", "content": "\n\n".join(part for part in (self.attached, question) if part)})
        self.attached = ""

    def last_of(self, role: str) -> str:
        """The newest message of that role, or an empty text."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == role), "")

    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]


def head_address(file: str | None, url: str, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """URL and API key: --url or HYDRA_API, else [head] of hydra.toml, else the default port of this box."""
    env = os.environ if env is None else env
    key = env.get("HYDRA_API_KEY") or env.get("HYDRA_HEAD_API_KEY") or ""
    if url or env.get("HYDRA_API"):
        found = url or env["HYDRA_API"]
        return found if "://" in found else f"http://{found}", key
    try:
        cfg = config.load(file, env)
    except ConfigError:
        if file or env.get("HYDRA_CONFIG") or _there_is_one(env):
            raise
        return "http://127.0.0.1:8080", key
    host = cfg.head_node.host if cfg.head.api_host in ("0.0.0.0", "::") else cfg.head.api_host
    return f"http://{f'[{host}]' if ':' in host else host}:{cfg.head.api_port}", key or cfg.head.api_key


def _there_is_one(env: Mapping[str, str]) -> bool:
    try:
        config.find(None, env)
    except ConfigError:
        return False
    return True


def run(prompt: str, file: str | None, url: str, system: str, params: Mapping[str, Any], *, think: bool, stats: bool,
        as_json: bool) -> None:
    """One-shot with a prompt or piped stdin, else interactive. Raises: HydraError."""
    talk = Conversation(system, {name: value for name, value in params.items() if value is not None})
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip("\n"), prompt) if part)
    if not question and (as_json or not (sys.stdin and sys.stdin.isatty())):
        raise ConfigError("There is no prompt: stdin is empty and none is given.", 'Write it: hydra chat "…".')
    with HeadClient(*head_address(file, url)) as head:
        wait_ready(head)
        if not question:
            from .chat_terminal import converse

            converse(head, talk, think=think, stats=stats)
            return
        talk.ask(question)
        text, reasoning = show_answer(head.chat(talk.messages(), talk.params), talk, think=think, quiet=as_json)
        if as_json:
            console.result_json({"text": text, "reasoning": reasoning or None, **talk.last})
        elif not text.endswith("\n"):
            console.write("\n")
        if stats:
            console.note(figures(talk.last))


def wait_ready(head: HeadClient) -> None:
    """Return once the head serves, showing how far it is. Raises: PeerUnreachable; EngineError where it has failed."""
    with console.Loading(console.note) as loading:
        while True:
            health = head.health()
            state = health.get("state")
            if state == "ready":
                return
            if state == "failed":
                raise EngineError(f"The head has failed: {health.get('reason')}", "Its log says more; start it again.")
            reason = str(health.get("reason") or "")
            percent = health.get("percent")
            doing = str(health.get("stage") or "loading") if state == "loading" else reason or str(state)
            loading.update(f"the head: {doing}", node=str(health.get("node") or "") if state == "loading" else "",
                           bytes_done=round(percent or 0), bytes_total=100 if percent is not None else 0,
                           eta_s=health.get("eta_s"))
            time.sleep(READY_POLL_S)


def show_answer(pieces: Iterable[Piece], talk: Conversation, *, think: bool, quiet: bool = False) -> tuple[str, str]:
    """Write an answer as it comes; its text and its reasoning. What the head says at the end is kept in talk.last."""
    text = reasoning = ""
    dim = console.err().is_terminal
    for piece in pieces:
        if piece.reasoning:
            reasoning += piece.reasoning
            if think and dim and not quiet:
                console.write_dim(piece.reasoning)
        if piece.text:
            if reasoning and not text and think and dim and not quiet:
                console.write_note("\n\n")
            text += piece.text
            if not quiet:
                console.write(piece.text)
        if piece.note and dim and not quiet:
            console.note(f"({piece.note})")
        if piece.end:
            talk.last = piece.end
    return text, reasoning


def figures(last: Mapping[str, Any]) -> str:
    """`prompt 504.0 tok/s · answer 29.2 tok/s · accepted 71 % · context 12 %`, as far as the head says."""
    timings = last.get("timings") or {}
    parts = []
    for name, key in (("prompt", "prompt_per_second"), ("answer", "predicted_per_second")):
        if timings.get(key):
            parts.append(f"{name} {timings[key]:.1f} tok/s")
    if timings.get("draft_n"):
        parts.append(f"accepted {100 * timings.get('draft_n_accepted', 0) / timings['draft_n']:.0f} %")
    if timings.get("n_ctx") and timings.get("context_n"):
        parts.append(f"context {100 * timings['context_n'] / timings['n_ctx']:.0f} %")
    return " · ".join(parts) or "no figures"


def history_file(env: Mapping[str, str] | None = None) -> Path:
    """Where the questions of earlier conversations are kept."""
    env = os.environ if env is None else env
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "hydra" / "chat_history"


def command(line: str, talk: Conversation) -> str | None:
    """Carry out one slash command. Returns what to tell; None for those that the terminal does (/bye, /regen).

    Raises: HydraError for a command or value that is not known.
    """
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/help":
        return HELP
    if name == "/clear":
        talk.turns.clear()
        return "Forgotten."
    if name == "/system":
        talk.system = rest
        talk.turns.clear()
        return "System prompt set." if rest else "No system prompt."
    if name == "/set":
        key, _, value = rest.partition(" ")
        if key not in PARAMETERS:
            raise HydraError(f"There is no parameter {key!r}.", f"There are: {', '.join(PARAMETERS)}.")
        try:
            talk.params[key] = PARAMETERS[key](value.strip())
        except ValueError:
            raise HydraError(f"{key} cannot be {value.strip()!r}.", "It is a number.") from None
        return f"{key} = {talk.params[key]}"
    if name == "/show":
        shown = [f"{key} = {value}" for key, value in talk.params.items()] or ["all parameters are the head's own"]
        return "\n".join([f"system: {talk.system or '-'}", *shown, f"{len(talk.turns)} messages so far"])
    if name in ("/read", "/save", "/load"):
        return _file_command(name, rest, talk)
    if name == "/stats":
        return figures(talk.last)
    if name in ("/bye", "/exit", "/regen", "/edit", "/copy"):
        return None
    raise HydraError(f"There is no command {name}.", "/help lists them.")


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
            kept = {"system": talk.system, "params": talk.params, "messages": talk.turns}
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            return f"Saved {len(talk.turns)} messages to {path}."
        kept = json.loads(path.read_text(encoding="utf-8"))
        turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in kept["messages"]]
        params = {key: value for key, value in dict(kept.get("params") or {}).items() if key in PARAMETERS}
        talk.system, talk.params, talk.turns = str(kept.get("system") or ""), params, turns
        return f"Loaded {len(turns)} messages from {path}."
    except OSError as error:
        raise HydraError(f"{path}: {error.strerror}.", "Check the path.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = "a saved conversation" if name == "/load" else "a text file (UTF-8)"
        raise HydraError(f"{path} is not {what}.", "Name another file.") from error
