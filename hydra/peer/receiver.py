"""Reads one head's bytes: many small messages with one recv, large weights straight to where they belong.

One buffer per connection, cut into segments. Bytes lie in it from ``pos`` to ``end``; a device may still be copying
out of what lies before ``pos`` (copies are queued, and pinned memory is read later), so each segment left behind gets
an event that is waited for before it is filled again. On a CPU nothing is ever queued and the events are nothing.

Knows the socket and the clock, not the protocol. All waits are bounded: an idle connection may wait between messages
as long as it likes, a message once started must come at ``min_rate`` or faster.

What holds the GIL: nothing here while it waits; recv_into and every libggml call release it.
"""

from __future__ import annotations

import socket
import struct
import time

from hydra.errors import PeerError
from hydra.ggml.backend import Backend, Event, PinnedMemory

SMALL_BYTES = 64 << 10  # until a head allocates something: probes and counters connect often and leave
HOST_BYTES = 4 << 20
DEVICE_BYTES = 16 << 20
SEGMENTS = 4
# A socket whose timeout Python keeps is polled before every recv; SO_RCVTIMEO makes the kernel do the waiting, for
# nothing.
_TICK_S = 0.5


class ConnectionClosed(Exception):
    """The head closed its connection between two messages: the normal end."""


class Receiver:
    """The receiving half of one connection.

    data: the buffer as writable memory; address: of its first byte; [pos, end): what has come and is not used yet.
    """

    def __init__(self, sock: socket.socket, message_s: float, min_rate_bytes_s: int, start: bytes = b"") -> None:
        self.sock = sock
        self.message_s = message_s
        self.min_rate = min_rate_bytes_s
        self._memory: PinnedMemory | None = None
        self._events: list[Event] = []
        self._busy = [False] * SEGMENTS
        raw = bytearray(SMALL_BYTES)
        self.data = memoryview(raw)
        self.address = 0
        self.capacity = self.segment = SMALL_BYTES
        self.pos = 0
        self.end = len(start)
        self.data[: self.end] = start
        self.queued = False  # the device may still be reading from before pos
        self.stopping = False
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_TICK_S * 1e6)))

    def enlarge(self, backend: Backend) -> None:
        """Takes the full buffer, pinned where the device can use that; a head's first allocation asks for it."""
        if self._memory is not None:
            return
        self._memory = memory = PinnedMemory(backend, HOST_BYTES if backend.is_cpu else DEVICE_BYTES)
        old = self.data[self.pos : self.end]
        self.data = memory.view
        self.address = memory.address
        self.data[: len(old)] = old
        self.capacity = len(self.data)
        self.segment = self.capacity // SEGMENTS
        self.pos, self.end = 0, len(old)
        self._events = [Event(backend) for _ in range(SEGMENTS)] if memory.pinned else []

    def idle_wait(self) -> None:
        """Waits for the next message to begin, for ever, but ends when asked to.

        Raises: ConnectionClosed at the end of the stream; PeerError when the connection breaks.
        """
        if self.pos == self.end:
            self._rewind()
        while True:
            got = self._recv(self._room())
            if got > 0:
                self.end += got
                return
            if self.stopping:
                raise ConnectionClosed
            if got == 0:
                raise ConnectionClosed

    def need(self, count: int) -> None:
        """Waits until count bytes lie contiguous from pos; count <= capacity.

        Raises: PeerError when the connection ends or is too slow within the message.
        """
        if self.pos + count > self.capacity:
            self._wrap()
        deadline = time.monotonic() + self.message_s + count / self.min_rate
        while (missing := count - (self.end - self.pos)) > 0:
            got = self._recv(self._room())
            if got > 0:
                self.end += got
            else:
                self._check(got, deadline, missing)

    def into(self, target: memoryview) -> None:
        """Fills target: what lies in the buffer first, the rest straight from the socket."""
        size = len(target)
        have = min(size, self.end - self.pos)
        if have:
            target[:have] = self.data[self.pos : self.pos + have]
            self.pos += have
        deadline = time.monotonic() + self.message_s + size / self.min_rate
        while have < size:
            got = self._recv(target[have:])
            if got > 0:
                have += got
                continue
            self._check(got, deadline, size - have)

    def piece(self, limit: int) -> memoryview:
        """The next bytes of a long payload as they lie in the buffer, at least one, at most limit; moves pos past them.

        They stay as they are until the device has read them (``leave`` marks that), at the latest until the buffer
        comes round.
        """
        if self.pos == self.end:
            self._turn()
            deadline = time.monotonic() + self.message_s + limit / self.min_rate
            while self.pos == self.end:
                got = self._recv(self._room())
                if got > 0:
                    self.end += got
                else:
                    self._check(got, deadline, limit)
        size = min(limit, self.end - self.pos)
        view = self.data[self.pos : self.pos + size]
        self.pos += size
        return view

    def leave(self, start: int) -> None:
        """Marks that the device was told to read [start, pos): what is left behind must not be filled before it has."""
        self.queued = True
        if self._events:
            first, last = start // self.segment, self.pos // self.segment
            for segment in range(first, min(last, SEGMENTS)):
                self._events[segment].record()
                self._busy[segment] = True

    def synchronized(self) -> None:
        """The device has finished everything: all that lies before pos is free."""
        self.queued = False
        if self._events:
            self._busy = [False] * SEGMENTS

    def close(self) -> None:
        self.data = memoryview(b"")
        for event in self._events:
            event.close()
        self._events = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _room(self) -> memoryview:
        """Where the next recv may write: from end to the end of its segment run that is free."""
        if self.end == self.capacity:
            self._wrap()
        if not self._events:
            return self.data[self.end :]
        segment = self.end // self.segment
        self._claim(segment)
        stop = segment + 1
        while stop < SEGMENTS and not self._busy[stop]:
            stop += 1
        return self.data[self.end : stop * self.segment]

    def _claim(self, segment: int) -> None:
        if self._busy[segment]:
            self._events[segment].wait()
            self._busy[segment] = False

    def _rewind(self) -> None:
        """Back to the start when everything is used and no device reads: the usual state between two steps."""
        if not (self.queued and self._events):
            self.pos = self.end = 0
        elif self.end > self.capacity - self.segment:
            self._wrap()

    def _turn(self) -> None:
        if self.pos == self.capacity or not (self.queued and self._events):
            self._wrap()

    def _wrap(self) -> None:
        """Moves what is not used yet to the start of the buffer."""
        rest = self.end - self.pos
        if self._events:
            if self.queued and self.pos:
                segment = min(self.pos - 1, self.capacity - 1) // self.segment
                self._events[segment].record()
                self._busy[segment] = True
            for segment in range(-(-rest // self.segment)):
                self._claim(segment)
        if rest:
            self.data[:rest] = bytes(self.data[self.pos : self.end])
        self.pos, self.end = 0, rest

    def _recv(self, room: memoryview) -> int:
        """Bytes received; 0 at the end of the stream, -1 after a tick without any."""
        try:
            return self.sock.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as exc:
            raise PeerError(f"the connection broke: {exc.strerror or exc}") from exc

    def _check(self, got: int, deadline: float, missing: int) -> None:
        if got == 0:
            raise PeerError(
                f"the head closed the connection in the middle of a message, {missing} bytes before its end"
            )
        if self.stopping:
            raise ConnectionClosed
        if time.monotonic() > deadline:
            raise PeerError(f"a message was not complete in time: {missing} bytes are missing")
