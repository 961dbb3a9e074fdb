"""Starts a peer as a process of its own and waits until it serves: for the demo, the benchmarks and the tests.

``python -m hydra.peer.launch SETTINGS`` is that process: it prints one JSON line on stdout when it is ready, then logs
to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hydra.errors import PeerError
from hydra.peer.settings import PeerSettings

START_S = 60.0
STOP_S = 12.0


class PeerProcess:
    """A running peer. host, port: where it serves; pid: the listener's; worker_pid: the device worker's."""

    def __init__(self, process: subprocess.Popen[bytes], ready: dict[str, Any], host: str) -> None:
        self.process = process
        self.host = host
        self.port: int = ready["port"]
        self.pid = process.pid
        self.worker_pid: int = ready["worker_pid"]

    def stop(self) -> int:
        """Ends it (SIGTERM, after some seconds SIGKILL) and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def start_peer(
    host: str = "127.0.0.1",
    port: int = 0,
    device: str = "auto",
    threads: int = 0,
    *,
    module: str = "hydra.peer.launch",
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    quiet: bool = True,
    **settings: Any,
) -> PeerProcess:
    """Starts a peer and returns when it serves.

    settings: further fields of PeerSettings. module: what is run (the Nagle benchmark has its own). prefix: a command
    to put in front, such as ``ip netns exec NAME``. quiet: its log is dropped.

    Raises: PeerError with the peer's own last words when it does not come up.
    """
    table = PeerSettings(host=host, port=port, devices=(device,), threads=threads, **settings)
    frozen = getattr(sys, "frozen", False)
    run = [sys.executable, "_peer"] if frozen else [sys.executable, "-m", module]
    process = subprocess.Popen(
        [*prefix, *run, table.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    line = _first_line(process, START_S)
    try:
        ready = json.loads(line)
        return PeerProcess(process, ready, host)
    except (ValueError, KeyError):
        if process.poll() is None:
            process.kill()
        process.wait()
        raise PeerError(f"The peer did not come up: {line.decode(errors='replace').strip() or 'no answer'}.") from None


def _first_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None  # it was asked for
    deadline = time.monotonic() + timeout_s
    data = b""
    fd = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while b"\n" not in data and (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                piece = os.read(fd, 4096)
                if not piece:
                    break
                data += piece
    return data.partition(b"\n")[0]


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(arguments: list[str], **options: Any) -> int:
    """The peer process; options go to the Listener."""
    from hydra.errors import HydraError
    from hydra.peer.listener import Listener, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    def ready(listener: Listener) -> None:
        assert listener.worker is not None  # it has just said that it is ready
        _say({"port": listener.port, "worker_pid": listener.worker.pid})

    try:
        serve(PeerSettings.from_json(arguments[0]), on_ready=ready, **options)
    except HydraError as exc:
        _say({"error": str(exc)})
        logging.getLogger("hydra.peer").error("%s", exc)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
