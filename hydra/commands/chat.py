"""`hydra chat`: talk to a running head. One question and its answer, or a conversation at a terminal.

The answer goes to stdout, and nothing else does where that is no terminal; waits and figures go to stderr. Knows the
API only. The parts: chat_client (the API), chat_commands (the conversation), chat_view (an answer that comes),
chat_markdown and chat_screen (how it is drawn), chat_keys (beside it), chat_terminal (the prompt).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from .. import config, console
from ..errors import ConfigError, EngineError
from .chat_client import HeadClient
from .chat_commands import Conversation, figures
from .chat_keys import Pulse
from .chat_view import AnswerView, PlainView, View, renders, waiting_lines, waiting_text

READY_POLL_S = 0.3


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


def run(prompt: str, file: str | None, url: str, system: str, params: Mapping[str, Any], *, think: bool,
        stats: bool | None, plain: bool, as_json: bool) -> None:
    """One-shot with a prompt or piped stdin, else interactive.

    stats: figures after an answer; None: where a conversation shows them anyway. plain: no Markdown is drawn.
    Raises: HydraError.
    """
    talk = Conversation(system, {name: value for name, value in params.items() if value is not None}, think=think)
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip("\n"), prompt) if part)
    if not question and (as_json or not (sys.stdin and sys.stdin.isatty())):
        raise ConfigError("There is no prompt: stdin is empty and none is given.", 'Write it: hydra chat "…".')
    with HeadClient(*head_address(file, url)) as head:
        wait_ready(head, plain=plain)
        if not question:
            from .chat_terminal import converse

            converse(head, talk, stats=stats is not False, plain=plain)
            return
        talk.ask(question)
        view = view_for(talk, plain=plain, quiet=as_json)
        try:
            stream(head, talk, view)
        finally:
            view.close()
        if as_json:
            console.result_json({"text": view.text, "reasoning": view.reasoning or None, **talk.last})
        if stats:
            console.note(figures(talk.last))


def view_for(talk: Conversation, *, plain: bool, quiet: bool = False) -> View:
    """What shows an answer here: drawn on a terminal with colour, else text as it is; nothing where quiet."""
    if quiet or not renders(plain):
        return PlainView(think=talk.think, quiet=quiet)
    from .chat_screen import Screen

    return AnswerView(Screen(console.write), console.out().color_system, think=talk.think)


def stream(head: HeadClient, talk: Conversation, view: View, keys: Any = None) -> None:
    """Ask, and show the answer as it comes. What the head says at its end is kept in talk.last.

    keys: the terminal's input, where keys are to be taken meanwhile. Raises: HydraError, KeyboardInterrupt.
    """
    talk.last = {}
    pieces = head.chat(talk.messages(), talk.params)
    try:
        with Pulse(view, lambda: head.health(1.0), keys) as pulse:
            for piece in pieces:
                pulse.feed(piece)
                if piece.end:
                    talk.last = piece.end
    finally:
        pieces.close()


def wait_ready(head: HeadClient, *, plain: bool) -> None:
    """Return once the head serves, showing how far it is on stderr. Raises: PeerUnreachable; EngineError where it has
    failed."""
    screen = None
    said, said_s = "", float("-inf")
    try:
        while True:
            health = head.health()
            state = health.get("state")
            if state == "ready":
                return
            if state == "failed":
                raise EngineError(f"The head has failed: {health.get('reason')}", "Its log says more; start it again.")
            if screen is None and renders(plain, sys.stderr):
                from .chat_screen import Screen

                screen = Screen(console.write_note)
            if screen is not None:
                screen.draw([], waiting_lines(health, 0.0, screen.width, answering=False))
            else:
                now = time.monotonic()
                what = waiting_text({**health, "percent": None, "eta_s": None}, 0.0, answering=False)
                if what != said or now - said_s >= console.LINE_EVERY_S:
                    said, said_s = what, now
                    console.note(waiting_text(health, 0.0, answering=False))
            time.sleep(READY_POLL_S)
    finally:
        if screen is not None:
            screen.draw([], [])
