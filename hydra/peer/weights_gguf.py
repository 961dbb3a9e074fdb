"""Where the tensors of a local GGUF lie, so that a weight that is already on this box need not be stored again.

Reads names, shapes, types and offsets, never data; skips the metadata values unread. Files split in parts
(``…-00001-of-00003.gguf``) count as one. Knows nothing of caching. Our own reader because gguf's builds an object for
each vocabulary entry, seconds for a large model, where a peer wants a table of a few hundred tensors.

Source: the GGUF specification (docs/gguf.md of ggml), version 3; gguf/gguf_reader.py.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hydra.errors import ModelError

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LIMIT = 1 << 24  # entries of anything: more means that the file is not what it says


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's shape (ggml order), ggml type number, and its bytes' absolute offset in ``path``."""

    path: Path
    offset: int
    ne: tuple[int, ...]
    type: int


def index(model_path: Path) -> dict[str, TensorPlace]:
    """Every tensor of ``model_path`` and its sibling parts by name.

    Raises: ModelError when a file is no GGUF of version 2 or 3, or cannot be read.
    """
    places: dict[str, TensorPlace] = {}
    for path in _parts(model_path):
        try:
            with open(path, "rb") as file:
                places.update(_read(path, file))
        except (OSError, struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}.", "Check peer.model_path.") from error
    return places


def _parts(model_path: Path) -> list[Path]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", model_path.name)
    if not match:
        return [model_path]
    count = int(match[2])
    return [model_path.with_name(f"{match[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _read(path: Path, file: BinaryIO) -> dict[str, TensorPlace]:
    magic, version, n_tensors, n_values = struct.unpack("<4sIQQ", _take(file, 24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ModelError(f"{path} is no GGUF file of version 2 or 3.", "Check peer.model_path.")
    if n_tensors > _LIMIT or n_values > _LIMIT:
        raise ModelError(f"{path} claims {n_tensors} tensors and {n_values} values.", "Check peer.model_path.")
    alignment = 32
    for _ in range(n_values):
        key = _string(file)
        (kind,) = struct.unpack("<I", _take(file, 4))
        if key == "general.alignment" and kind == _UINT32:
            (alignment,) = struct.unpack("<I", _take(file, 4))
        else:
            _skip(path, file, kind)
    entries = []
    for _ in range(n_tensors):
        name = _string(file)
        (n_dims,) = struct.unpack("<I", _take(file, 4))
        if n_dims > 4:
            raise ModelError(f"{path}: tensor {name} has {n_dims} dimensions.", "Check peer.model_path.")
        ne = struct.unpack(f"<{n_dims}Q", _take(file, 8 * n_dims))
        kind, offset = struct.unpack("<IQ", _take(file, 12))
        entries.append((name, ne + (1,) * (4 - n_dims), kind, offset))
    if not alignment:
        raise ModelError(f"{path}: general.alignment is 0.", "Check peer.model_path.")
    data = -(-file.tell() // alignment) * alignment
    return {name: TensorPlace(path, data + offset, ne, kind) for name, ne, kind, offset in entries}


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise OSError(f"it ends at byte {file.tell()}")
    return data


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _take(file, 8))
    if length > _LIMIT:
        raise OSError(f"a string of {length} bytes")
    return _take(file, length).decode()


def _skip(path: Path, file: BinaryIO, kind: int, depth: int = 0) -> None:
    if kind in _SCALAR_BYTES:
        file.seek(_SCALAR_BYTES[kind], 1)
    elif kind == _STRING:
        file.seek(struct.unpack("<Q", _take(file, 8))[0], 1)
    elif kind == _ARRAY and depth < 4:
        item, count = struct.unpack("<IQ", _take(file, 12))
        if item in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[item] * count, 1)
        elif count > _LIMIT:
            raise ModelError(f"{path}: an array of {count} values.", "Check peer.model_path.")
        else:
            for _ in range(count):
                _skip(path, file, item, depth + 1)
    else:
        raise ModelError(f"{path}: a metadata value of type {kind}.", "Check peer.model_path.")
