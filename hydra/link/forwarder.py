"""The head's end of the link: listens on loopback for the stock client, speaks frames to the peer.

    stock client ══ plain ggml-RPC, loopback ══ Forwarder ══ frames (or plain), the network ══ peer

One connection to the peer for each of the client's, two threads each: one up, one down. What the client queues goes up
in one sendmsg, as soon as there is a graph to compute or a reply to wait for; what comes down goes on at once. A peer
that is silent too long, gone, or that says why it closes, is reported (``on_event``) before the client's connection
ends: the stock client then aborts its process, and whoever supervises that knows which peer and why.

Knows the frames and the protocol's headers; not what starts it (process.py).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import asdict
from typing import Any

from hydra.errors import HydraError, PeerError, ProtocolError
from hydra.link import frames
from hydra.link.carried import Carried, Counters, EngineLeft, Plain
from hydra.link.deltas import SET_HEAD, Encoder, narrow, widen
from hydra.link.dial import Upstream, dial, timeval
from hydra.link.frames import Down, Flag, Hello, Up
from hydra.link.half import is_activation, is_activation_request, is_embedding
from hydra.link.settings import LinkSettings
from hydra.rpc import wire
from hydra.rpc.wire import Command

log = logging.getLogger("hydra.link")

CAPACITY = 2 * frames.MAX_KEPT_BYTES
DOWN_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
# Inputs wait for the graph that they are for (the client waits for nothing that is not urgent), but no more than this
# of them: then the wire is the slow part.
FLUSH_BYTES = 64 << 10
# Nor do those that give the peer something to copy, however short they are said: it does that while the client goes on.
EARLY_BYTES = 32 << 10
# The client sends a message in three pieces: 1 byte, 8, the rest. Ten bytes are in the third, so the kernel wakes us
# once a message and not three times. The one message that has no third (DEVICE_COUNT) waits for the tick, once a model
# runs; before that nine will do.
_HEAD_BYTES = wire.HEADER.size
_THIRD_PIECE = _HEAD_BYTES + 1
_TICK_S = 0.1
_MAX_PARTS = 500  # of one sendmsg; the kernel takes 1,024
_HEADER = wire.HEADER.size
_PLAIN_FOR_S = 10.0  # for so long after its last connection a peer is taken for the stock peer that it was
# What must not wait for more: requests with a reply, and what the device could be computing meanwhile.
GRAPHS = frozenset({Command.GRAPH_COMPUTE, Command.GRAPH_RECOMPUTE})
URGENT = frozenset({*wire.REPLY_SIZES, *GRAPHS})


OnEvent = Callable[[dict[str, Any]], None]


class Forwarder:
    """Accepts the engine's connections until closed. ``endpoint`` is what the engine is given.

    on_event: called from any thread with what happened: {"event": "connected" | "fault", "peer": name, …}.
    """

    def __init__(self, settings: LinkSettings, on_event: OnEvent) -> None:
        self.settings = settings
        self.on_event = on_event
        self._listening = socket.create_server(("127.0.0.1", settings.port_here), backlog=16)
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._live: set[Carried] = set()
        self._past = Counters()
        self._plain_live = 0
        self._plain_until = 0.0
        self._closing = False

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serve(self) -> None:
        """Returns after ``close``."""
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of descriptors, or the client left at once
                continue
            threading.Thread(target=self._carry, args=(client,), name="link-up", daemon=True).start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            live = list(self._live)
        for carried in live:
            carried.end()

    def stats(self) -> dict[str, Any]:
        """Counters of all connections so far, and how many there are."""
        with self._lock:
            total = Counters(**asdict(self._past))
            for carried in self._live:
                total.add(carried.counters)
            return {"connections": len(self._live), **asdict(total)}

    def _carry(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            upstream = self._dial()
        except HydraError as exc:
            client.close()
            self._fault("unreachable", exc)
            return
        carried: Carried = (Linked if upstream.terms is not None else Plain)(client, upstream, self.settings)
        with self._lock:
            self._live.add(carried)
        self.on_event({"event": "connected", "peer": self.settings.name, **carried.describe()})
        try:
            carried.run()
        except HydraError as exc:
            if not self._closing:
                self._fault(carried.fault_kind, exc)
        finally:
            carried.end()
            client.close()
            upstream.close()
            with self._lock:
                self._live.discard(carried)
                self._past.add(carried.counters)
                if upstream.terms is None:
                    self._plain_live -= 1
                    self._plain_until = time.monotonic() + _PLAIN_FOR_S

    def _dial(self) -> Upstream:
        # A stock peer serves one connection at a time: while it serves ours, asking what it is would hang.
        with self._lock:
            plain = not self.settings.deltas or self._plain_live > 0 or time.monotonic() < self._plain_until
        upstream = dial(self.settings, plain)
        if upstream.terms is None:
            with self._lock:
                self._plain_live += 1
        return upstream

    def _fault(self, kind: str, error: HydraError) -> None:
        log.error("%s", error)
        self.on_event(
            {"event": "fault", "peer": self.settings.name, "kind": kind, "message": error.message, "hint": error.hint}
        )


class Linked(Carried):
    """Frames to a hydra peer."""

    mode = "link"

    def __init__(self, client: socket.socket, upstream: Upstream, settings: LinkSettings) -> None:
        super().__init__(client, upstream, settings)
        assert upstream.terms is not None  # Forwarder chose this class by it
        self.terms: Hello = upstream.terms
        self.encoder = Encoder(self.terms)
        self.half = bool(self.terms.flags & Flag.HALF)
        self._replies = 0  # requests with a reply so far
        self._rx = bytearray(CAPACITY)
        self._view = memoryview(self._rx)
        self._address = addressof(c_char.from_buffer(self._rx))
        self._shortest = [_HEADER + wire.REQUEST_SIZES.get(cmd, 0) for cmd in range(256)]
        self._shortest[Command.SET_TENSOR] = SET_HEAD
        self._pos = self._end = 0
        self._undelivered = 0  # bytes that the peer will make of what waits in the encoder
        self._between = _HEAD_BYTES  # so many bytes are waited for between two messages
        self._low_water = 1
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(_TICK_S))

    def describe(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "version": self.terms.version,
            "activations": "f16" if self.half else "f32",
            "tls": self.upstream.tunnel is not None,
        }

    # -- up ------------------------------------------------------------------------------------------------------------

    def _up(self) -> None:
        encoder, view, counters = self.encoder, self._view, self.counters
        unpack = wire.HEADER.unpack_from
        while True:
            urgent = False
            missing = 0
            while self._end - self._pos >= _HEADER:
                pos = self._pos
                cmd, size = unpack(view, pos)
                total = _HEADER + size
                if total > frames.MAX_KEPT_BYTES or (self.half and self._halved(cmd, total)):
                    self._stream(cmd, total)
                    continue
                if self._end - pos < total:
                    missing = total - (self._end - pos)
                    break
                if cmd in wire.REPLY_SIZES:
                    self._replies += 1
                encoder.encode(view[pos : pos + total], self._address + pos)
                self._pos = pos + total
                counters.plain_messages += 1
                counters.plain_bytes_up += total
                self._undelivered += total
                if cmd in URGENT:
                    urgent = True
                    if cmd in GRAPHS:
                        self._between = _THIRD_PIECE
            out = encoder.out_bytes
            if out and (
                urgent or out >= FLUSH_BYTES or self._undelivered >= EARLY_BYTES or len(encoder.out) >= _MAX_PARTS
            ):
                self._flush()
            self._make_room(missing)
            if not missing:
                have = self._end - self._pos
                missing = self._shortest[view[self._pos]] - have if have else self._between
            got = self._receive(missing, view[self._end :])
            if not got:
                self.closing = True
                return
            self._end += got

    def _receive(self, least: int, room: memoryview) -> int:
        """Bytes received into room: at least so many where more are sure to come; 0 when the client has gone.

        Fewer after a tick, so that a wrong guess costs time only.
        """
        if least != self._low_water:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._low_water = least
        while True:
            try:
                return self._from_client(room)
            except BlockingIOError:
                continue  # a tick without anything

    def _make_room(self, missing: int) -> None:
        """Space for the rest of a message, or for a good many new ones; what was read may be overwritten once sent."""
        if self._pos == self._end and not self.encoder.out:
            self._pos = self._end = 0
        elif CAPACITY - self._end < max(missing, FLUSH_BYTES):
            self._flush()
            rest = self._end - self._pos
            self._view[:rest] = bytes(self._view[self._pos : self._end])
            self._pos, self._end = 0, rest

    def _flush(self) -> None:
        parts = self.encoder.out
        if not parts:
            return
        total = self.encoder.out_bytes
        counters = self.counters
        counters.wire_sends += 1
        counters.wire_bytes_up += total
        self.encoder.clear()
        self._undelivered = 0
        for first in range(0, len(parts), _MAX_PARTS):
            some = parts[first : first + _MAX_PARTS]
            try:
                sent = self.upstream.sock.sendmsg(some)
                whole = sum(map(len, some))
                if sent < whole:
                    self.upstream.sock.sendall(b"".join(some)[sent:])
            except BlockingIOError as exc:
                raise self._silent("takes no bytes") from exc

    def _send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self.encoder.out.append(part)
            self.encoder.out_bytes += len(part)
        self._flush()

    def _stream(self, cmd: int, total: int) -> None:
        """A long message (weights, a prefill's activations): on in pieces as it comes, whole in no buffer."""
        self._flush()
        self.counters.plain_messages += 1
        self.counters.plain_bytes_up += total
        if cmd in wire.REPLY_SIZES:
            raise ProtocolError(f"{wire.command_name(cmd)} of {total} bytes from the engine.")
        if cmd == Command.SET_TENSOR and total > SET_HEAD:
            self._read_up_to(SET_HEAD)
            row = self.encoder.row_bytes(self._view[self._pos :], total)
            if row and is_embedding(self._view[self._pos :]):
                self._stream_rows(total, row)
                return
        half = cmd == Command.SET_TENSOR and self.half and self._halved(cmd, total)
        left = total
        if half:
            self._read_up_to(SET_HEAD)
            head = self._view[self._pos : self._pos + SET_HEAD]
            self._send(frames.LENGTH.pack(Up.PLAIN, len(head)), head)
            self._pos += len(head)
            left -= len(head)
        announced = 0  # bytes of the current PLAIN frame still to send
        while left:
            if self._pos == self._end:
                self._pos = self._end = 0
                got = self._receive(1, self._view[: min(left, PIECE_BYTES)])
                if not got:
                    raise EngineLeft
                self._end = got
            count = min(left, self._end - self._pos, PIECE_BYTES)
            if half:
                if count < 4 and left >= 4:
                    self._read_up_to(4)
                    count = min(left, self._end - self._pos, PIECE_BYTES)
                count &= ~3
                data = narrow(self._view[self._pos : self._pos + count])
                self._send(frames.LENGTH.pack(Up.HALF, len(data)), data)
            else:
                piece = self._view[self._pos : self._pos + count]
                if not announced:
                    announced = min(left, 1 << 31)
                    self._send(frames.LENGTH.pack(Up.PLAIN, announced), piece)
                else:
                    self._send(piece)
                announced -= count
            self._pos += count
            left -= count

    def _stream_rows(self, total: int, row: int) -> None:
        """A prompt's embeddings: most tokens of a prompt come in it more than once."""
        self.encoder.row_head(self._view[self._pos :])
        self._pos += SET_HEAD
        for _ in range((total - SET_HEAD) // row):
            if self._end - self._pos < row:
                self._flush()
                self._read_up_to(row)
            self.encoder.row(self._view[self._pos : self._pos + row])
            self._pos += row
            self._undelivered += row
            if self._undelivered >= PIECE_BYTES:
                self._flush()
        self._flush()

    def _read_up_to(self, count: int) -> None:
        """Until count bytes lie contiguous from pos; only with nothing waiting to be sent."""
        if CAPACITY - self._pos < count:
            rest = bytes(self._view[self._pos : self._end])
            self._view[: len(rest)] = rest
            self._pos, self._end = 0, len(rest)
        while (missing := count - (self._end - self._pos)) > 0:
            got = self._receive(missing, self._view[self._end : self._end + missing])
            if not got:
                raise EngineLeft
            self._end += got

    def _halved(self, cmd: int, total: int) -> bool:
        """Whether a message is to be carried in half precision; a GET_TENSOR's reply is asked for so here."""
        if cmd == Command.SET_TENSOR and total > SET_HEAD:
            if self._end - self._pos < SET_HEAD:
                self._flush()
                self._read_up_to(SET_HEAD)
            message = self._view[self._pos :]
            known = self.encoder.row_bytes(message, total) > 0 and is_embedding(message)
            return not known and is_activation(message, total)
        whole = cmd == Command.GET_TENSOR and self._end - self._pos >= total
        if whole and is_activation_request(self._view[self._pos : self._pos + total]):
            head = frames.LENGTH.pack(Up.HALVE, self._replies)
            self.encoder.out.append(head)
            self.encoder.out_bytes += len(head)
        return False

    # -- down ----------------------------------------------------------------------------------------------------------

    def _down(self) -> None:
        raw = memoryview(bytearray(DOWN_BYTES))
        head = frames.LENGTH.size
        pos = end = 0
        counters = self.counters
        receive = self.upstream.sock.recv_into
        heard = time.monotonic()
        while True:
            if pos == end:
                pos = end = 0
            elif DOWN_BYTES - pos < DOWN_BYTES // 2:
                raw[: end - pos] = bytes(raw[pos:end])
                pos, end = 0, end - pos
            try:
                got = receive(raw[end:])
            except BlockingIOError:
                silence = time.monotonic() - heard
                if silence > self.settings.silence_s:
                    raise self._silent(f"has said nothing for {silence:.1f} s") from None
                continue
            if not got:
                raise self._gone()
            heard = time.monotonic()
            end += got
            counters.wire_bytes_down += got
            while end - pos >= head:
                kind, number = frames.LENGTH.unpack_from(raw, pos)
                if kind == Down.ALIVE:
                    pos += head
                    self._check_busy(number)
                    continue
                if kind == Down.FAULT and number <= frames.MAX_FAULT_BYTES:
                    if end - pos < head + number:
                        break
                    self.fault_kind = "fault"
                    raise self._gone(str(raw[pos + head : pos + head + number], "utf-8", "replace"))
                if kind not in (Down.PLAIN, Down.HALF) or (kind == Down.HALF and number % 2):
                    raise ProtocolError(f"Peer {self.settings.name} sent a frame of kind {kind:#04x} ({number}).")
                pos += head
                here = min(number, end - pos)
                if kind == Down.HALF:
                    here &= ~1
                self._to_client(kind, raw[pos : pos + here])
                pos += here
                left = number - here
                while left:
                    # A long reply: straight on, in pieces. What lies in raw has been used but for half a float16.
                    rest = end - pos
                    raw[:rest] = bytes(raw[pos:end])
                    pos, end = 0, rest
                    try:
                        got = receive(raw[rest : min(DOWN_BYTES, left)])
                    except BlockingIOError:
                        if time.monotonic() - heard > self.settings.silence_s:
                            raise self._silent("stopped in the middle of a reply") from None
                        continue
                    if not got:
                        raise self._gone()
                    heard = time.monotonic()
                    counters.wire_bytes_down += got
                    end = rest + got
                    here = end & ~1 if kind == Down.HALF else end
                    self._to_client(kind, raw[:here])
                    pos = here
                    left -= here

    def _to_client(self, kind: int, data: memoryview) -> None:
        if kind == Down.HALF:
            data = widen(data)
        self.counters.plain_bytes_down += len(data)
        try:
            self.client.sendall(data)
        except ConnectionError:
            self.closing = True  # the engine has gone; that is no fault of the peer
            raise

    def _check_busy(self, busy_ms: int) -> None:
        limit = self.settings.deadline_s
        if limit and busy_ms > limit * 1000:
            self.fault_kind = "frozen"
            raise PeerError(
                f"Peer {self.settings.name} ({self.settings.address}) has worked on one message for "
                f"{busy_ms / 1000:.1f} s; {limit:g} s are allowed.",
                "Its device hangs, or the step is larger than head.step_deadline_s allows for.",
            )

    def _silent(self, what: str) -> PeerError:
        self.fault_kind = "silent"
        limit = f"link.silence_s = {self.settings.silence_s:g}"
        return PeerError(
            f"Peer {self.settings.name} ({self.settings.address}) {what} ({limit}).",
            "The box is off, its process is stopped, or the network between is broken.",
        )
