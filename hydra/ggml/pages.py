"""How a large host buffer gets its memory: in 2 MiB pages, and before it is written.

A host buffer is a promise; the kernel keeps it page by page when a page is first written, zeroing each, and looks for
2 MiB at a time only for who asked. In a load that is a fifth of a second for 240 MB, in the thread that receives. A
head hashes and sends meanwhile, so there is time to have it done by another thread: ``PagesAhead`` stays a little
ahead of the writer. Only a little: what nobody writes must cost nobody memory.

Everything here is a request; where the kernel refuses (MADV_POPULATE_WRITE is Linux 5.14) only the speed changes.

Source: madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from ctypes import c_size_t, c_void_p

HUGE_PAGE_BYTES = 2 << 20
AHEAD_BYTES = 256 << 20
_STEP_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None)


def ask_for_huge_pages(address: int, size: int) -> None:
    """Lets the kernel back a large host buffer with 2 MiB pages: each token reads every weight, and 4 KiB pages miss.

    Most systems give them only to who asks (transparent_hugepage = madvise).
    """
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (address + size - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0:
        _LIBC.madvise(c_void_p(start), c_size_t(length), mmap.MADV_HUGEPAGE)


class PagesAhead:
    """Gives [address, address + size) its memory, up to AHEAD_BYTES before the place that was last reached.

    One owner: ``close`` before the memory is given back.
    """

    def __init__(self, address: int, size: int) -> None:
        page = mmap.PAGESIZE
        self._start = -(-address // page) * page
        self._size = (address + size - self._start) // page * page
        self._wanted = min(AHEAD_BYTES, self._size)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pages-ahead", daemon=True)
        self._thread.start()

    def reach(self, offset: int) -> None:
        """Somebody writes up to there."""
        wanted = min(offset + AHEAD_BYTES, self._size)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def close(self) -> None:
        """Returns when the thread is gone, after a step of some milliseconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        done = 0
        while done < self._size and not self._closed:
            with self._changed:
                while done >= self._wanted and not self._closed:
                    self._changed.wait()
                step = min(_STEP_BYTES, self._wanted - done)
            if self._closed or _LIBC.madvise(c_void_p(self._start + done), c_size_t(step), _MADV_POPULATE_WRITE):
                return
            done += step
