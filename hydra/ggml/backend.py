"""Owning handles over ggml's devices, backends, buffers and events: one owner each, ``close()`` and ``with``.

Does not know the protocol: offsets here are bytes within a buffer. Every transfer goes through one *window* tensor per
buffer (I8, as long as the buffer), so that moving bytes needs no tensor header built per message.
"""

from __future__ import annotations

import ctypes
from ctypes import c_size_t
from dataclasses import dataclass
from types import TracebackType

from hydra.errors import DeviceError, DeviceMissing
from hydra.ggml import abi, pages
from hydra.ggml.library import DEVICE_TYPES, Ggml

_SET_N_THREADS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


@dataclass(frozen=True)
class Device:
    """A compute device as ggml lists it. kind: cpu, gpu, igpu, accel or meta."""

    handle: int
    index: int
    name: str
    description: str
    kind: str
    registry: str


def devices(ggml: Ggml) -> list[Device]:
    """Every device of the registry, in ggml's order."""
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        reg = ggml.ggml_backend_dev_backend_reg(handle)
        found.append(
            Device(
                handle,
                index,
                ggml.ggml_backend_dev_name(handle).decode(),
                ggml.ggml_backend_dev_description(handle).decode(),
                DEVICE_TYPES.get(ggml.ggml_backend_dev_type(handle), "unknown"),
                ggml.ggml_backend_reg_name(reg).decode(),
            )
        )
    return found


def pick_device(ggml: Ggml, name: str = "auto") -> Device:
    """The device called name; "auto" is the first GPU, or the CPU where there is none.

    Raises: DeviceMissing, listing the devices there are.
    """
    found = devices(ggml)
    if name == "auto":
        order = {"gpu": 0, "igpu": 1, "cpu": 2}
        candidates = sorted((d for d in found if d.kind in order), key=lambda d: (order[d.kind], d.index))
        if candidates:
            return candidates[0]
    for device in found:
        if device.name.lower() == name.lower():
            return device
    raise DeviceMissing.among(name, (device.name for device in found))


def memory(ggml: Ggml, device: Device) -> tuple[int, int]:
    """(free, total) of a device, in bytes."""
    free, total = c_size_t(), c_size_t()
    ggml.ggml_backend_dev_memory(device.handle, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class Backend:
    """One stream of work on one device: what is queued on it runs in order."""

    def __init__(self, ggml: Ggml, device: Device, n_threads: int = 0) -> None:
        self.ggml = ggml
        self.device = device
        handle = ggml.ggml_backend_dev_init(device.handle, None)
        if not handle:
            raise DeviceError(f"Device {device.name} ({device.description}) cannot be opened.", "See `hydra doctor`.")
        self.handle = int(handle)
        self.buffer_type = ggml.ggml_backend_get_default_buffer_type(handle)
        self.alignment = ggml.ggml_backend_buft_get_alignment(self.buffer_type)
        self.max_size = ggml.ggml_backend_buft_get_max_size(self.buffer_type)
        self.is_cpu = device.kind == "cpu"
        if n_threads > 0:
            reg = ggml.ggml_backend_dev_backend_reg(device.handle)
            address = ggml.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_n_threads")
            if address:
                _SET_N_THREADS(address)(self.handle, n_threads)

    def synchronize(self) -> None:
        self.ggml.ggml_backend_synchronize(self.handle)

    def alloc(self, size_bytes: int) -> Buffer | None:
        """A buffer on the device, or None when the device has no room for it."""
        handle = self.ggml.ggml_backend_buft_alloc_buffer(self.buffer_type, size_bytes)
        return Buffer(self, int(handle)) if handle else None

    def close(self) -> None:
        if self.handle:
            self.ggml.ggml_backend_free(self.handle)
            self.handle = 0

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Buffer:
    """A device buffer and its window tensor.

    base: the real address (never leaves this process); size: bytes; host: the device's memory is this process's own.
    """

    def __init__(self, backend: Backend, handle: int) -> None:
        self.backend = backend
        self.handle = handle
        ggml = backend.ggml
        self.size = int(ggml.ggml_backend_buffer_get_size(handle))
        # A buffer of no bytes has no base, and asking for it aborts in debug builds.
        self.base = int(ggml.ggml_backend_buffer_get_base(handle) or 0) if self.size else 0
        self.host = bool(ggml.ggml_backend_buffer_is_host(handle)) and backend.is_cpu
        if self.host:
            pages.ask_for_huge_pages(self.base, self.size)
        self._ahead: pages.PagesAhead | None = None
        self._window = abi.aligned_bytes(abi.TENSOR_SIZE)
        row = self._window.view(abi.TENSOR)
        row["type"] = abi.TYPE_I8
        row["buffer"] = handle
        row["ne"][0] = (self.size, 1, 1, 1)
        row["nb"][0] = (1, self.size, self.size, self.size)
        row["data"] = self.base
        self.window = int(self._window.ctypes.data)

    def host_view(self, offset: int, size: int) -> memoryview:
        """Bytes of a host buffer as writable memory of this process; the caller has checked the range."""
        return memoryview((ctypes.c_char * size).from_address(self.base + offset)).cast("B")

    def expect_writes(self) -> None:
        """All of the buffer will be written, from its start on: a host buffer then gets its memory ahead of that."""
        if self.host and self.size >= pages.HUGE_PAGE_BYTES and self._ahead is None:
            self._ahead = pages.PagesAhead(self.base, self.size)

    def reached(self, offset: int) -> None:
        """Writing has come to there."""
        if self._ahead is not None:
            self._ahead.reach(offset)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self.handle:
            self.backend.ggml.ggml_backend_buffer_free(self.handle)
            self.handle = 0


class Event:
    """A mark in a backend's stream that the host can wait for; None-like where the device has no events."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.handle = backend.ggml.ggml_backend_event_new(backend.device.handle) if not backend.is_cpu else None

    def record(self) -> None:
        if self.handle:
            self.backend.ggml.ggml_backend_event_record(self.handle, self.backend.handle)

    def wait(self) -> None:
        if self.handle:
            self.backend.ggml.ggml_backend_event_synchronize(self.handle)

    def close(self) -> None:
        if self.handle:
            self.backend.ggml.ggml_backend_event_free(self.handle)
            self.handle = None


class PinnedMemory:
    """Host memory that the device copies from and to by itself (pinned, where the backend offers that; else plain).

    view: size bytes, writable; address: of its first byte.
    """

    def __init__(self, backend: Backend, size: int) -> None:
        ggml = backend.ggml
        self._ggml = ggml
        self._handle = 0
        buffer_type = None if backend.is_cpu else ggml.ggml_backend_dev_host_buffer_type(backend.device.handle)
        if buffer_type:
            self._handle = ggml.ggml_backend_buft_alloc_buffer(buffer_type, size) or 0
        self.pinned = bool(self._handle)
        if self._handle:
            self.address = int(ggml.ggml_backend_buffer_get_base(self._handle))
            self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        else:
            plain = abi.aligned_bytes(size)
            self.view = plain.data
            self.address = int(plain.ctypes.data)

    def close(self) -> None:
        if self._handle:
            self.view = memoryview(b"")
            self._ggml.ggml_backend_buffer_free(self._handle)
            self._handle = 0
