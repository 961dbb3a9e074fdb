"""Starts the engine process from the parent's side. Never imports llama.cpp.

Knows how to run this program again, as a checkout, an installed package or one frozen file. Does not know what the
engine does or when it is to be started anew (supervisor.py does).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from .channel import Channel


@dataclass
class EngineProcess:
    """A running engine process and the channel to it. ``close`` ends it within a bound."""

    process: subprocess.Popen[bytes]
    channel: Channel

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self, timeout_s: float = 10.0) -> int:
        """Ask, then insist. Returns the exit code (negative: the signal's number)."""
        with contextlib.suppress(OSError):
            self.channel.send({"type": "shutdown"})
        self.channel.close()
        for end in (None, self.process.terminate, self.process.kill):
            if end is not None:
                end()
            try:
                return self.process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                continue
        return self.process.wait()


def command(fd: int) -> list[str]:
    """The command line of an engine process on descriptor ``fd``."""
    if getattr(sys, "frozen", False):
        return [sys.executable, "_engine", "--fd", str(fd)]
    return [sys.executable, "-m", "hydra.head.child", str(fd)]


def start(stderr: int | IO[bytes] | None = None, env: Mapping[str, str] | None = None) -> EngineProcess:
    """A new engine process, joined by a socket pair; it has not loaded anything yet."""
    ours, theirs = socket.socketpair()
    with theirs:
        environment = dict(os.environ if env is None else env)
        if not getattr(sys, "frozen", False):
            root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        process = subprocess.Popen(command(theirs.fileno()), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                                   stdout=stderr, stderr=stderr, env=environment, close_fds=True)
    return EngineProcess(process, Channel(ours))
