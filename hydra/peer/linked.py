"""The peer's end of the link: frames in, the plain stream into an ordinary Session, its replies framed on the way out.

    network ── LinkReceiver (Decoder) ── Session ── LinkSocket ── network

The session does not know: it reads ggml-RPC from its receiver's buffer and validates as ever, and writes replies to
what it takes for its socket. So requests are judged in one place, and a plain connection costs nothing more. A thread
says every quarter of the agreed silence that this process is alive, and for how long the message at hand has been
worked on.

Frames: hydra.link.frames. What dispatches here: the listener, by the first byte.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from hydra.errors import HydraError, ProtocolError
from hydra.link import frames
from hydra.link.deltas import Decoder, down_head, narrow
from hydra.link.frames import Down, Hello
from hydra.peer.receiver import Receiver
from hydra.peer.session import Session
from hydra.peer.shared import SharedState

RAW_BYTES = 256 << 10
# A PLAIN frame with this much to come is received where it belongs, not through the frame buffer.
_DIRECT_BYTES = 16 << 10
_LAST_WORDS_S = 0.5


class LinkReceiver(Receiver):
    """A Receiver whose bytes come out of frames. ``since``: when the message at hand came; 0 while it waits for one."""

    def __init__(self, sock: socket.socket, message_s: float, min_rate_bytes_s: int, decoder: Decoder) -> None:
        super().__init__(sock, message_s, min_rate_bytes_s)
        self.decoder = decoder
        self.since = 0.0
        self._raw = memoryview(bytearray(RAW_BYTES))
        self._raw_pos = self._raw_end = 0

    def _recv(self, room: memoryview) -> int:
        decoder, raw = self.decoder, self._raw
        while True:
            self._raw_pos, written = decoder.advance(raw, self._raw_pos, self._raw_end, room)
            if written:
                return written
            self.since = 0.0
            if self._raw_pos == self._raw_end:
                self._raw_pos = self._raw_end = 0
                if decoder.literal >= _DIRECT_BYTES:
                    got = super()._recv(room[: decoder.literal])
                    decoder.literal -= max(got, 0)
                    self.since = time.monotonic()
                    return got
            elif self._raw_pos:
                rest = bytes(raw[self._raw_pos : self._raw_end])  # part of a frame's head
                raw[: len(rest)] = rest
                self._raw_pos, self._raw_end = 0, len(rest)
            got = super()._recv(raw[self._raw_end :])
            if got <= 0:
                return got
            self.since = time.monotonic()
            self._raw_end += got

    def close(self) -> None:
        super().close()
        self.decoder.close()


class LinkSocket:
    """What a session takes for its socket: replies leave as frames, one sendmsg for each piece.

    Like a socket's, its calls return the bytes of the caller's that were sent: always all.
    """

    def __init__(self, sock: socket.socket, halved: set[int]) -> None:
        self.sock = sock
        self._halved = halved
        self._lock = threading.Lock()
        self._replies = 0
        self._left = 0  # bytes of the current reply still to come
        self._half = False

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        total = sum(map(len, parts))
        if not self._halved and not self._half:
            self._count(parts, total)
            self._write((down_head(Down.PLAIN, total), *parts))
        else:
            for part in parts:
                self._piece(part)
        return total

    def send(self, part: bytes | memoryview) -> int:
        return self.sendmsg((part,))

    def alive(self, busy_ms: int) -> None:
        """Unless a reply is going out just now, which says as much."""
        if self._lock.acquire(blocking=False):
            try:
                self.sock.sendall(down_head(Down.ALIVE, busy_ms))
            finally:
                self._lock.release()

    def fault(self, text: str) -> None:
        """Why the connection ends; the last that is sent."""
        words = text.encode()[: frames.MAX_FAULT_BYTES]
        self._write((down_head(Down.FAULT, len(words)), words))

    @property
    def family(self) -> int:
        return self.sock.family

    def getsockopt(self, level: int, option: int, size: int = 0) -> int | bytes:
        return self.sock.getsockopt(level, option, size) if size else self.sock.getsockopt(level, option)

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def _count(self, parts: Sequence[bytes | memoryview], total: int) -> None:
        """Replies are numbered, for the head to say which it wants in half precision."""
        if self._left:
            self._left -= total
        else:
            self._left = 8 + int.from_bytes(parts[0][:8], "little") - total
            self._replies += 1

    def _piece(self, part: bytes | memoryview) -> None:
        if not len(part):
            return
        if not self._left:
            # A reply's first piece is its size, alone.
            self._half = self._replies in self._halved
            self._halved.discard(self._replies)
            self._replies += 1
            self._left = 8 + int.from_bytes(part[:8], "little")
            self._write((down_head(Down.PLAIN, len(part)), part))
        elif self._half:
            data = narrow(part)
            self._write((down_head(Down.HALF, len(data)), data))
        else:
            self._write((down_head(Down.PLAIN, len(part)), part))
        self._left -= len(part)
        self._half = self._half and self._left > 0

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            sent = self.sock.sendmsg(parts)
            if sent < sum(map(len, parts)):
                self.sock.sendall(b"".join(parts)[sent:])


class LinkedSession(Session):
    """A Session behind the link. ``run`` as Session.run: negotiates first, and says why it ends."""

    def __init__(self, sock: socket.socket, shared: SharedState) -> None:
        super().__init__(sock, shared)
        self.plain_sock = sock
        self._ended = threading.Event()

    def run(self) -> None:
        terms = self._negotiate()
        settings = self.shared.settings
        decoder = Decoder(terms, self._take_budget)
        link = LinkSocket(self.plain_sock, decoder.halved)
        self.receiver.close()
        receiver = LinkReceiver(self.plain_sock, settings.message_s, settings.min_rate_bytes_s, decoder)
        self.receiver, self.sock = receiver, link  # type: ignore[assignment]  # it has what a session uses of a socket
        alive = threading.Thread(target=self._say_alive, args=(link, receiver, terms), name="link-alive", daemon=True)
        alive.start()
        try:
            super().run()
        except HydraError as exc:
            self._last_words(link, exc.message)
            raise
        except Exception as exc:
            self._last_words(link, f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self._ended.set()

    def _negotiate(self) -> Hello:
        """Raises: ProtocolError for an opening that is none, or of another version."""
        receiver = self.receiver
        receiver.message_s = self.shared.settings.hello_s
        receiver.need(frames.HELLO.size)
        asked = Hello.unpack(bytes(receiver.data[receiver.pos : receiver.pos + frames.HELLO.size]))
        if receiver.end - receiver.pos > frames.HELLO.size:
            raise ProtocolError("The head sent frames before the link was agreed on.")
        terms = frames.agree(asked)
        self.plain_sock.sendall(terms.pack())
        if not terms.version:
            raise ProtocolError(f"The head speaks the link's version {asked.version}; this peer has {frames.VERSION}.")
        return terms

    def _take_budget(self, size: int) -> None:
        if size > 0:
            self.shared.budget.take(size)
        elif size:
            self.shared.budget.give(-size)

    def _say_alive(self, link: LinkSocket, receiver: LinkReceiver, terms: Hello) -> None:
        while not self._ended.wait(terms.silence_ms / 4000):
            since = receiver.since
            busy_ms = int((time.monotonic() - since) * 1000) if since else 0
            try:
                link.alive(min(busy_ms, 0xFFFFFFFF))
            except OSError:
                return  # the session finds out by itself

    def _last_words(self, link: LinkSocket, text: str) -> None:
        """Told, and what is on its way is read: closing with bytes unread would take the words back."""
        with contextlib.suppress(OSError):
            link.fault(text)
            self.plain_sock.shutdown(socket.SHUT_WR)
            until = time.monotonic() + _LAST_WORDS_S
            scrap = bytearray(RAW_BYTES)
            while time.monotonic() < until:
                if not self.plain_sock.recv_into(scrap):
                    return
