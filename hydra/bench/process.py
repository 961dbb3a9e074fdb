"""Child processes of the benchmarks: start, know when they listen, weigh them, and stop them within a bound.

Knows nothing of ggml or of what a child does. A child that outlives its benchmark would spoil every later figure, so
each is asked to die with its parent (PR_SET_PDEATHSIG, in the child itself) and is killed when asking does not help.

Rules: proc(5) for VmRSS, VmHWM, clear_refs, schedstat and net/tcp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from hydra.errors import HydraError

_PR_SET_PDEATHSIG = 1
_TCP_LISTEN = "0A"
_CHECKOUT = Path(__file__).resolve().parent.parent.parent


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def worker_command(name: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs ``hydra.bench.<name>`` as a process, from a checkout or from the frozen binary."""
    if getattr(sys, "frozen", False):
        return [sys.executable, "bench", "worker", name, *arguments]
    return [sys.executable, "-m", f"hydra.bench.{name}", *arguments]


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago, for programs that cannot choose one themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Memory:
    """Resident memory of some processes; ``peak_bytes`` is the sum of the kernel's high-water marks (VmHWM)."""

    rss_bytes: int
    peak_bytes: int
    anonymous_bytes: int


def process_tree(pid: int) -> list[int]:
    """``pid`` and its living descendants."""
    import psutil

    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def memory_of(pids: Sequence[int]) -> Memory:
    """Resident, peak resident and anonymous memory of ``pids``, summed; processes that have gone count nothing."""
    total = {"VmRSS": 0, "VmHWM": 0, "RssAnon": 0}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in total:
                    total[key] += int(value.split()[0]) * 1024
    return Memory(total["VmRSS"], total["VmHWM"], total["RssAnon"])


def reset_peak(pids: Sequence[int]) -> None:
    """Start the high-water marks of ``pids`` anew, so that start-up does not hide what a load needs."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Time on a processor that the living threads of ``pids`` have had so far.

    From the scheduler, in nanoseconds where the kernel tells: utime and stime count in ticks of 10 ms.
    """
    import psutil

    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            try:
                for thread in os.scandir(f"/proc/{pid}/task"):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        total += int(Path(thread.path, "schedstat").read_text().split()[0]) / 1e9
            except (OSError, ValueError, IndexError):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
    return total


class MemoryWatch:
    """Samples a process tree's resident memory at ``hertz`` while a block runs.

    The kernel's high-water mark catches what falls between two samples, but is kept per process: the sum of two
    processes' marks overstates a peak that they did not reach at one time. So the peak is the larger of the
    highest sampled sum and the highest single mark above its own start.
    """

    def __init__(self, pid: int, hertz: float = 100.0) -> None:
        self._pid = pid
        self._period_s = 1.0 / hertz
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.before = Memory(0, 0, 0)
        self.after = Memory(0, 0, 0)
        self.peak_bytes = 0
        self.samples = 0

    def __enter__(self) -> MemoryWatch:
        self._pids = process_tree(self._pid)
        reset_peak(self._pids)
        self.before = memory_of(self._pids)
        self._before_each = {pid: memory_of([pid]).rss_bytes for pid in self._pids}
        self.peak_bytes = self.before.rss_bytes
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = memory_of(self._pids)
        for pid in self._pids:
            risen = memory_of([pid]).peak_bytes - self._before_each[pid]
            self.peak_bytes = max(self.peak_bytes, self.before.rss_bytes + risen)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.peak_bytes = max(self.peak_bytes, memory_of(self._pids).rss_bytes)
            self.samples += 1


def start_hydra(arguments: Sequence[str]) -> Child:
    """This program itself as a child, without the user's own HYDRA_* settings, which belong to the user's own boxes."""
    # An empty variable would be a setting, too.
    env = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("HYDRA_")}
    try:
        return Child([sys.executable, *([] if getattr(sys, "frozen", False) else ["-m", "hydra"]), *arguments])
    finally:
        os.environ.update(env)


class Child:
    """One child process with its output in a temporary file, ended at the latest by ``close``.

    ``pipe``: standard output is a pipe for the caller to read (``process.stdout``), and only standard error goes to
    the file. ``take_input``: standard input is a pipe too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        netns: str | None = None,
        env: dict[str, str] | None = None,
        pipe: bool = False,
        take_input: bool = False,
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        full = ["ip", "netns", "exec", netns, *command] if netns else list(command)
        environment = dict(os.environ)
        if not getattr(sys, "frozen", False):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CHECKOUT), environment.get("PYTHONPATH")]))
        environment.update(env or {})
        self.process = subprocess.Popen(
            full,
            stdin=subprocess.PIPE if take_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else self._log,
            stderr=self._log if pipe else subprocess.STDOUT,
            env=environment,
        )
        self.command = full

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines that the child printed."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-lines:])

    def wait_listening(self, port: int, timeout_s: float = 30.0) -> None:
        """Return when the child's network namespace has a listener on ``port``.

        Looks in /proc instead of connecting: the stock server serves its clients one after another, and a probe would
        be one.

        Raises: HydraError when the child ends first or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise HydraError(
                    f"{self.command[0]} ended with status {self.process.returncode} before it listened on port {port}:"
                    f"\n{self.log_tail()}"
                )
            if _listens(self.pid, port):
                return
            time.sleep(0.01)
        raise HydraError(f"Nothing listened on port {port} within {timeout_s:.0f} s:\n{self.log_tail()}")

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child: terminate, wait ``timeout_s``, kill. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout_s)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was still to be sent has nobody to go to
                    stream.close()
        if not self._log.closed:
            self._log.close()


_Server = TypeVar("_Server", bound="ChildServer")


class ChildServer:
    """A server of this package in a child process, listening on ``host``; ``endpoint`` is what a head is given.

    name, arguments: as for ``worker_command``. port: 0 for any. Use with ``with``.
    Raises: HydraError when it does not listen within ``timeout_s``.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], host: str, port: int, *, netns: str | None, timeout_s: float
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self._child = Child(worker_command(name, ["--host", host, "--port", str(self.port), *arguments]), netns=netns)
        try:
            self._child.wait_listening(self.port, timeout_s)
        except HydraError:
            self._child.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def log_tail(self) -> str:
        return self._child.log_tail()

    def close(self) -> None:
        self._child.close()

    def __enter__(self: _Server) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()



def _listens(pid: int, port: int) -> bool:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False
