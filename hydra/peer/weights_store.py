"""The writing half of the weight cache: temporary files, checksums, one rename, and the limit on the directory's size.

Several peers may share a directory. Creating, publishing and evicting happen under a lock file; a temporary file is
locked by its writer for as long as it is written, so that what a crashed writer left behind can be told from what is
in the making. A session only writes into the page cache; checksums, fsync and rename are a thread's of the store's
own.

Knows nothing of lookups, sockets or devices. File format: weights_file.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hydra.errors import HydraError
from hydra.peer.weights_file import CorruptWeight, digests_of, entry_name, parse_entry_name, reference_body, seal

_PENDING = 32  # weights written but not yet checksummed and renamed: then a session waits
LOAD_PAUSE_S = 30.0  # a longer silence than this separates two loads
_COPY_BYTES = 4 << 20
_LOCK, _TEMPORARY = "lock", "incoming-"
_SEAL_BYTES = 4096  # allowance for digests and trailer when making room; exact when published

Key = tuple[int, int]  # (the client's fnv1a-64, size in bytes)


@dataclass(frozen=True)
class Entry:
    """One entry on disk. ``stored_bytes`` is what its file takes; of a reference that is next to nothing."""

    path: Path
    fnv: int
    size_bytes: int
    stored_bytes: int
    used_ns: int

    @property
    def key(self) -> Key:
        return self.fnv, self.size_bytes


def list_entries(directory: Path) -> list[Entry]:
    """The entries of a cache directory, least recently used first; none when there is no such directory."""
    entries = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as listing:
        for item in listing:
            key = parse_entry_name(item.name)
            if key is not None:
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    status = item.stat()
                    entries.append(Entry(Path(item.path), *key, status.st_size, status.st_mtime_ns))
    return sorted(entries, key=lambda entry: entry.used_ns)


def mark_used(path: Path) -> None:
    """Put an entry last in the order of use. With our own clock: the kernel's is behind it, and both are compared."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def clear(directory: Path) -> tuple[int, int]:
    """Remove every entry of a cache directory; returns how many and how many bytes their files took."""
    count = freed = 0
    if not directory.is_dir():
        return 0, 0
    with _locked(directory):
        for entry in list_entries(directory):
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
                count, freed = count + 1, freed + entry.stored_bytes
        _remove_abandoned(directory)
    return count, freed


class Store:
    """Stores weights in ``directory``, at most ``max_bytes`` of files, leaving ``reserve_bytes`` of the disk to others.

    Raises: HydraError when the directory cannot be used.
    """

    def __init__(self, directory: Path, max_bytes: int, reserve_bytes: int, logger: logging.Logger) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.storing = True
        self._closed = False
        self.stored = self.referenced = self.evicted = 0
        self._reserve_bytes = reserve_bytes
        self._log = logger
        self._lock = threading.Lock()
        self._incoming: dict[Key, int] = {}  # the bytes of disk that each will take
        self._serial = itertools.count()
        self._load_began_ns = self._last_use_ns = time.time_ns()
        self._jobs: queue.Queue[Writer | None] = queue.Queue(_PENDING)
        self._thread: threading.Thread | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(directory):
                _remove_abandoned(directory)
        except OSError as error:
            raise HydraError(
                f"The weight cache {directory} cannot be used: {error}.", "Check peer.cache_dir."
            ) from error

    def tick(self) -> None:
        """A load is going on: what it uses from its first tick on is not evicted for its own sake."""
        now = time.time_ns()
        with self._lock:
            if now - self._last_use_ns > LOAD_PAUSE_S * 1e9:
                self._load_began_ns = now
            self._last_use_ns = now

    def begin(self, key: Key, reference: tuple[Path, int] | None) -> Writer | None:
        """A writer for the weight, None when it is not to be stored; ``reference``: a place that may have its bytes."""
        self.tick()
        need = 0 if reference else key[1] + _SEAL_BYTES
        if not self.storing or self._closed or key[1] <= 0 or need > self.max_bytes:
            return None
        with self._lock:
            if key in self._incoming:
                return None
            self._incoming[key] = need
        try:
            return Writer(self, key, reference)
        except _NoRoom:
            self.finished(key)
            return None
        except OSError as error:
            self.stop_storing(error)
            self.finished(key)
            return None

    def flush(self) -> None:
        """Wait until every weight that was committed is on disk or was refused."""
        self._jobs.join()

    def close(self, timeout_s: float) -> None:
        """Publish what has been committed, for ``timeout_s`` at most, and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closed = True
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout_s)

    def submit(self, writer: Writer) -> None:
        """Hand a whole weight to the publishing thread; waits when that is far behind."""
        with self._lock:
            closed = self._closed
            if self._thread is None and not closed:
                self._thread = threading.Thread(target=self._run, name="weight-store", daemon=True)
                self._thread.start()
        if closed:
            writer.release()
        else:
            self._jobs.put(writer)

    def finished(self, key: Key, stored: int = 0, referenced: int = 0) -> None:
        with self._lock:
            self._incoming.pop(key, None)
            self.stored += stored
            self.referenced += referenced

    def stop_storing(self, error: OSError) -> None:
        """The disk refused: nothing more is stored, and that is said once."""
        with self._lock:
            first, self.storing = self.storing, False
        if first:
            self._log.warning(
                "weight cache: nothing more is stored in %s (%s); what is there is still served", self.directory, error
            )

    def temporary(self, size_bytes: int) -> tuple[int, Path]:
        """A new file, locked by its descriptor, with room made for ``size_bytes``. Raises: OSError."""
        with _locked(self.directory):
            with self._lock:
                expected = sum(self._incoming.values())
            if not self._make_room(max(expected, size_bytes)):
                raise _NoRoom
            disk = os.statvfs(self.directory)
            if disk.f_bavail * disk.f_frsize < size_bytes + self._reserve_bytes:
                wanted = (size_bytes + self._reserve_bytes) >> 20
                raise OSError(errno.ENOSPC, f"less than {wanted} MiB of the disk are free")
            path = self.directory / f"{_TEMPORARY}{os.getpid()}-{next(self._serial)}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor, path

    def _run(self) -> None:
        while True:
            writer = self._jobs.get()
            try:
                if writer is None:
                    return
                self._publish(writer)
            except _NoRoom:
                pass
            except CorruptWeight as error:
                self._log.warning("weight cache: not stored: %s", error)
            except OSError as error:
                self.stop_storing(error)
            finally:
                if writer is not None:
                    writer.release()
                self._jobs.task_done()

    def _publish(self, writer: Writer) -> None:
        fnv, size = writer.key
        tail = writer.finish()
        _write_all(writer.descriptor, memoryview(tail))
        os.fsync(writer.descriptor)
        with _locked(self.directory):
            if not self._make_room(os.fstat(writer.descriptor).st_size):
                raise _NoRoom
            assert writer.path is not None
            mark_used(writer.path)
            os.replace(writer.path, self.directory / entry_name(fnv, size))
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.finished(writer.key, stored=writer.reference is None, referenced=writer.reference is not None)

    def _make_room(self, need_bytes: int) -> bool:
        """Evict until ``need_bytes`` more fit; False when only what this load has used is left. Holds the lock file."""
        entries = list_entries(self.directory)
        total = sum(entry.stored_bytes for entry in entries)
        for entry in entries:
            if total + need_bytes <= self.max_bytes:
                return True
            if entry.used_ns >= self._load_began_ns:
                return False
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
                self.evicted += 1
            total -= entry.stored_bytes
        return total + need_bytes <= self.max_bytes


class _NoRoom(Exception):
    """The cache is full of what the load now running needs."""


class Writer:
    """Takes one weight piece by piece as it arrives; ``commit`` offers it to the store, ``abort`` forgets it.

    Never raises for the disk's sake: a weight that cannot be stored is simply not stored. Used by one thread at a time.
    """

    def __init__(self, store: Store, key: Key, reference: tuple[Path, int] | None) -> None:
        self.key = key
        self.reference = reference
        self.descriptor = -1
        self.path: Path | None = None
        self._store = store
        self._written = 0
        self._open = True
        self._model = -1
        if reference is None:
            self.descriptor, self.path = store.temporary(key[1] + _SEAL_BYTES)
        else:
            self._model = os.open(reference[0], os.O_RDONLY | os.O_CLOEXEC)

    def write(self, piece: memoryview) -> None:
        """The next bytes, in order."""
        if not self._open:
            return
        if self._written + len(piece) > self.key[1]:
            self.abort()
            return
        self._store.tick()
        try:
            if self.reference is not None and not self._equals_model(self.reference, piece):
                self._leave_reference(self.reference)
            if self.reference is None:
                _write_all(self.descriptor, piece)
            self._written += len(piece)
        except _NoRoom:
            self.abort()
        except OSError as error:
            self._store.stop_storing(error)
            self.abort()

    def commit(self) -> None:
        """All bytes are here: checksum and publish them, in the store's thread. A short weight is dropped."""
        if not self._open:
            return
        if self._written != self.key[1]:
            self.abort()
            return
        self._open = False
        self._store.submit(self)

    def abort(self) -> None:
        """Forget the weight; safe at any time."""
        if self._open:
            self._open = False
            self.release()

    def finish(self) -> bytes:
        """What is still to be written behind the data: digests and trailer, for a reference its body too.

        Raises: CorruptWeight when the bytes cannot be read back, OSError.
        """
        fnv, size = self.key
        if self.reference is None:
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            digests = digests_of(lambda view: os.readv(self.descriptor, [view]), size)
            return seal(fnv, size, size, digests)
        os.lseek(self._model, self.reference[1], os.SEEK_SET)
        digests = digests_of(lambda view: os.readv(self._model, [view]), size)
        body = reference_body(*self.reference, os.fstat(self._model))
        self.descriptor, self.path = self._store.temporary(len(body) + _SEAL_BYTES)
        return body + seal(fnv, size, len(body), digests, body)

    def release(self) -> None:
        """Close the files; a temporary one that was not published goes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self._model >= 0:
            os.close(self._model)
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.descriptor = self._model = -1
        self.path = None
        self._store.finished(self.key)

    def _equals_model(self, reference: tuple[Path, int], piece: memoryview) -> bool:
        ours = os.pread(self._model, len(piece), reference[1] + self._written)
        return bool(np.array_equal(np.frombuffer(piece, np.uint8), np.frombuffer(ours, np.uint8)))

    def _leave_reference(self, reference: tuple[Path, int]) -> None:
        """The local file differs from here on: copy from it what was equal, and store the rest as it comes."""
        if self.key[1] + _SEAL_BYTES > self._store.max_bytes:
            raise _NoRoom
        self.descriptor, self.path = self._store.temporary(self.key[1] + _SEAL_BYTES)
        done = 0
        while done < self._written:
            chunk = os.pread(self._model, min(_COPY_BYTES, self._written - done), reference[1] + done)
            if not chunk:
                raise _NoRoom  # the model file was cut short meanwhile; not the cache's disk
            _write_all(self.descriptor, memoryview(chunk))
            done += len(chunk)
        self.reference = None


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    """Remove temporary files that nobody writes any more. Holds the lock file."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
