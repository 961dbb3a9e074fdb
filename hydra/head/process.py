"""The engine child as the parent sees it: started, spoken to in frames, its stderr kept, its end understood.

The parent's side of docs/architecture.md, "Parent and engine child". Knows nothing of what the frames mean, of
llama.cpp or of requests. The child is in a session of its own, so that Ctrl-C in the terminal reaches the parent alone,
and its core limit is zero: the stock RPC client ends by abort() when a peer dies, and a core of it would be the size of
the model.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import EngineError
from hydra.head.channel import FrameReader, encode

STDERR_LINES = 60

Frame = dict[str, Any]


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What the child inherits. Where gdb is installed, ggml's abort() attaches it for a trace of every thread, which
    holds up the recovery for seconds; GGML_NO_BACKTRACE, unless set by the user, leaves that out."""
    environment = {"GGML_NO_BACKTRACE": "1", **os.environ, **extra}
    if not getattr(sys, "frozen", False):
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return environment


class EngineProcess:
    """One life of the engine child.

    on_frame: called for each frame, in order. on_line: called for each line of its stderr. Make it with `start`;
    `ended` is done once the process is gone and its pipes are read to the end.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_frame: Callable[[Frame], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._on_frame = on_frame
        self._on_line = on_line
        self.stderr_tail: deque[str] = deque(maxlen=STDERR_LINES)
        self.fault: str = ""
        """What was wrong with its frames, if anything was."""
        self.ended: asyncio.Task[int] = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        command: Callable[[int], Sequence[str]],
        on_frame: Callable[[Frame], None],
        on_line: Callable[[str], None],
        env: Mapping[str, str] | None = None,
    ) -> EngineProcess:
        """Start the child with one end of a socketpair. Raises: EngineError when it cannot be started at all."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=1 << 20,
                env=_environment(env or {}),
            )
        except OSError as error:
            ours.close()
            raise EngineError(
                f"The engine process cannot be started: {error.strerror}.",
                "Is the installation complete? `hydra doctor` looks.",
            ) from error
        finally:
            theirs.close()
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        except (OSError, ProcessLookupError):
            pass  # it ended already: the watcher will say so
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return cls(process, reader, writer, on_frame, on_line)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def send(self, frame: Frame) -> None:
        """Queue one frame. To a dead child it is dropped: whoever asked is taken care of when the end is seen."""
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, then tell it, then make it. Returns when it is gone."""
        self.send({"type": "shutdown"})
        if not await self._gone(grace_s):
            self._signal(signal.SIGTERM)
            if not await self._gone(min(grace_s, 2.0)):
                await self.kill()

    async def kill(self) -> None:
        """SIGKILL (it may hang in a blocking receive, or be stopped: nothing gentler is sure) and wait for its end."""
        self._signal(signal.SIGKILL)
        await asyncio.shield(self.ended)

    def kill_now(self) -> None:
        """SIGKILL without waiting, for the way out."""
        self._signal(signal.SIGKILL)

    def exit_words(self) -> str:
        """How it ended, for a person."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        if code < 0:
            try:
                return f"ended by {signal.Signals(-code).name}"
            except ValueError:
                return f"ended by signal {-code}"
        return f"ended with exit code {code}"

    def _signal(self, number: int) -> None:
        if self.alive:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                pass

    async def _gone(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait({self.ended}, timeout=timeout_s)
        return bool(done)

    async def _watch(self) -> int:
        frames = asyncio.create_task(self._read_frames())
        lines = asyncio.create_task(self._read_lines())
        code = await self.process.wait()
        # What it wrote before its end still counts: tokens that were on their way are not computed twice. The pipe may
        # be held open by a grandchild, so the wait for its last lines is bounded.
        await asyncio.wait({frames, lines}, timeout=2.0)
        for task in (frames, lines):
            task.cancel()
        self._writer.close()
        return code

    async def _read_frames(self) -> None:
        frames = FrameReader()
        try:
            while data := await self._reader.read(1 << 18):
                for frame in frames.feed(data):
                    self._on_frame(frame)
        except ConnectionError:
            pass  # as good as the end of the stream
        except EngineError as error:
            self.fault = f"it sent what is no frame ({error.message})"
            self._signal(signal.SIGKILL)
            return
        # Its end of the pair is closed. A child that lives on without it is of no use to anyone.
        if not await self._exits_soon():
            self.fault = "it closed its channel and lived on"
            self._signal(signal.SIGKILL)

    async def _exits_soon(self) -> bool:
        for _ in range(50):
            if not self.alive:
                return True
            await asyncio.sleep(0.1)
        return not self.alive

    async def _read_lines(self) -> None:
        stdout = self.process.stdout
        if stdout is None:
            return
        while True:
            try:
                raw = await stdout.readline()
            except ValueError:  # a line beyond the limit: asyncio has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                self.stderr_tail.append(line)
                self._on_line(line)
