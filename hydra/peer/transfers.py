"""Bytes in and out of one connection's buffers: set, get, hash, memset, init and copy, and the plans that make them
short.

The half of a session that moves bytes; the other half (hydra.peer.session) runs the loop, the devices and the graphs.

The hot path. A decode step repeats the same headers, byte for byte: what a SET_TENSOR or GET_TENSOR header was found
to mean is remembered by its bytes, so that validation is paid once. Everything that a plan depends on (the handle
table, which ranges hold indices) is the same for as long as the plan is kept; freeing any buffer and noting any new
range forgets all.

A payload is copied once: from the socket into a host buffer, or by the device out of the receive buffer.
"""

from __future__ import annotations

import socket
from ctypes import c_char
from typing import Any

import numpy as np

from hydra.errors import DeviceError, PeerError, ProtocolError
from hydra.ggml import abi
from hydra.ggml.backend import Backend, Buffer, PinnedMemory
from hydra.ggml.library import STATUS_SUCCESS
from hydra.peer import indices, ops, rules
from hydra.peer.handles import HandleTable
from hydra.peer.receiver import Receiver
from hydra.peer.shared import SharedState
from hydra.peer.stats import CommandStats
from hydra.peer.weights import TensorKey, WeightFile
from hydra.rpc import wire
from hydra.rpc.wire import Command

PIECE_BYTES = 4 << 20
MAX_PLANS = 4096
_REPLY_BYTES = 4 << 20
_ZERO_HASH = (b"", 0)


class Transfers:
    """One connection's socket, buffers and plans, and the commands that move bytes between them.

    start: bytes of the connection that were read already.
    """

    def __init__(self, sock: socket.socket, shared: SharedState, start: bytes = b"") -> None:
        self.sock = sock
        self.shared = shared
        self.ggml = shared.ggml
        settings = shared.settings
        self.receiver = Receiver(sock, settings.message_s, settings.min_rate_bytes_s, start)
        self.handles = HandleTable()
        self.indices = indices.IndexGuard(self._read_back)
        self.stats = CommandStats(settings.timings)
        self._queued: list[Backend] = []
        self._plans: dict[bytes, tuple[Any, ...]] = {}
        self._reply: PinnedMemory | None = None
        self._asked_hash: tuple[bytes, int] = _ZERO_HASH

    def _take(self, size: int) -> memoryview:
        """The payload of a message that lies whole in the buffer."""
        receiver = self.receiver
        start = receiver.pos + 9
        receiver.pos = start + size
        return receiver.data[start : start + size]

    def _send(self, cmd: int, payload: bytes | memoryview) -> None:
        """A reply in one segment: header and payload in one sendmsg."""
        size = len(payload)
        self.stats.bytes_out[cmd] += size + 8
        header = wire.SIZE.pack(size)
        try:
            sent = self.sock.sendmsg((header, payload))
            if sent < size + 8:
                self._send_rest(header, payload, sent)
        except BlockingIOError as exc:
            raise PeerError("the head does not take its reply") from exc
        except OSError as exc:
            raise PeerError(f"the connection broke: {exc.strerror or exc}") from exc

    def _send_rest(self, header: bytes, payload: bytes | memoryview, sent: int) -> None:
        while sent < len(header):
            sent += self.sock.sendmsg((header[sent:], payload))
        rest = memoryview(payload)[sent - len(header) :]
        while len(rest):
            rest = rest[self.sock.send(rest) :]

    def _mark_queued(self, backend: Backend) -> None:
        if backend not in self._queued:
            self._queued.append(backend)

    def _synchronize(self) -> None:
        for backend in self._queued:
            backend.synchronize()
        self._queued.clear()
        self.receiver.synchronized()

    def _region(self, tensor: bytes | memoryview, offset: int, size: int) -> tuple[Buffer, int]:
        """(buffer, offset in it) of bytes [offset, offset + size) of a tensor on the wire.

        Raises: ProtocolError when the tensor is not a possible one, or the region is not inside of it and its buffer.
        """
        buffer, at, extent = self._tensor(tensor)
        if offset > extent or size > extent - offset:
            raise ProtocolError(f"Bytes {offset} to {offset + size} of a tensor of {extent} bytes.")
        return buffer, at + offset

    def _tensor(self, tensor: bytes | memoryview) -> tuple[Buffer, int, int]:
        """(buffer, offset in it, extent in bytes) of a tensor on the wire, wholly inside its buffer."""
        kind, handle, *dims, data = wire.TENSOR_REGION.unpack(tensor)
        buffer, base = self.handles.get(handle)
        at = data - base
        extent = rules.check_tensor(kind, dims[:4], dims[4:], at, buffer.size)
        return buffer, at, extent

    def _remember(self, key: bytes, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _set_tensor(self, size: int) -> None:
        receiver = self.receiver
        start = receiver.pos
        key = bytes(receiver.data[start + 1 : start + 9 + wire.SET_TENSOR_HEAD_SIZE])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan_set(key, size)
        backend, host, window, at, count, special, note, item_bytes = plan
        first = start + 9 + wire.SET_TENSOR_HEAD_SIZE
        receiver.pos = first
        if special or receiver.end - first < count:
            self._set_pieces(plan, key)
            return
        receiver.pos = first + count
        if note is not None:
            note.write(bytes(receiver.data[first : first + count]), item_bytes)
        if host is not None:
            host[at : at + count] = receiver.data[first : first + count]
        elif count:
            self.ggml.ggml_backend_tensor_set_async(backend.handle, window, receiver.address + first, at, count)
            receiver.leave(first)
            self._mark_queued(backend)

    def _plan_set(self, key: bytes, size: int) -> tuple[Any, ...]:
        tensor = key[8 : 8 + wire.TENSOR_SIZE]
        flag, offset = wire.SET_TENSOR_TAIL.unpack_from(key, 8 + wire.TENSOR_SIZE)
        count = size - wire.SET_TENSOR_HEAD_SIZE
        buffer, at = self._region(tensor, offset, count)
        host = self._host(buffer)
        kind, handle, *_ = wire.TENSOR_REGION.unpack(tensor)
        place = self._place(handle, at)
        # What may be kept, and what a graph may use as indices, takes the longer way; but a range that was noted before
        # (the same inputs, step after step) only has its note rewritten.
        note = self.indices.find(place, place + count) if kind in indices.INTEGERS else None
        special = flag == 1 or (
            note is None and (kind in indices.INTEGERS or self.indices.watches(place, place + count))
        )
        item_bytes = int(ops.TYPE_SIZE[kind])
        return self._remember(key, (buffer.backend, host, buffer.window, at, count, special, note, item_bytes))

    def _place(self, handle: int, at: int = 0) -> int:
        return ((handle - self.handles.first) << indices.PLACE_SHIFT) + at

    def _read_back(self, place: int, size: int) -> bytes:
        """What the device holds there now (hydra.peer.indices)."""
        handle = self.handles.first + (place >> indices.PLACE_SHIFT)
        buffer, _ = self.handles.get(handle)
        data = np.empty(size, dtype=np.uint8)
        self._synchronize()
        at = place & ((1 << indices.PLACE_SHIFT) - 1)
        self.ggml.ggml_backend_tensor_get(buffer.window, data.ctypes.data, at, size)
        return data.tobytes()

    @staticmethod
    def _host(buffer: Buffer) -> memoryview | None:
        if not buffer.host or not buffer.size:
            return None
        return memoryview((c_char * buffer.size).from_address(buffer.base)).cast("B")

    def _set_pieces(self, plan: tuple[Any, ...], key: bytes) -> None:
        """A payload that is not all here yet, or that may be kept: device copies overlap what follows."""
        backend, host, window, at, count, *_ = plan
        receiver = self.receiver
        writer = self._cache_writer(key, count) if key[8 + wire.TENSOR_SIZE] == 1 else None
        kind, handle, *_ = wire.TENSOR_REGION.unpack_from(key, 8)
        reached = self.handles.get(handle)[0].reached
        integers = bytearray() if kind in indices.INTEGERS and count <= indices.MAX_NOTE_BYTES else None
        try:
            done = 0
            while done < count:
                size = min(PIECE_BYTES, count - done)
                if host is not None:
                    reached(at + done)
                    piece = host[at + done : at + done + size]
                    receiver.into(piece)
                else:
                    piece = receiver.piece(size)
                    size = len(piece)
                    start = receiver.pos - size
                    self.ggml.ggml_backend_tensor_set_async(
                        backend.handle, window, receiver.address + start, at + done, size
                    )
                    receiver.leave(start)
                    self._mark_queued(backend)
                if writer is not None:
                    writer.write(piece)
                if integers is not None:
                    integers += piece
                done += size
            if writer is not None:
                writer.commit()
                writer = None
        finally:
            if writer is not None:
                writer.abort()
        place = self._place(handle, at)
        if integers is None:
            self.indices.wrote(place, place + count)
        elif self.indices.note(place, bytes(integers), int(ops.TYPE_SIZE[kind])):
            self._plans.clear()  # a plan made before this range was known may write over it

    def _cache_writer(self, key: bytes, count: int) -> Any:
        """A writer for a weight whose hash this connection has just asked for; None where it cannot be kept."""
        cache = self.shared.cache
        tensor = key[8 : 8 + wire.TENSOR_SIZE]
        _, offset = wire.SET_TENSOR_TAIL.unpack_from(key, 8 + wire.TENSOR_SIZE)
        asked, fnv = self._asked_hash
        self._asked_hash = _ZERO_HASH
        if cache is None or asked != tensor + wire.U64.pack(offset):
            return None
        row = np.frombuffer(tensor, dtype=wire.RPC_TENSOR)[0]
        name = bytes(row["name"]).split(b"\0")[0].decode("utf-8", "replace")
        return cache.begin(fnv, count, TensorKey(name, int(row["type"]), tuple(int(n) for n in row["ne"]), offset))

    def _set_tensor_hash(self, size: int) -> None:
        payload = bytes(self._take(size))
        tensor = payload[: wire.TENSOR_SIZE]
        offset, fnv = wire.OFFSET_SIZE.unpack_from(payload, wire.TENSOR_SIZE)
        buffer, at, extent = self._tensor(tensor)
        if offset > extent:
            raise ProtocolError(f"Byte {offset} of a tensor of {extent} bytes.")
        cache = self.shared.cache
        if cache is None:
            self._send(Command.SET_TENSOR_HASH, b"\0")
            return
        weight = cache.lookup(fnv, extent - offset)
        if weight is None:
            self._asked_hash = (tensor + wire.U64.pack(offset), fnv)
            self._send(Command.SET_TENSOR_HASH, b"\0")
            return
        with weight:
            # It is verified, so the answer is known; the client hashes its next weight while this one is copied.
            self._send(Command.SET_TENSOR_HASH, b"\1")
            place = self._place(wire.TENSOR_REGION.unpack(tensor)[1], at)
            self.indices.wrote(place + offset, place + extent)
            self._fill(buffer, at + offset, weight)

    def _fill(self, buffer: Buffer, at: int, weight: WeightFile) -> None:
        """Copies a kept weight to where it belongs."""
        host = self._host(buffer)
        for piece in weight.pieces():
            if host is not None:
                buffer.reached(at)
                host[at : at + len(piece)] = piece
            else:
                # Pages of a mapping are not pinned: the call returns when they are copied, as pieces() requires.
                address = np.frombuffer(piece, dtype=np.uint8).ctypes.data
                self.ggml.ggml_backend_tensor_set_async(buffer.backend.handle, buffer.window, address, at, len(piece))
                self._mark_queued(buffer.backend)
            at += len(piece)

    def _get_tensor(self, size: int) -> None:
        receiver = self.receiver
        start = receiver.pos
        key = bytes(receiver.data[start : start + 9 + size])
        receiver.pos = start + 9 + size
        plan = self._plans.get(key)
        if plan is None:
            offset, count = wire.OFFSET_SIZE.unpack_from(key, 9 + wire.TENSOR_SIZE)
            buffer, at = self._region(key[9 : 9 + wire.TENSOR_SIZE], offset, count)
            plan = self._remember(key, (buffer.backend, self._host(buffer), buffer.window, at, count))
        backend, host, window, at, count = plan
        if host is not None:
            self._send(Command.GET_TENSOR, host[at : at + count])
            return
        self._get_device(backend, window, at, count)

    def _get_device(self, backend: Backend, window: int, at: int, count: int) -> None:
        reply = self._reply
        if reply is None:
            reply = self._reply = PinnedMemory(backend, _REPLY_BYTES)
        get_async = self.ggml.ggml_backend_tensor_get_async
        half = _REPLY_BYTES // 2
        first = min(count, half)
        if first:
            get_async(backend.handle, window, reply.address, at, first)
        self._synchronize()
        view = reply.view
        if count <= half:
            self._send(Command.GET_TENSOR, view[:count])
            return
        # Long replies: the next piece is copied from the device while this one goes out.
        self._send_piece(wire.SIZE.pack(count), view[:first], count)
        done, side = first, 1
        size = min(half, count - done)
        get_async(backend.handle, window, reply.address + half, at + done, size)
        while size:
            backend.synchronize()
            ready = view[side * half : side * half + size]
            done += size
            size = min(half, count - done)
            side ^= 1
            if size:
                get_async(backend.handle, window, reply.address + side * half, at + done, size)
            self._send_piece(b"", ready, 0)

    def _send_piece(self, header: bytes, piece: memoryview, total: int) -> None:
        self.stats.bytes_out[Command.GET_TENSOR] += len(header) + len(piece)
        try:
            sent = self.sock.sendmsg((header, piece))
            if sent < len(header) + len(piece):
                self._send_rest(header, piece, sent)
        except OSError as exc:
            raise PeerError(f"the connection broke: {exc.strerror or exc}") from exc

    def _memset_tensor(self, size: int) -> None:
        payload = self._take(size)
        offset, count, value = wire.MEMSET_TAIL.unpack_from(payload, wire.TENSOR_SIZE)
        buffer, at = self._region(payload[: wire.TENSOR_SIZE], offset, count)
        self._synchronize()
        place = self._place(wire.TENSOR_REGION.unpack_from(payload)[1], at)
        self.indices.wrote(place, place + count)
        if count:
            self.ggml.ggml_backend_tensor_memset(buffer.window, value, at, count)

    def _init_tensor(self, size: int) -> None:
        payload = self._take(size)
        buffer, at, _ = self._tensor(payload)
        row = self._tensor_rows(payload, 1)
        row["view_src"] = 0
        address = row.ctypes.data
        padded = self.ggml.ggml_backend_buft_get_alloc_size(buffer.backend.buffer_type, address)
        if padded > buffer.size - at:
            raise ProtocolError(f"A tensor of {padded} bytes with padding at {at} of a buffer of {buffer.size} bytes.")
        self._synchronize()
        if self.ggml.ggml_backend_buffer_init_tensor(buffer.handle, address) != STATUS_SUCCESS:
            raise DeviceError("The device refused to prepare a tensor.")

    def _copy_tensor(self, size: int) -> None:
        payload = self._take(size)
        src, src_at, src_extent = self._tensor(payload[: wire.TENSOR_SIZE])
        dst, dst_at, dst_extent = self._tensor(payload[wire.TENSOR_SIZE :])
        if src_extent != dst_extent:
            raise ProtocolError(f"A copy of a tensor of {src_extent} bytes to one of {dst_extent}.")
        self._synchronize()
        place = self._place(wire.TENSOR_REGION.unpack_from(payload, wire.TENSOR_SIZE)[1], dst_at)
        self.indices.wrote(place, place + dst_extent)
        done = True
        if src_extent:
            if src.host and dst.host:
                source = self._host(src)
                target = self._host(dst)
                assert source is not None and target is not None  # an extent above 0 needs memory
                target[dst_at : dst_at + dst_extent] = bytes(source[src_at : src_at + src_extent])
            else:
                rows = self._tensor_rows(payload, 2)
                rows["src"] = rows["view_src"] = 0
                done = self.ggml.ggml_backend_buffer_copy_tensor(rows.ctypes.data, rows.ctypes.data + abi.TENSOR_SIZE)
        self._send(Command.COPY_TENSOR, b"\1" if done else b"\0")

    def _tensor_rows(self, payload: memoryview, count: int) -> np.ndarray:
        """ggml_tensors for a few tensors that stand alone (no sources), addresses resolved."""
        wire_rows = np.frombuffer(payload, dtype=wire.RPC_TENSOR, count=count).copy()
        buf, data = self.handles.resolve(wire_rows["buffer"].copy(), wire_rows["data"].copy())
        rows = abi.aligned_bytes(count * abi.TENSOR_SIZE).view(abi.TENSOR)
        for name in ("type", "ne", "nb", "flags", "name"):
            rows[name] = wire_rows[name]
        known = buf >= 0
        rows["buffer"][known] = self.handles.ggml[buf[known]]
        rows["data"][known] = (self.handles.real_base[buf] + data)[known]
        return rows
