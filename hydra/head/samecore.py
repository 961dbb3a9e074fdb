"""Keeps the RPC client's thread on the core of the engine's thread while a batch is decoded.

llama.cpp's RPC client sends from a thread of its own and lets the caller wait for it: for every input of a split,
twice. The two never work at the same time, so a second core gains nothing; but waking a thread on an idle core takes
some 50 µs in a virtual machine, and on the same core 8. A verification step has about twenty such turns.

Knows threads and cores; does not know llama.cpp. Linux only: elsewhere nothing is found and nothing changes.

Source: sched(7), proc_pid_status(5); rpc_dispatcher in ggml-rpc.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

TURNS = 64  # so often is a thread woken to be recognised


class SameCore:
    """While ``hold`` is in force, the calling thread and ``threads`` share the core that the caller is on."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = tuple(threads)
        self._core = -1
        self._free = os.sched_getaffinity(0)
        self._current = ctypes.CDLL(None).sched_getcpu

    def hold(self) -> None:
        core = int(self._current())
        if core not in self._free:
            return
        try:
            if core != self._core:
                self._core = core
                for thread in self._threads:
                    os.sched_setaffinity(thread, {core})
            os.sched_setaffinity(0, {core})
        except OSError:  # the cores that this process may use were changed from outside: leave them alone
            self._free = set()

    def release(self) -> None:
        if self._free:
            try:
                os.sched_setaffinity(0, self._free)
            except OSError:
                self._free = set()


def partners(wake: Sequence[Callable[[], object]]) -> list[int]:
    """The threads that serve the calling one: each call of one of ``wake`` wakes one of them, once, and waits for it.

    Recognised by their count of voluntary switches; what cannot be told apart is left out.
    """
    if not sys.platform.startswith("linux"):
        return []
    found: list[int] = []
    me = threading.get_native_id()
    for call in wake:
        before = _switches()
        for _ in range(TURNS):
            call()
        turns = {thread: count - before.get(thread, count) for thread, count in _switches().items() if thread != me}
        likely = sorted(turns, key=turns.__getitem__, reverse=True)
        most, second = [*(turns[thread] for thread in likely), 0, 0][:2]
        if most >= TURNS // 2 > 2 * second and likely[0] not in found:
            found.append(likely[0])
    return found


def _switches() -> dict[int, int]:
    """Voluntary context switches so far of this process's threads."""
    counts: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "status").read_text()
        except OSError:
            continue  # it has ended
        _, _, rest = text.partition("\nvoluntary_ctxt_switches:")
        counts[int(task.name)] = int(rest.split(maxsplit=1)[0])
    return counts
