"""Puts into words why an engine ended, and remembers how often it was the same thing.

Pure: facts in (how the process ended, its last lines, what the probes of the peers saw), a `Failure` out. The
supervisor acts on it, the API and the log repeat it. Rules from issue reports about the stock head: it aborts as a
whole when a peer dies, and the line that says so is the only trace.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra import errors
from hydra.errors import EngineError, HydraError
from hydra.head.probe import PeerReport

EndKind = Literal["exit", "stall", "error", "stop", "reload"]

# Faults that another try cannot mend: what is on disk or in hydra.toml is wrong for this box.
PERMANENT_KINDS = ("ConfigError", "DeviceMissing", "LibraryError", "ModelError")

# What ggml-rpc.cpp of the pinned release prints before it aborts.
_RPC_LOSS = re.compile(r"remote rpc server crashed|failed to (?:send|recv|connect)|rpc.*(?:connection|malformed)", re.I)
_TELLING = re.compile(r"error|abort|assert|failed|exception|out of memory|killed|fatal|crash", re.I)
_FRAME_OF_A_TRACE = re.compile(r"^(#\d+ |\s*(?:/|0x)|\[New LWP|\s*at |Thread |warning: )")


@dataclass(frozen=True)
class Ending:
    """How one life of the engine ended, before anyone asked why."""

    kind: EndKind
    words: str = ""
    error: HydraError | None = None


@dataclass(frozen=True)
class Failure:
    """Why the engine ended: what the log, /health and `hydra ps` say."""

    key: str
    reason: str
    hint: str
    node: str | None
    permanent: bool = False
    error: HydraError | None = None
    at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason, "hint": self.hint, "node": self.node, "at": self.at}


def error_from_frame(error: object) -> HydraError:
    """A `failed` frame's error as the exception of that kind; a kind that this side does not know is an EngineError."""
    if not isinstance(error, dict):
        return EngineError(f"The engine failed: {error}.")
    cls = getattr(errors, str(error.get("kind", "")), EngineError)
    if not (isinstance(cls, type) and issubclass(cls, HydraError)):
        cls = EngineError
    return cls(str(error.get("message", "The engine failed.")), str(error.get("hint", "")))


def telling_line(lines: Iterable[str]) -> str:
    """The last line of a dead program that says something, or ''."""
    for line in reversed([line for line in lines if not _FRAME_OF_A_TRACE.match(line)]):
        if _TELLING.search(line):
            return line.strip()[:300]
    return ""


@dataclass(frozen=True)
class LinkFault:
    """What the link to a peer reported before it closed the engine's connection. at: time.monotonic()."""

    node: str
    kind: str
    message: str
    hint: str
    at: float = field(default_factory=time.monotonic)


LINK_FAULT_S = 15.0  # an engine that ends longer after a link's report ended for another reason


def diagnose(
    ending: Ending,
    exit_words: str,
    stderr: Sequence[str],
    peers: Sequence[PeerReport],
    *,
    loading: bool,
    link: LinkFault | None = None,
) -> Failure:
    """From the facts to a reason. A peer that does not answer explains everything else, so it is named first."""
    engine = f"the engine {ending.words}" if ending.words else f"the engine {exit_words}"
    phase = " while loading" if loading else ""
    gone = [peer for peer in peers if not peer.usable]
    if gone:
        peer = gone[0]
        others = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        return Failure(
            f"peer:{peer.target.name}:{peer.state}",
            f"{_upper(peer.words)}{others}; {engine}{phase}",
            peer.hint,
            peer.target.name,
        )
    if link is not None and time.monotonic() - link.at <= LINK_FAULT_S:
        reason = f"{link.message.rstrip('.')}; {engine}{phase}"
        return Failure(f"link:{link.node}:{link.kind}", reason, link.hint, link.node)
    if ending.error is not None:
        kind = type(ending.error).__name__
        message = ending.error.message
        node = next((peer.target.name for peer in peers if peer.target.endpoint in message), None)
        key, permanent = f"{kind}:{_digitless(message)}", kind in PERMANENT_KINDS
        reason = f"{message.rstrip('.')}{phase}"
        return Failure(key, reason, ending.error.hint, node, permanent, ending.error)
    line = telling_line(stderr)
    if any(_RPC_LOSS.search(text) for text in stderr) and peers:
        node = peers[0].target.name if len(peers) == 1 else None
        who = f"peer {node}" if node else "a peer"
        return Failure(
            f"link:{node}",
            f"The connection to {who} broke, it answers again; {engine}{phase}",
            "The peer's own log says why, if it was the peer.",
            node,
        )
    said = f" ({line})" if line else ""
    return Failure(
        f"{ending.kind}:{exit_words}:{_digitless(line)}",
        f"{_upper(engine)}{phase}{said}",
        "The lines above in the log are its own." if line else "",
        None,
    )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _digitless(text: str) -> str:
    """Addresses, counts and times differ between two occurrences of one fault."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)[:200]


class Ledger:
    """Counts equal failures. limit: that many in `window_s` seconds and it is no accident any more."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self.total = 0
        self.recent: deque[Failure] = deque(maxlen=200)
        self._in_a_row = 0
        self._times: deque[tuple[float, str]] = deque(maxlen=1000)

    def note(self, failure: Failure, now: float) -> HydraError | None:
        """Enter a failure. Returns the terminal error once it has happened too often."""
        self.total += 1
        self._in_a_row += 1
        self.recent.append(failure)
        self._times.append((now, failure.key))
        same = sum(1 for at, key in self._times if key == failure.key and now - at <= self.window_s)
        if same < self.limit:
            return None
        return EngineError(
            f"{failure.reason}: {same} times within {self.window_s / 60:g} minutes; hydra gives up.",
            failure.hint
            or "`hydra doctor` on both boxes; head.restart_limit and head.restart_window_s say when to give up.",
        )

    def served(self) -> None:
        """The engine has answered something: the next restart need not be slow."""
        self._in_a_row = 0

    def delay_s(self, first_s: float, longest_s: float) -> float:
        """Before the next start: none after the first failure in a row, then `first_s` doubling up to `longest_s`."""
        return 0.0 if self._in_a_row <= 1 else min(longest_s, first_s * 2.0 ** (self._in_a_row - 2))
