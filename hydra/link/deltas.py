"""Says a ggml-RPC stream shorter, and back: repeated messages by number, changed ones by what changed.

Both classes are sans-I/O. ``Encoder`` stands on the head: whole messages in, frames (frames.py) out. ``Decoder`` stands
at the peer: frames in, the same plain stream out, byte for byte. Neither knows what a message does; that a SET_TENSOR's
tensor may have been overwritten on the device since is no matter, because every message is delivered whole.

What is kept. A message is kept from its second sighting on, so that a load (every weight once) leaves nothing behind.
It is known again by what it is about: a SET_TENSOR by (size, buffer, address, cache flag, offset), a GRAPH_COMPUTE by
(size, device), GET_TENSOR and GRAPH_RECOMPUTE by all their bytes.

Rows. What a peer's first layers are given is the embeddings of the step's tokens: new in every step, yet each row has
been sent when its token last came by. A float32 tensor that changes everywhere is therefore sent row by row for as long
as rows repeat: each is kept by itself (a KEEP that holds a row, not a message), and said by its number the next time.

Only the head decides what stands in which slot; the peer obeys within the agreed bounds, so the two cannot disagree.
FREE_BUFFER drops what was kept of the buffer (rows are of no buffer), a new connection begins with nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable

import numpy as np

from hydra.errors import ProtocolError
from hydra.link import frames
from hydra.link.frames import Down, Flag, Hello, Up
from hydra.rpc import wire
from hydra.rpc.wire import Command

HEADER = wire.HEADER.size
SET_HEAD = HEADER + wire.SET_TENSOR_HEAD_SIZE  # where a SET_TENSOR's data begin
SMALL_BYTES = 1024  # shorter messages are compared whole: looking for ranges costs more than it saves
_GAP_WORDS = 4  # equal stretches up to 32 bytes long are sent along: a range costs eight bytes and some time
_FEW = 32
_SEEN = 8192
_LAST_PAUSE = 256  # a message that always changes everywhere is looked at once in so many times
_ROW_BYTES = (1024, 256 << 10)  # rows shorter than this save little; longer ones are no token's
_ROW_KEY_BYTES = 64  # rows that begin alike are the same row nearly always; the rest is compared then
_DRY_ROWS = 256  # so many new rows in sequence: these are no embeddings, but results of layers, which never repeat
_MESSAGE_SLOTS = 256  # of all slots, those that rows leave to messages
HALF_PIECE_BYTES = 256 << 10

# size, (id, type) buffer, (…) data, (name, use_count) cache_flag, offset
_SET_KEY = struct.Struct("<x Q 12x Q 200x Q 68x B Q")
_GET_BUFFER = struct.Struct("<21x Q")
_GRAPH_KEY = struct.Struct("<x Q I")
_SET_SHAPE = struct.Struct("<17x I 8x I")  # (command, size, id) type, (buffer) ne[0]
_F32 = 0
_ONE_RANGE = struct.Struct("<BHHII")  # a PATCH of one range
_SLOT = frames.SLOT
# Plain numbers: an enumeration's members cost a look-up each time, and comparing goes through their class.
_SAME, _PATCH = int(Up.SAME), int(Up.PATCH)
_SET_TENSOR, _GET_TENSOR, _GRAPH_COMPUTE = int(Command.SET_TENSOR), int(Command.GET_TENSOR), int(Command.GRAPH_COMPUTE)
_KEPT_WHOLE = (_GET_TENSOR, int(Command.GRAPH_RECOMPUTE))
# Comparing 262 KB by memcmp takes 10 µs. Through PyDLL, because giving the GIL away costs more than that.
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class _Kept:
    """One kept message on the head."""

    __slots__ = (
        "address", "buffer", "by_row", "content", "dry", "key", "number", "pause", "row", "skip", "used", "view",
        "words",
    )  # fmt: skip

    def __init__(self, number: int, key: Hashable, buffer: int, message: memoryview) -> None:
        self.number = number
        self.key = key
        self.buffer = buffer
        self.content = bytearray(message)
        self.view = memoryview(self.content)
        self.words = np.frombuffer(self.content, dtype="<u8", count=len(message) // 8)
        self.address = int(self.words.ctypes.data)
        self.skip = 0  # how many more times not to look for ranges
        self.pause = 0
        self.used = 0
        self.row = _row_bytes(message, len(message))
        self.by_row = False  # it changes everywhere, and its rows may be known
        self.dry = 0  # rows in sequence that were not


class _Row:
    """One kept row."""

    __slots__ = ("content", "number")

    def __init__(self, number: int, content: bytes) -> None:
        self.number = number
        self.content = content


class Encoder:
    """The head's half. ``encode`` appends to ``out``, a list of buffers to be sent in this order.

    Whoever sends clears it. Parts of ``out`` are views of the messages given: send before overwriting those.
    """

    def __init__(self, terms: Hello) -> None:
        self.out: list[bytes | memoryview] = []
        self.out_bytes = 0
        self.deltas = bool(terms.flags & Flag.DELTAS)
        self._slots = terms.slots
        self._limit = terms.store_bytes
        self._kept: dict[Hashable, _Kept] = {}
        self._seen: dict[Hashable, None] = {}
        self._free = list(range(terms.slots - 1, -1, -1))
        self._bytes = 0
        self._rows: dict[bytes, _Row] = {}  # the longest unused first
        self._row_bytes = 0
        self._row_slots = max(terms.slots - _MESSAGE_SLOTS, terms.slots // 2)
        self._row_limit = terms.store_bytes // 4 * 3
        self._clock = 0
        self._differs = np.zeros(0, dtype=np.bool_)

    def clear(self) -> None:
        self.out = []
        self.out_bytes = 0

    def encode(self, message: memoryview, address: int) -> None:
        """One whole message; address: where its first byte lies."""
        cmd = message[0]
        size = len(message)
        buffer = 0
        key: Hashable
        if not self.deltas or size > frames.MAX_KEPT_BYTES:
            self.plain(message)
            return
        if cmd == _SET_TENSOR and size >= SET_HEAD:
            fields = _SET_KEY.unpack_from(message)
            key, buffer = fields, fields[1]
            if fields[3]:  # a weight that may be cached: it comes once
                self.plain(message)
                return
        elif cmd in _KEPT_WHOLE:
            key = bytes(message)
            if cmd == _GET_TENSOR and size >= _GET_BUFFER.size:
                (buffer,) = _GET_BUFFER.unpack_from(message)
        elif cmd == _GRAPH_COMPUTE and size >= _GRAPH_KEY.size:
            key = _GRAPH_KEY.unpack_from(message)
        else:
            if cmd == Command.FREE_BUFFER and size == HEADER + 8:
                self._freed(wire.U64.unpack_from(message, HEADER)[0])
            self.plain(message)
            return
        kept = self._kept.get(key)
        if kept is None:
            self._first(key, buffer, message)
            return
        self._clock += 1
        kept.used = self._clock
        if size <= SMALL_BYTES:
            if bytes(message) == kept.content:  # views would be compared item by item
                self._put(_SLOT.pack(_SAME, kept.number))
            else:
                self._tail(kept, message)
        elif not _memcmp(address, kept.address, size):
            self._put(_SLOT.pack(_SAME, kept.number))
        elif kept.by_row:
            self._by_row(kept, message)
        elif kept.skip:
            kept.skip -= 1
            self._tail(kept, message)
        else:
            self._changed(kept, message)

    def plain(self, data: bytes | memoryview) -> None:
        """Bytes of the stream as they are."""
        self._put(frames.LENGTH.pack(Up.PLAIN, len(data)))
        self._put(data)

    def _put(self, part: bytes | memoryview) -> None:
        self.out.append(part)
        self.out_bytes += len(part)

    def _first(self, key: Hashable, buffer: int, message: memoryview) -> None:
        if key not in self._seen:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen[key] = None
            self.plain(message)
            return
        size = len(message)
        if size > self._limit or not self._slots:
            self.plain(message)
            return
        while not self._free or self._bytes + size > self._limit:
            if self._kept:
                self._drop(min(self._kept.values(), key=lambda kept: kept.used))
            else:
                self._drop_row()
        kept = self._kept[key] = _Kept(self._free.pop(), key, buffer, message)
        self._clock += 1
        kept.used = self._clock
        self._bytes += size
        self._put(frames.KEEP.pack(Up.KEEP, kept.number, size))
        self._put(message)

    def _freed(self, handle: int) -> None:
        for kept in [kept for kept in self._kept.values() if kept.buffer == handle]:
            self._drop(kept)

    def _drop(self, kept: _Kept) -> None:
        self._put(frames.SLOT.pack(Up.DROP, kept.number))
        del self._kept[kept.key]
        self._free.append(kept.number)
        self._bytes -= len(kept.content)

    def row_bytes(self, message: memoryview, total: int) -> int:
        """Bytes of a row where a message (a SET_TENSOR's head at least; total: its length) may go by rows, else 0."""
        return _row_bytes(message, total) if self.deltas else 0

    def row_head(self, message: memoryview) -> None:
        """What stands before a message's rows."""
        self._row(bytes(message[:SET_HEAD]), message[:SET_HEAD])

    def row(self, part: memoryview) -> bool:
        """A row: by its number, or whole and kept. Returns whether it was known."""
        return self._row(bytes(part[:_ROW_KEY_BYTES]), part)

    def _by_row(self, kept: _Kept, message: memoryview) -> None:
        """Its head and each of its rows by itself. The kept message stays as it was, at both ends."""
        row = kept.row
        self.row_head(message)
        known = 0
        for at in range(SET_HEAD, len(message), row):
            known += self.row(message[at : at + row])
        if known:
            kept.dry = 0
            return
        kept.dry += (len(message) - SET_HEAD) // row
        if kept.dry >= _DRY_ROWS:
            kept.by_row = False
            kept.dry = 0
            kept.skip = kept.pause = _LAST_PAUSE

    def _row(self, key: bytes, part: memoryview) -> bool:
        content = bytes(part)
        row = self._rows.pop(key, None)
        if row is not None and row.content == content:
            self._rows[key] = row
            self._put(_SLOT.pack(_SAME, row.number))
            return True
        size = len(content)
        if row is not None:
            self._forget_row(row)
        while self._rows and (
            not self._free or len(self._rows) >= self._row_slots or self._row_bytes + size > self._row_limit
            or self._bytes + size > self._limit
        ):  # fmt: skip
            self._drop_row()
        if not self._free or self._bytes + size > self._limit:
            self.plain(content)
            return False
        row = self._rows[key] = _Row(self._free.pop(), content)
        self._bytes += size
        self._row_bytes += size
        self._put(frames.KEEP.pack(Up.KEEP, row.number, size))
        self._put(content)
        return False

    def _drop_row(self) -> None:
        """The one that has not been used for longest."""
        self._forget_row(self._rows.pop(next(iter(self._rows))))

    def _forget_row(self, row: _Row) -> None:
        self._put(frames.SLOT.pack(Up.DROP, row.number))
        self._free.append(row.number)
        self._bytes -= len(row.content)
        self._row_bytes -= len(row.content)

    def _tail(self, kept: _Kept, message: memoryview) -> None:
        """Changed all over: whole, without the head of a SET_TENSOR where that is what it was."""
        size = len(message)
        if size > SET_HEAD and bytes(message[:SET_HEAD]) == kept.content[:SET_HEAD]:
            self._put(_ONE_RANGE.pack(_PATCH, kept.number, 1, SET_HEAD, size - SET_HEAD))
            self._put(message[SET_HEAD:])
            kept.view[SET_HEAD:] = message[SET_HEAD:]
        else:
            self._put(frames.KEEP.pack(Up.KEEP, kept.number, size))
            self._put(message)
            kept.view[:] = message

    def _changed(self, kept: _Kept, message: memoryview) -> None:
        spans = self._ranges(kept, message)
        if spans is None:
            # Activations change everywhere in every step: do not look again for some time.
            kept.pause = min(2 * kept.pause + 1, _LAST_PAUSE)
            kept.skip = kept.pause
            kept.by_row = kept.row > 0
            if kept.by_row:
                self._by_row(kept, message)
            else:
                self._tail(kept, message)
            return
        kept.pause = 0
        view = kept.view
        count = len(spans) // 2
        parts: list[bytes | memoryview] = [
            frames.PATCH.pack(_PATCH, kept.number, count), struct.pack(f"<{2 * count}I", *spans)
        ]  # fmt: skip
        for at in range(0, 2 * count, 2):
            offset = spans[at]
            part = message[offset : offset + spans[at + 1]]
            view[offset : offset + spans[at + 1]] = part
            parts.append(part)
        self._put(b"".join(parts))

    def _ranges(self, kept: _Kept, message: memoryview) -> list[int] | None:
        """What differs as offset, length, offset, length …; None where sending the whole is as good."""
        size = len(message)
        words = size // 8
        if len(self._differs) <= words:
            self._differs = np.zeros(2 * words + 1, dtype=np.bool_)
        differs = self._differs[: words + 1]
        new = np.frombuffer(message, dtype="<u8", count=words)
        np.not_equal(new, kept.words, out=differs[:words])
        differs[words] = message[8 * words :] != kept.view[8 * words :]
        changed = np.flatnonzero(differs)
        if len(changed) <= _FEW:
            return _few_spans(changed.tolist(), size)
        enough = 0.9 * (size - SET_HEAD if kept.row else size)  # a tensor's head hardly ever changes
        if 8 * len(changed) > enough:
            return None
        breaks = np.flatnonzero(np.diff(changed) > _GAP_WORDS)
        if len(breaks) >= frames.MAX_RANGES:
            return None
        table = np.empty((len(breaks) + 1, 2), dtype="<u4")
        table[0, 0] = changed[0] * 8
        table[1:, 0] = changed[breaks + 1] * 8
        table[-1, 1] = min(int(changed[-1] + 1) * 8, size)
        table[:-1, 1] = (changed[breaks] + 1) * 8
        table[:, 1] -= table[:, 0]
        cost = frames.PATCH.size + table.nbytes + int(table[:, 1].sum())
        return table.ravel().tolist() if cost < enough else None


def _row_bytes(message: memoryview, total: int) -> int:
    """Of a SET_TENSOR that is whole rows of float32: the bytes of one; else 0."""
    if message[0] != _SET_TENSOR or total <= SET_HEAD:
        return 0
    kind, columns = _SET_SHAPE.unpack_from(message)
    row = 4 * int(columns)
    least, most = _ROW_BYTES
    return row if kind == _F32 and least <= row <= most and (total - SET_HEAD) % row == 0 else 0


def _few_spans(changed: list[int], size: int) -> list[int]:
    """The same from the numbers of a few changed words, without numpy's cost for each call."""
    spans = []
    first = last = changed[0]
    for word in changed[1:]:
        if word - last > _GAP_WORDS:
            spans += [8 * first, 8 * (last + 1 - first)]
            first = word
        last = word
    spans += [8 * first, min(8 * (last + 1), size) - 8 * first]
    return spans


class Decoder:
    """The peer's half: ``advance`` turns frames into the plain stream, within the bounds agreed on.

    take: asked for each byte more (negative: fewer) that is kept; may refuse with a ProtocolError.
    halved: numbers of the replies that the head wants as float16.
    Raises (from advance): ProtocolError for a frame that no head of ours makes.
    """

    def __init__(self, terms: Hello, take: Callable[[int], None] = lambda _bytes: None) -> None:
        self.halved: set[int] = set()
        self.literal = 0  # bytes of a PLAIN frame that are still to come
        self._terms = terms
        self._take = take
        self._kept: dict[int, memoryview] = {}
        self._bytes = 0
        self._ready: memoryview | None = None  # what is to be delivered next, from _at on
        self._at = 0
        self._half = 0  # bytes of a HALF frame that are still to come
        self._targets: list[memoryview] = []  # what the bytes that come next are to fill, last first
        self._filled = 0
        self._slot = -1  # the message to deliver once they are filled
        self._table: bytearray | None = None  # the ranges of a PATCH that is being read

    def close(self) -> None:
        self._take(-self._bytes)
        self._bytes = 0
        self._kept.clear()

    @property
    def between(self) -> bool:
        """Whether nothing has been begun: the next byte is a frame's first, and nothing waits to be delivered."""
        return not (self.literal or self._half or self._targets or self._ready is not None)

    def advance(self, raw: memoryview, pos: int, end: int, room: memoryview) -> tuple[int, int]:
        """Reads raw[pos:end], writes room; returns (new pos, bytes written). Stops where either is exhausted."""
        written, space = 0, len(room)
        while True:
            if self._ready is not None:
                count = min(len(self._ready) - self._at, space - written)
                room[written : written + count] = self._ready[self._at : self._at + count]
                written += count
                self._at += count
                if self._at < len(self._ready):
                    return pos, written
                self._ready = None
            elif self.literal:
                count = min(self.literal, end - pos, space - written)
                if not count:
                    return pos, written
                room[written : written + count] = raw[pos : pos + count]
                written += count
                pos += count
                self.literal -= count
            elif self._half:
                count = min(self._half, end - pos, HALF_PIECE_BYTES) & ~1
                if not count:
                    return pos, written
                self._deliver(widen(raw[pos : pos + count]))
                self._half -= count
                pos += count
            elif self._targets:
                if pos == end:
                    return pos, written
                pos = self._fill(raw, pos, end)
            else:
                if pos == end:
                    return pos, written
                size, count = self._whole(raw, pos, end, room, written)
                if size:
                    pos += size
                    written += count
                    continue
                size = frames.UP_HEADS.get(raw[pos], 0)  # type: ignore[call-overload]
                if end - pos < size:
                    return pos, written
                if not size:
                    raise ProtocolError(f"A frame of kind {raw[pos]:#04x} on the link.")
                self._frame(raw, pos)
                pos += size

    def _whole(self, raw: memoryview, pos: int, end: int, room: memoryview, at: int) -> tuple[int, int]:
        """The usual frames of a step where all of one is there and fits: (its size, bytes written), else (0, 0).

        Nothing but speed: what is refused here is judged in ``_frame``.
        """
        kind = raw[pos]
        if kind == _SAME and end - pos >= 3:
            kept = self._kept.get(_SLOT.unpack_from(raw, pos)[1])
            if kept is not None and len(kept) <= len(room) - at:
                size = len(kept)
                room[at : at + size] = kept
                return 3, size
        elif kind == _PATCH and end - pos >= _ONE_RANGE.size and raw[pos + 3] == 1 and not raw[pos + 4]:
            _, slot, _, offset, length = _ONE_RANGE.unpack_from(raw, pos)
            first = pos + _ONE_RANGE.size
            kept = self._kept.get(slot)
            if kept is not None and offset + length <= len(kept) <= len(room) - at and 0 < length <= end - first:
                size = len(kept)
                kept[offset : offset + length] = raw[first : first + length]
                room[at : at + size] = kept
                return _ONE_RANGE.size + length, size
        return 0, 0

    def _deliver(self, data: memoryview) -> None:
        self._ready, self._at = data, 0

    def _frame(self, raw: memoryview, pos: int) -> None:
        kind = raw[pos]
        if kind == Up.SAME:
            self._deliver(self._message(frames.SLOT.unpack_from(raw, pos)[1]))
        elif kind == Up.PATCH:
            _, slot, count = frames.PATCH.unpack_from(raw, pos)
            self._message(slot)
            if not 0 < count <= frames.MAX_RANGES:
                raise ProtocolError(f"A patch of {count} ranges.")
            self._slot = slot
            self._table = bytearray(count * frames.RANGE_SIZE)
            self._targets = [memoryview(self._table)]
        elif kind == Up.PLAIN:
            _, self.literal = frames.LENGTH.unpack_from(raw, pos)
        elif kind == Up.KEEP:
            _, slot, length = frames.KEEP.unpack_from(raw, pos)
            self._targets = [self._make(slot, length)]
            self._slot = slot
        elif kind == Up.DROP:
            _, slot = frames.SLOT.unpack_from(raw, pos)
            self._forget(len(self._message(slot)))
            del self._kept[slot]
        elif kind == Up.HALF:
            _, self._half = frames.LENGTH.unpack_from(raw, pos)
            if self._half % 2:
                raise ProtocolError(f"{self._half} bytes of float16.")
        else:
            self.halved.add(frames.LENGTH.unpack_from(raw, pos)[1])
            if len(self.halved) > 1 << 16:
                raise ProtocolError(f"{len(self.halved)} replies are outstanding on the link.")

    def _message(self, slot: int) -> memoryview:
        kept = self._kept.get(slot)
        if kept is None:
            raise ProtocolError(f"Nothing is kept in slot {slot} of the link.")
        return kept

    def _make(self, slot: int, length: int) -> memoryview:
        old = self._kept.get(slot)
        if old is not None and len(old) == length:
            return old
        if slot >= self._terms.slots or not HEADER <= length <= frames.MAX_KEPT_BYTES:
            raise ProtocolError(f"A message of {length} bytes to be kept in slot {slot} of {self._terms.slots}.")
        if old is not None:
            self._forget(len(old))
        if self._bytes + length > self._terms.store_bytes:
            raise ProtocolError(f"{self._bytes + length} bytes to be kept; {self._terms.store_bytes} were agreed on.")
        self._take(length)
        self._bytes += length
        kept = self._kept[slot] = memoryview(bytearray(length))
        return kept

    def _forget(self, length: int) -> None:
        self._bytes -= length
        self._take(-length)

    def _fill(self, raw: memoryview, pos: int, end: int) -> int:
        while self._targets and pos < end:
            target = self._targets[-1]
            count = min(len(target) - self._filled, end - pos)
            target[self._filled : self._filled + count] = raw[pos : pos + count]
            self._filled += count
            pos += count
            if self._filled < len(target):
                return pos
            self._targets.pop()
            self._filled = 0
            if self._table is not None:
                self._ranges(self._table)
                self._table = None
        if not self._targets:
            self._deliver(self._kept[self._slot])
        return pos

    def _ranges(self, table: bytearray) -> None:
        """From a patch's table to the stretches of the kept message that the next bytes are for."""
        kept = self._kept[self._slot]
        for offset, length in np.frombuffer(table, dtype="<u4").reshape(-1, 2)[::-1].tolist():
            if not length or offset + length > len(kept):
                raise ProtocolError(f"A patch of bytes {offset} to {offset + length} of {len(kept)}.")
            self._targets.append(kept[offset : offset + length])


def narrow(data: memoryview | bytes) -> bytes:
    """float32 to float16; what is beyond ±65504 becomes that, infinities and NaN stay."""
    values = np.frombuffer(data, dtype="<f4")
    finite = np.isfinite(values)
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.array_equal(np.isfinite(halves), finite):
        halves = np.where(finite, np.clip(values, -65504.0, 65504.0), values).astype("<f2")
    return halves.tobytes()


def widen(data: memoryview | bytes) -> memoryview:
    """float16 to float32."""
    return memoryview(np.frombuffer(data, dtype="<f2").astype("<f4").tobytes())


def down_head(kind: Down, number: int) -> bytes:
    """The head of any frame from the peer: its kind, and a length (ALIVE: milliseconds)."""
    return frames.LENGTH.pack(kind, number)
