"""One cached weight on disk: its file format, its checksum, and how it is read without growing the process.

    body | digests (16 bytes for each piece of 4 MiB) | trailer

The body is the weight itself, or, in a reference, a JSON object that says where in a local GGUF the bytes lie. All of
it is in one file so that one rename publishes it whole; the lengths in the trailer must add up to the file's size, so
a truncated file is seen without reading it, and the digests show anything else. The client's fnv1a-64 is only the
name under which an entry is found: it is too weak to vouch for the content, and is never computed here.

Knows nothing of eviction, of clients or of devices. Digests are BLAKE2b or SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.errors import HydraError

PIECE_BYTES = 4 << 20
_MAGIC_DATA, _MAGIC_REFERENCE = b"HYDRAWT1", b"HYDRAWR1"
_DIGEST_BYTES = 16
# magic 8s | fnv1a-64 u64 | data size u64 | body size u64 | piece size u32 | pieces u32 | algorithm u32 | root 32s
_TRAILER = struct.Struct("<8sQQQIII32s")
_REFERENCE_LIMIT = 64 << 10


class CorruptWeight(HydraError):
    """A cache entry whose file is not what was stored."""


def entry_name(fnv: int, size_bytes: int) -> str:
    """File name of the entry for the client's hash and the weight's size."""
    return f"{fnv:016x}-{size_bytes:x}.weight"


def parse_entry_name(name: str) -> tuple[int, int] | None:
    """(hash, size in bytes) of an entry's file name, None for any other file."""
    stem, dot, suffix = name.partition(".")
    fnv, dash, size = stem.partition("-")
    if suffix != "weight" or not dot or not dash or len(fnv) != 16:
        return None
    try:
        return int(fnv, 16), int(size, 16)
    except ValueError:
        return None


def _blake2b(piece: memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest()


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()[:_DIGEST_BYTES]


# Both let other threads run while they compute, and both are read everywhere; see ``algorithm``.
_ALGORITHMS: dict[int, Callable[[memoryview], bytes]] = {1: _blake2b, 2: _sha256}


@lru_cache(maxsize=1)
def algorithm() -> int:
    """The faster of the two here: SHA-256 at 1.7 GB/s where the processor has it, BLAKE2b at 0.9 GB/s where not."""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
        if "sha_ni" in flags or "sha2" in flags:
            return 2
    return 1


def seal(fnv: int, size_bytes: int, body_bytes: int, digests: list[bytes], reference: bytes = b"") -> bytes:
    """What follows the body of an entry: digests and trailer. ``reference`` is the body itself when it is one."""
    table = b"".join(digests)
    kind = algorithm()
    root = _root(fnv, size_bytes, body_bytes, kind, table, reference)
    magic = _MAGIC_REFERENCE if reference else _MAGIC_DATA
    return table + _TRAILER.pack(magic, fnv, size_bytes, body_bytes, PIECE_BYTES, len(digests), kind, root)


def reference_body(path: Path, offset: int, status: os.stat_result) -> bytes:
    """The body of an entry whose bytes are ``path``'s from ``offset`` on."""
    fields = {"path": str(path), "offset": offset, "file_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return json.dumps(fields).encode()


def _root(fnv: int, size_bytes: int, body_bytes: int, kind: int, table: bytes, reference: bytes) -> bytes:
    header = struct.pack("<QQQII", fnv, size_bytes, body_bytes, PIECE_BYTES, kind)
    return hashlib.blake2b(header + reference + table, digest_size=32).digest()


class WeightFile:
    """An open entry, mapped read-only. One owner: ``close()`` or ``with``.

    Opening checks the lengths and the trailer; ``verify`` checks every byte. ``identity`` changes when the entry was
    stored anew, so that a verification can be remembered.

    Raises: CorruptWeight when the file is not a whole entry for ``fnv`` (or a reference to bytes that have changed),
    FileNotFoundError when there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            self.fnv, self.size_bytes, kind, self._digests, root, reference = _read_seal(path, file, status.st_size)
            self._digest = _ALGORITHMS[kind]
            self.is_reference = bool(reference)
            self.source = path
            if reference:
                self.source, start = _resolve(path, reference, self.size_bytes)
                with contextlib.ExitStack() as stack:
                    try:
                        target = stack.enter_context(open(self.source, "rb"))
                    except OSError as error:
                        raise CorruptWeight(f"{path.name}: {self.source} cannot be read ({error}).") from error
                    self._mapping, self._start = _map(target.fileno(), start, self.size_bytes)
            else:
                self._mapping, self._start = _map(file.fileno(), 0, self.size_bytes)
        self.identity = (status.st_ino, root)
        self.stored_bytes = status.st_size

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The weight's bytes in order. A piece must be used up before the next is taken: its pages leave this process
        then.

        That keeps resident memory at one piece instead of one weight; the pages stay in the page cache.
        """
        page = mmap.ALLOCATIONGRANULARITY
        with memoryview(self._mapping) as whole:
            for begin in range(0, self.size_bytes, piece_bytes):
                end = min(begin + piece_bytes, self.size_bytes)
                low = (self._start + begin) // page * page
                high = self._start + end
                self._mapping.madvise(mmap.MADV_WILLNEED, low, high - low)
                yield whole[self._start + begin : high]
                self._mapping.madvise(mmap.MADV_DONTNEED, low, high - low)

    def verify(self) -> None:
        """Read the whole entry. Raises: CorruptWeight at the first piece that is not what was stored."""
        for index, piece in enumerate(self.pieces()):
            if self._digest(piece) != self._digests[index]:
                raise CorruptWeight(f"{self.path.name}: piece {index} of {len(self._digests)} is not what was stored.")

    def close(self) -> None:
        # A view that the caller still holds keeps the mapping; it goes with the view then.
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digests_of(read_into: Callable[[memoryview], int], size_bytes: int) -> list[bytes]:
    """Digests of ``size_bytes`` that ``read_into`` delivers. Raises: CorruptWeight when they end early."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
    compute, result = _ALGORITHMS[algorithm()], []
    for begin in range(0, size_bytes, PIECE_BYTES):
        view, got = buffer[: min(PIECE_BYTES, size_bytes - begin)], 0
        while got < len(view):
            count = read_into(view[got:])
            if count <= 0:
                raise CorruptWeight(f"{begin + got} of {size_bytes} bytes could be read back.")
            got += count
        result.append(compute(view))
    return result


def _read_seal(path: Path, file: Any, file_bytes: int) -> tuple[int, int, int, list[bytes], bytes, bytes]:
    if file_bytes < _TRAILER.size:
        raise CorruptWeight(f"{path.name}: {file_bytes} bytes are too few for an entry.")
    file.seek(file_bytes - _TRAILER.size)
    magic, fnv, size, body, piece, count, kind, root = _TRAILER.unpack(file.read(_TRAILER.size))
    if (
        magic not in (_MAGIC_DATA, _MAGIC_REFERENCE)
        or piece != PIECE_BYTES
        or count != -(-size // PIECE_BYTES)
        or kind not in _ALGORITHMS
    ):
        raise CorruptWeight(f"{path.name}: the end of the file is not an entry's.")
    if body + count * _DIGEST_BYTES + _TRAILER.size != file_bytes:
        raise CorruptWeight(f"{path.name}: {file_bytes} bytes, and its parts do not add up to that.")
    if (fnv, size) != parse_entry_name(path.name):
        raise CorruptWeight(f"{path.name}: the file is that of another entry.")
    file.seek(body)
    table = file.read(count * _DIGEST_BYTES)
    reference = b""
    if magic == _MAGIC_REFERENCE and 0 < body <= _REFERENCE_LIMIT:
        file.seek(0)
        reference = file.read(body)
    elif magic == _MAGIC_REFERENCE or body != size or size == 0:
        raise CorruptWeight(f"{path.name}: a body of {body} bytes for a weight of {size}.")
    if root != _root(fnv, size, body, kind, table, reference):
        raise CorruptWeight(f"{path.name}: its table of checksums is damaged.")
    digests = [table[i : i + _DIGEST_BYTES] for i in range(0, len(table), _DIGEST_BYTES)]
    return fnv, size, kind, digests, root, reference


def _resolve(path: Path, reference: bytes, size_bytes: int) -> tuple[Path, int]:
    try:
        fields = json.loads(reference)
        source, offset = Path(fields["path"]), int(fields["offset"])
        status = os.stat(source)
        unchanged = (status.st_size, status.st_mtime_ns) == (fields["file_bytes"], fields["mtime_ns"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptWeight(f"{path.name}: not a readable reference.") from error
    except OSError as error:
        raise CorruptWeight(f"{path.name}: the file that it refers to is gone ({error}).") from error
    if not unchanged or offset < 0 or offset + size_bytes > status.st_size:
        raise CorruptWeight(f"{path.name}: {source} has changed since the reference was made.")
    return source, offset


def _map(descriptor: int, offset: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    # mmap offsets must be a multiple of the granularity; the rest is skipped inside the mapping.
    base = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    start = offset - base
    return mmap.mmap(descriptor, start + size_bytes, access=mmap.ACCESS_READ, offset=base), start
