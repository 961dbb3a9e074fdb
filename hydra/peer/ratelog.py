"""A log that a flood cannot fill: one line for each source and kind in an interval, the next with a count."""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_S = 30.0
MAX_SOURCES = 1024


class RateLimitedLog:
    """report(source, kind, text): the first of a kind at once, the rest counted until the interval is over."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self.logger = logger
        self.interval_s = interval_s
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], list[float]] = {}  # -> [time of the last line, left out since]

    def report(self, source: str, kind: str, text: str) -> None:
        now = time.monotonic()
        with self._lock:
            entry = self._seen.get((source, kind))
            if entry is None:
                if len(self._seen) >= MAX_SOURCES:
                    self._forget(now)
                if len(self._seen) >= MAX_SOURCES:
                    # Very many sources at once: they share one line, so that the sum stays bounded too.
                    source = "many sources"
                    entry = self._seen.get((source, kind))
                if entry is None:
                    entry = self._seen[(source, kind)] = [-self.interval_s, 0]
            if now - entry[0] < self.interval_s:
                entry[1] += 1
                return
            left_out, entry[0], entry[1] = int(entry[1]), now, 0
        more = f" ({left_out} more like this in the last {self.interval_s:g} s)" if left_out else ""
        self.logger.warning("%s: %s%s", source, text, more)

    def _forget(self, now: float) -> None:
        for key in [key for key, entry in self._seen.items() if now - entry[0] >= self.interval_s]:
            del self._seen[key]
