"""The link as a process beside the engine: started by the head, ends with it, tells in JSON lines what happens.

``python -m hydra.link.process SETTINGS`` is that process. On stdout, one object a line:

    {"event": "listening", "endpoint": "127.0.0.1:port"}                    first, once
    {"event": "connected", "peer": name, "mode": "link" | "plain", …}       each connection
    {"event": "fault", "peer": name, "kind": …, "message": …, "hint": …}    the peer is no good
        kind: unreachable, gone, fault (the peer said why), silent, frozen
    {"event": "stats", …}                                                   answers "stats" on stdin

It ends when its stdin does, and leaves Ctrl-C to its parent. A process and not a thread of the engine's: the engine's
own Python would keep the GIL from us between two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from hydra.errors import PeerError
from hydra.link.settings import LinkSettings

START_S = 20.0
STOP_S = 5.0
_STATS_S = 5.0
_PR_SET_PDEATHSIG = 1
OnEvent = Callable[[dict[str, Any]], None]


def link_command(settings: LinkSettings) -> list[str]:
    """How a link is started: from the same interpreter, or the same single file."""
    if getattr(sys, "frozen", False):
        return [sys.executable, "_link", settings.to_json()]
    return [sys.executable, "-m", "hydra.link.process", settings.to_json()]


class LinkProcess:
    """A running link. endpoint: what the engine is given in place of the peer's own.

    on_event: called on a thread of its own for each event but "stats"; a link that ends by itself says
    {"event": "fault", "kind": "ended", …}.
    """

    def __init__(
        self, settings: LinkSettings, process: subprocess.Popen[bytes], endpoint: str, on_event: OnEvent
    ) -> None:
        self.settings = settings
        self.process = process
        self.endpoint = endpoint
        self._on_event = on_event
        self._stats: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stopping = False
        self._thread = threading.Thread(target=self._listen, name=f"link-{settings.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stats(self) -> dict[str, Any]:
        """Its counters (hydra.link.forwarder.Counters). Raises: PeerError when it does not answer."""
        try:
            assert self.process.stdin is not None  # it was asked for
            self.process.stdin.write(b"stats\n")
            self.process.stdin.flush()
            return self._stats.get(timeout=_STATS_S)
        except (OSError, ValueError, queue.Empty) as exc:  # ValueError: stopped already
            raise PeerError(f"The link to peer {self.settings.name} does not answer.") from exc

    def stop(self) -> None:
        """Ends it within a bound; safe to call twice."""
        self._stopping = True
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> LinkProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _listen(self) -> None:
        assert self.process.stdout is not None  # it was asked for
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "stats":
                self._stats.put(event)
            else:
                self._on_event(event)
        if not self._stopping:
            name = self.settings.name
            words = f"The link to peer {name} ended by itself (status {self.process.wait()})."
            hint = "Please report this with the log."
            self._on_event({"event": "fault", "peer": name, "kind": "ended", "message": words, "hint": hint})


def start_link(
    settings: LinkSettings,
    on_event: OnEvent = lambda _event: None,
    *,
    prefix: Sequence[str] = (),
    quiet: bool = False,
) -> LinkProcess:
    """Starts the link of one peer and returns when it listens; whether the peer answers shows when the engine connects.

    prefix: a command to put in front, such as ``ip netns exec NAME``. Raises: PeerError when it does not come up.
    """
    process = subprocess.Popen(
        [*prefix, *link_command(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
    )
    line = _first_line(process, START_S)
    try:
        endpoint = json.loads(line)["endpoint"]
    except (ValueError, KeyError):
        process.kill()
        process.wait()
        words = line.decode(errors="replace").strip() or "no answer"
        raise PeerError(f"The link to peer {settings.name} did not come up: {words}.") from None
    return LinkProcess(settings, process, endpoint, on_event)


def _first_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None  # it was asked for
    deadline = time.monotonic() + timeout_s
    data = b""
    fd = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not data.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
            # Byte by byte: what follows the line is for the thread that reads through the buffer.
            if selector.select(left):
                piece = os.read(fd, 1)
                if not piece:
                    break
                data += piece
    return data


def main(arguments: Sequence[str]) -> int:
    """The link's process; returns its exit status."""
    from hydra.errors import HydraError
    from hydra.link.forwarder import Forwarder

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    lock = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError, ValueError):
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

    settings = LinkSettings.from_json(arguments[0])
    try:
        if settings.tls_dir:
            from pathlib import Path

            from hydra.security import load_identity

            load_identity(Path(settings.tls_dir), settings.node)  # a missing certificate is told at the start
        forwarder = Forwarder(settings, say)
    except (HydraError, OSError) as exc:
        say({"error": str(exc)})
        return exc.exit_code if isinstance(exc, HydraError) else 1
    # Nothing on the path makes reference cycles; a collection in the middle of a step would be a pause for nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    threading.Thread(target=forwarder.serve, name="link-accept", daemon=True).start()
    say({"event": "listening", "endpoint": forwarder.endpoint})
    for line in sys.stdin:
        if line.strip() == "stats":
            say({"event": "stats", **forwarder.stats()})
    forwarder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
