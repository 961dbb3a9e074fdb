"""An answer while it comes: reasoning, Markdown, and what is waited for, on a terminal or as plain text.

`AnswerView` draws on a terminal; `PlainView` is for pipes, for terminals without colour and for --plain. Both take the
pieces of an answer and know nothing of where they come from. On a terminal, half a second without anything new is
filled with a line that says what is waited for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from .. import console

if TYPE_CHECKING:
    from .chat_client import Piece
    from .chat_screen import Screen

FRAME_S = 0.05
PATIENCE_S = 0.5  # without anything new, before a line says what is waited for
FOLD_KEY = "Ctrl-T"
BAR_WIDTH = 40
HEAD_DOES = {"waiting": "the head waits", "loading": "the head loads", "stopping": "the head stops"}


class View(Protocol):
    """What shows an answer."""

    text: str
    reasoning: str
    shown: bool
    """Whether reasoning is, rather than a line about it."""

    @property
    def silent_s(self) -> float: ...
    def feed(self, piece: Piece) -> None: ...
    def waiting(self, health: Mapping[str, Any]) -> None: ...
    def tick(self) -> None: ...
    def toggle(self) -> bool: ...
    def close(self) -> None: ...


def renders(plain: bool, stream: TextIO | None = None) -> bool:
    """Whether the stream (stdout) is a terminal on which is to be drawn. A pipe is none, whatever FORCE_COLOR says."""
    if plain or os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    found = sys.stdout if stream is None else stream
    return found is not None and found.isatty()


class Thought:
    """How long and how much was reasoned."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s: float | None = None
        self._end_s: float | None = None
        self._pieces = 0
        self._told = 0

    def more(self, total_tokens: int) -> None:
        """One more piece. total_tokens: of the answer so far, 0 where the head does not say."""
        if self._begin_s is None:
            self._begin_s = self._clock()
        self._pieces += 1
        self._told = max(self._told, total_tokens)

    def end(self) -> None:
        if self._begin_s is not None and self._end_s is None:
            self._end_s = self._clock()

    @property
    def going_on(self) -> bool:
        return self._begin_s is not None and self._end_s is None

    def line(self) -> str:
        """`thinking… 123 tokens, 4.2 s`; `thought: …` once it is over. A head that does not count sends a token a
        piece, or a few where it drafts."""
        end = self._clock() if self._end_s is None else self._end_s
        tokens = self._told or self._pieces
        said = f"{tokens} token{'' if tokens == 1 else 's'}, {end - (self._begin_s or end):.1f} s"
        return f"thinking… {said}" if self.going_on else f"thought: {said}"


def waiting_text(health: Mapping[str, Any], since_s: float, *, answering: bool) -> str:
    """What is waited for, in one line; of an answer that waits for a head that recovers, that it goes on."""
    state = str(health.get("state") or "ready")
    if state == "ready":
        return "" if answering else f"reading the prompt… {since_s:.0f} s"
    node, stage, reason = (str(health.get(key) or "") for key in ("node", "stage", "reason"))
    percent, eta = health.get("percent"), health.get("eta_s")
    if state == "loading":
        what = " on ".join(part for part in (stage or "the model", node) if part)
    else:
        what = reason.rstrip(".")
    said = " · ".join([
        f"{HEAD_DOES.get(state, f'the head is {state}')}{f': {what}' if what else ''}",
        *([f"{percent:.0f} %"] if percent is not None else []),
        *([f"{console.seconds_text(eta)} left"] if eta is not None else [])])
    if health.get("recovering"):
        said = f"recovering: {said.removeprefix('the head ')}"
        return f"{said}; the answer goes on by itself" if answering else said
    return said


def waiting_lines(health: Mapping[str, Any], since_s: float, width: int, *, answering: bool) -> list[str]:
    """The same as lines of a terminal, with a bar below where it is known how far the head is."""
    from .chat_markdown import dimmed, wrapped

    said = waiting_text(health, since_s, answering=answering)
    percent = health.get("percent") if health.get("state") != "ready" else None
    lines = dimmed(wrapped(said, width)) if said else []
    if said and percent is not None:
        across = min(width, BAR_WIDTH)
        done = round(across * min(max(float(percent), 0.0), 100.0) / 100)
        lines.append(f"\x1b[36m{'━' * done}\x1b[0m\x1b[2m{'╌' * (across - done)}\x1b[0m")
    return lines


class AnswerView:
    """On a terminal. `tick` wants to be called about every FRAME_S; it may come from another thread.

    think: show reasoning from the start, rather than one line about it.
    """

    def __init__(self, screen: Screen, colors: str | None, *, think: bool,
                 clock: Callable[[], float] = time.monotonic) -> None:
        from .chat_markdown import Blocks, Renderer

        self.text = ""
        self.reasoning = ""
        self._screen = screen
        self._clock = clock
        self._blocks = Blocks()
        self._renderer = Renderer(colors)
        self.shown = think
        self._thought = Thought(clock)
        self._said = False
        """Whether the line about the reasoning was printed."""
        self._rest = ""
        """Reasoning that is not printed yet."""
        self._fixed: list[str] = []
        self._health: Mapping[str, Any] = {}
        self._newest_s = self._begin_s = clock()
        self._drawn_s = float("-inf")
        self._lock = threading.RLock()

    @property
    def silent_s(self) -> float:
        """Seconds since the newest piece."""
        return self._clock() - self._newest_s

    def feed(self, piece: Piece) -> None:
        from .chat_markdown import harmless

        with self._lock:
            if piece.note:
                self._health = piece.note
            if piece.reasoning:
                self._thought.more(piece.tokens)
                text = piece.reasoning if self.reasoning.strip() else piece.reasoning.lstrip("\n")
                self._rest += harmless(text)
                self.reasoning += piece.reasoning
            if piece.text:
                self._end_thought()
                text = piece.text if self.text.strip() else piece.text.lstrip("\n")
                self.text += piece.text
                for block in self._blocks.feed(text):
                    self._fixed += self._renderer.lines(block, self._screen.width)
            if piece.reasoning or piece.text:
                self._newest_s = self._clock()
                self._health = {}
            if self._clock() - self._drawn_s >= FRAME_S:
                self._draw()

    def waiting(self, health: Mapping[str, Any]) -> None:
        """How the head is, while nothing comes."""
        with self._lock:
            self._health = health

    def tick(self) -> None:
        with self._lock:
            self._draw()

    def toggle(self) -> bool:
        """Fold the reasoning or unfold it. True where it is shown from now on."""
        with self._lock:
            if self.shown and self._rest:
                self._fixed += self._thought_lines(self._rest)
                self._rest = ""
            self.shown = not self.shown
            self._draw()
            return self.shown

    def close(self) -> None:
        """Print what is left. The cursor is then at the start of an empty line."""
        with self._lock:
            self._end_thought()
            for block in self._blocks.finish():
                self._fixed += self._renderer.lines(block, self._screen.width)
            self._screen.draw(self._fixed, [])
            self._fixed = []

    def _end_thought(self) -> None:
        """Print the rest of the reasoning, and the line about it."""
        from .chat_markdown import dimmed

        if not self.reasoning or self._said:
            return
        self._thought.end()
        self._said = True
        if self.shown and self._rest.strip():
            self._fixed += self._thought_lines(self._rest.rstrip())
        self._rest = ""
        self._fixed += [*dimmed([self._thought.line()]), ""]

    def _thought_lines(self, text: str) -> list[str]:
        from .chat_markdown import dimmed, wrapped

        return dimmed(line for part in text.split("\n") for line in wrapped(part, self._screen.width))

    def _draw(self) -> None:
        from .chat_markdown import dimmed, wrapped

        width = self._screen.width
        tail: list[str] = []
        if self._thought.going_on and self.shown:
            lines = self._thought_lines(self._rest)
            self._fixed += lines[:-1]
            tail = lines[-1:]
            self._rest = wrapped(self._rest.rpartition("\n")[2], width)[-1]
        elif self._thought.going_on:
            tail = dimmed(wrapped(f"{self._thought.line()} ({FOLD_KEY} unfolds)", width))
        block = self._blocks.tail()
        if block is not None:
            tail += self._renderer.lines(block, width, whole=False)
        if self.silent_s >= PATIENCE_S:
            begun = bool(self.text or self.reasoning)
            tail += waiting_lines(self._health, self._clock() - self._begin_s, width, answering=begun)
        self._screen.draw(self._fixed, tail)
        self._fixed = []
        self._drawn_s = self._clock()


class PlainView:
    """Text as it is: on stdout the answer and nothing else. Reasoning is shown where both ends are a terminal."""

    def __init__(self, *, think: bool, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self.reasoning = ""
        self._quiet = quiet
        self._terminal = not quiet and console.err().is_terminal and sys.stdout.isatty()
        self.shown = think
        self._thought = Thought(clock)
        self._noted = ""
        self._dim = False
        """The cursor stands behind reasoning."""
        self._begin_s = self._newest_s = clock()
        self._clock = clock

    @property
    def silent_s(self) -> float:
        return self._clock() - self._newest_s

    def feed(self, piece: Piece) -> None:
        if piece.note:
            self.waiting(piece.note)
        if piece.reasoning or piece.text:
            self._newest_s = self._clock()
        if piece.reasoning:
            self.reasoning += piece.reasoning
            self._thought.more(piece.tokens)
            if self.shown and self._terminal:
                console.write_dim(self._clean(piece.reasoning))
                self._dim = True
        if piece.text:
            self._end_thought()
            self.text += piece.text
            if not self._quiet:
                console.write(self._clean(piece.text))

    def waiting(self, health: Mapping[str, Any]) -> None:
        """One line on stderr for each thing that is waited for."""
        what = waiting_text({**health, "percent": None, "eta_s": None}, 0.0, answering=True)
        if what and what != self._noted and not self._quiet:
            self._noted = what
            console.note(f"({what})")

    def tick(self) -> None:
        pass

    def toggle(self) -> bool:
        self.shown = not self.shown
        return self.shown

    def close(self) -> None:
        """End the line that the cursor stands on."""
        self._end_thought()
        if self.text and not self.text.endswith("\n") and not self._quiet:
            console.write("\n")

    def _end_thought(self) -> None:
        if not self._thought.going_on:
            return
        self._thought.end()
        if self._dim:
            console.write_note("\n")
        if self._terminal:
            console.note(self._thought.line())
            console.write_note("\n")

    def _clean(self, text: str) -> str:
        """Nothing that a terminal would obey; a pipe gets every byte."""
        if not sys.stdout.isatty():
            return text
        from .chat_markdown import harmless

        return harmless(text)
