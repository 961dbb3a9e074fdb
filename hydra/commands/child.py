"""A `hydra up` of our own, as a process of its own: started, watched until it serves, and ended within a bound.

For `hydra demo` and for tests that need real boxes on one machine. Knows nothing of what the node does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

STOP_S = 20.0
_PR_SET_PDEATHSIG = 1


def hydra_command(*arguments: str) -> list[str]:
    """This program again, frozen or not."""
    frozen = getattr(sys, "frozen", False)
    return [sys.executable, *([] if frozen else ["-m", "hydra"]), *arguments]


def free_ports(count: int) -> list[int]:
    """TCP ports of loopback that were free a moment ago, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


class NodeProcess:
    """`hydra up --node NAME` from the moment it is made; its log is kept in a file beside the configuration."""

    def __init__(self, config: Path, node: str) -> None:
        self.node = node
        self.log_file = config.with_name(f"{config.stem}-{node}.log")
        # The user's own HYDRA_ variables belong to the user's own boxes.
        env = {key: value for key, value in os.environ.items() if not key.startswith("HYDRA_")}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                hydra_command("up", "--config", str(config), "--node", node), env=env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        """The error that it ended with, in one line; else the last line of its log."""
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("error:", "hint:"))]
        return " ".join(errors[-2:] or lines[-1:]) or "it said nothing"

    def stop(self) -> int:
        """SIGTERM, and after some seconds SIGKILL; its exit code."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _die_with_parent() -> None:
    """In the child: end when whoever started us is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
