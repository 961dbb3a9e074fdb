"""Opaque buffer handles and made-up addresses: what a head may know of this peer's memory is nothing.

A head gets a ``remote_ptr`` (only ever echoed back) and a ``base`` (used for pointer arithmetic). Both are invented per
connection from random starts: ``handle = first + index``, and bases that lie apart in a range that never was memory.
Numbers of another connection are therefore unknown here, and no real address leaves the process.

The table is kept twice: as Python objects for single transfers, as numpy columns for whole graphs. An index is never
used again within a connection, so that a stale handle stays unknown.
"""

from __future__ import annotations

import secrets

import numpy as np

from hydra.errors import ProtocolError
from hydra.ggml.backend import Buffer

BASE_ALIGNMENT = 1 << 21  # more than any backend asks for
_FIRST_BASE = 1 << 44
_GUARD = 1 << 32
_NOWHERE = np.uint64(1 << 63)  # the base of a freed buffer: no address lies in its 0 bytes
MAX_BUFFERS = 4096


class HandleTable:
    """Buffers of one connection by handle.

    Columns over all indices ever given (rows of freed buffers have live = False): fake_base u64, real_base u64, size
    u64, ggml u64 (the ggml_backend_buffer's address), live bool.
    """

    def __init__(self) -> None:
        self.first = (secrets.randbits(40) + 1) << 20
        self._next_base = _FIRST_BASE + secrets.randbits(22) * BASE_ALIGNMENT
        self.buffers: dict[int, tuple[Buffer, int]] = {}  # handle -> (buffer, fake base)
        self.count = 0
        self.largest_bytes = 0
        self.total_bytes = 0
        self.fake_base = np.zeros(16, dtype=np.uint64)
        self.real_base = np.zeros(16, dtype=np.uint64)
        self.size = np.zeros(16, dtype=np.uint64)
        self.ggml = np.zeros(16, dtype=np.uint64)
        self.live = np.zeros(16, dtype=bool)

    def add(self, buffer: Buffer) -> int:
        """Takes the buffer over and returns its handle.

        Raises: ProtocolError when a connection asks for more buffers than any head needs.
        """
        if self.count >= MAX_BUFFERS:
            raise ProtocolError(f"A {self.count + 1}th buffer on one connection; {MAX_BUFFERS} are allowed.")
        index = self.count
        if index == len(self.live):
            for name in ("fake_base", "real_base", "size", "ggml", "live"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self.count += 1
        handle = self.first + index
        self.fake_base[index] = self._next_base
        self.real_base[index] = buffer.base
        self.size[index] = buffer.size
        self.ggml[index] = buffer.handle
        self.live[index] = True
        self.buffers[handle] = (buffer, self._next_base)
        self._next_base += (buffer.size + _GUARD + BASE_ALIGNMENT) // BASE_ALIGNMENT * BASE_ALIGNMENT
        self._measure()
        return handle

    def get(self, handle: int) -> tuple[Buffer, int]:
        """(buffer, made-up base). Raises: ProtocolError for a handle that this connection does not hold."""
        entry = self.buffers.get(handle)
        if entry is None:
            raise ProtocolError(f"Buffer {handle:#x} is not one of this connection's {len(self.buffers)}.")
        return entry

    def pop(self, handle: int) -> Buffer:
        buffer, _ = self.get(handle)
        del self.buffers[handle]
        index = handle - self.first
        self.live[index] = False
        self.fake_base[index], self.size[index] = _NOWHERE, 0
        self._measure()
        return buffer

    def close(self) -> None:
        for buffer, _ in self.buffers.values():
            buffer.close()
        self.buffers.clear()
        self.live[:] = False
        self._measure()

    def _measure(self) -> None:
        sizes = [buffer.size for buffer, _ in self.buffers.values()]
        self.largest_bytes = max(sizes, default=0)
        self.total_bytes = sum(sizes)

    def resolve(self, handles: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whole columns at once: (index of the buffer or -1, offset of data within it).

        handles, data: u64[n] as on the wire. A zero handle is a tensor without memory; its data must be zero too.
        Raises: ProtocolError for an unknown handle, or an address outside of every buffer.
        """
        index = handles - np.uint64(self.first)  # wraps for smaller numbers, and is then out of range
        if (index < self.count).all():
            index = index.view(np.int64)
            offset = data - self.fake_base[index]  # wraps for an address before the base
            if (offset <= self.size[index]).all():
                return index, offset
        return self._resolve_slowly(handles, data)

    def _resolve_slowly(self, handles: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With tensors without memory among them, or a wrong one to be named."""
        none = handles == 0
        index = handles - np.uint64(self.first)  # wraps for smaller numbers, and is then out of range
        index = np.where(none, np.uint64(0), index)
        bad = index >= self.count
        index = np.where(bad, 0, index).astype(np.int64)
        if self.count:
            bad |= ~self.live[index] & ~none
        else:
            bad = ~none
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise ProtocolError(
                f"Tensor {at} lies in buffer {int(handles[at]):#x}, which is not one of this connection's."
            )
        if (none & (data != 0)).any():
            at = int(np.flatnonzero(none & (data != 0))[0])
            raise ProtocolError(f"Tensor {at} has the address {int(data[at]):#x} but no buffer.")
        if not self.count:
            return np.full(len(handles), -1), np.zeros(len(handles), dtype=np.uint64)
        offset = np.where(none, np.uint64(0), data - self.fake_base[index])
        outside = offset > self.size[index]  # an address before the base wraps to a huge offset
        outside &= ~none
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise ProtocolError(
                f"Tensor {at} has the address {int(data[at]):#x}, outside its {int(self.size[index[at]])} bytes."
            )
        return np.where(none, -1, index), offset
