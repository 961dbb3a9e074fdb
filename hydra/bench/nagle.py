"""`hydra bench nagle`: what happens to decode when the accepted socket has no TCP_NODELAY.

The bug that hydra comes from: a reply sent in two parts over a socket with Nagle's algorithm waits for the client's
delayed acknowledgement, some 40 ms a step. This measurement takes the option away from a **running** server, the
stock one and hydra's peer, by borrowing its accepted socket (pidfd_getfd) and clearing the option there. So neither
has a switch for it, and no configuration can reach it. The stock server replies in two parts and shows the fault
whole; hydra's replies leave in one segment, which by itself keeps Nagle from waiting: two defences, and either is
enough.

Rules: tcp(7), pidfd_getfd(2); RFC 896, RFC 1122 4.2.3.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.bench.pairs import Report, Setting, run_head, settle, start
from hydra.bench.process import process_tree
from hydra.bench.run_head import HeadSpec
from hydra.errors import HydraError

_PIDFD_GETFD = 438  # the same number on every architecture
_LOOK_EVERY_S = 0.01
_WARMUP_TOKENS = (
    64  # so that the option is gone, and the client's first quick acknowledgements too, before the first figure
)


@dataclass(frozen=True)
class NagleFigures:
    """Decode in tok/s with the option and without it, the median steps, and how many sockets it was taken from."""

    with_tps: float
    without_tps: float
    with_step_ms: float
    without_step_ms: float
    sockets: int

    @property
    def factor(self) -> float:
        return self.with_tps / self.without_tps if self.without_tps else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "factor": self.factor}


def run(model: Path, setting: Setting, tokens: int, report: Report) -> dict[str, NagleFigures]:
    """Figures for "stock" and "hydra".

    Raises: HydraError when this user may not borrow another process's socket, or a run fails.
    """
    spec = HeadSpec(str(model), threads=setting.threads, decode_tokens=tokens, warmup_tokens=_WARMUP_TOKENS)
    figures = {}
    for kind in ("stock", "hydra"):
        runs: dict[bool, tuple[float, float]] = {}
        taken = 0
        for without in (False, True):
            with start(kind, setting) as peer:
                with without_nodelay(peer.pid) if without else contextlib.nullcontext() as thief:
                    result, _ = run_head(spec, peer)
                taken += thief.sockets if thief else 0
            steps = sorted(result.step_ms)
            runs[without] = (result.decode_tps, steps[len(steps) // 2] if steps else 0.0)
            state = "without" if without else "with"
            report(f"{kind} {state} TCP_NODELAY: {result.decode_tps:.2f} tok/s, {runs[without][1]:.1f} ms a step")
            settle()
        figures[kind] = NagleFigures(runs[False][0], runs[True][0], runs[False][1], runs[True][1], taken)
    return figures


class _Thief:
    """Clears TCP_NODELAY on every connected socket of a process tree, again and again while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done: set[tuple[int, str]] = set()
        self._stop = threading.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def sockets(self) -> int:
        return len(self._done)

    def look(self) -> None:
        for pid in process_tree(self._pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        target = os.readlink(entry.path)
                        fresh = target.startswith("socket:") and (pid, target) not in self._done
                        if fresh and self._clear(pid, int(entry.name)):
                            self._done.add((pid, target))

    def loop(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            with contextlib.suppress(HydraError):
                self.look()

    def stop(self) -> None:
        self._stop.set()

    def _clear(self, pid: int, number: int) -> bool:
        process = os.pidfd_open(pid)
        try:
            borrowed = self._libc.syscall(_PIDFD_GETFD, process, number, 0)
            reason = os.strerror(ctypes.get_errno())
        finally:
            os.close(process)
        if borrowed < 0:
            raise HydraError(
                f"A socket of process {pid} cannot be borrowed: {reason}.",
                "`hydra bench nagle` needs Linux 5.6 or newer and the right to trace its own children.",
            )
        with socket.socket(fileno=borrowed) as sock:
            if sock.family != socket.AF_INET or sock.type != socket.SOCK_STREAM:
                return False
            with contextlib.suppress(OSError):
                sock.getpeername()  # a listener has none
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
                return True
        return False


@contextmanager
def without_nodelay(pid: int) -> Iterator[_Thief]:
    """While the block runs, no connected TCP socket of ``pid`` or its descendants keeps TCP_NODELAY.

    Raises: HydraError at once when that is not permitted here.
    """
    thief = _Thief(pid)
    thief.look()
    thread = threading.Thread(target=thief.loop, name="nagle", daemon=True)
    thread.start()
    try:
        yield thief
    finally:
        thief.stop()
        thread.join()
