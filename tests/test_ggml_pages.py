"""Memory that a host buffer gets ahead of its writer: as far as promised, no further, and gone without a trace."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import pytest

from hydra.ggml import library, pages
from hydra.ggml.backend import Backend, Buffer, pick_device

MIB = 1 << 20
SLACK = pages.HUGE_PAGE_BYTES  # a page may be given whole where only its beginning was asked for


def resident_bytes(buffer: Buffer) -> int:
    start = -(-buffer.base // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (buffer.base + buffer.size - start) // mmap.PAGESIZE
    there = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), there) == 0
    return sum(page & 1 for page in there) * mmap.PAGESIZE


def wait_for(buffer: Buffer, wanted: int) -> int:
    deadline = time.monotonic() + 20
    while (now := resident_bytes(buffer)) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def can_populate() -> bool:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 23) == 0


@pytest.mark.skipif(not can_populate(), reason="MADV_POPULATE_WRITE is Linux 5.14")
def test_memory_comes_ahead_of_the_writer_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "AHEAD_BYTES", 6 * MIB)
    ggml = library.load()
    with Backend(ggml, pick_device(ggml, "CPU"), 1) as backend:
        buffer = backend.alloc(40 * MIB)
        assert buffer is not None
        before = resident_bytes(buffer)
        assert before <= SLACK
        buffer.reached(30 * MIB)  # nobody said that it would be written
        buffer.expect_writes()
        now = wait_for(buffer, 6 * MIB - SLACK)
        assert 6 * MIB - SLACK <= now <= 6 * MIB + 2 * SLACK
        buffer.reached(10 * MIB)
        buffer.reached(1 * MIB)
        now = wait_for(buffer, 16 * MIB - SLACK)
        assert 16 * MIB - SLACK <= now <= 16 * MIB + 2 * SLACK
        buffer.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "pages-ahead"]


def test_a_buffer_that_is_freed_at_once_takes_its_thread_along() -> None:
    ggml = library.load()
    with Backend(ggml, pick_device(ggml, "CPU"), 1) as backend:
        for _ in range(20):
            buffer = backend.alloc(64 * MIB)
            assert buffer is not None
            buffer.expect_writes()
            buffer.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "pages-ahead"]
