"""Turns tokens into text that may be sent: never half a character, never the beginning of a stop string.

Knows nothing of models: bytes of tokens in, text out. Deterministic in the tokens, so that a continued request holds
back exactly what it held back before.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One answer's text. ``push`` gives what may be sent; ``stopped`` says that a stop string was met."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that this token's bytes complete."""
        self._held += self._decoder.decode(piece)
        if not self._stop:
            text, self._held = self._held, ""
            return text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = self._maybe_stop()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _maybe_stop(self) -> int:
        """Length of the longest tail that could be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop)) - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def finish(self) -> str:
        """What was held back, at the end of an answer that met no stop string."""
        if self.stopped is not None:
            return ""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text
