"""A GGUF's header as planning needs it: metadata with short arrays, and every tensor's name, shape, type and place.

Knows nothing of architectures. hydra/model_file.py reads less, for less; this one also walks the tensor table.
Source: docs/gguf.md of ggml (version 3); type sizes from ggml-common.h of the pinned llama.cpp.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import ModelError
from hydra.model_file import parts_of

# Type number → weights in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_K", 256, 84), 11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144), 13: ("q5_K", 256, 176), 14: ("q6_K", 256, 210), 15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18), 42: ("q2_0", 64, 18),
}  # fmt: skip
BY_NAME = {name: number for number, (name, _, _) in TYPES.items()}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_KEEP = 4096  # elements: longer arrays are vocabularies, of which only the length is kept
_MOST = 1 << 26


def row_bytes(kind: str, count: int) -> int:
    """Bytes of ``count`` weights of a type, by name."""
    _, per_block, size = TYPES[BY_NAME[kind]]
    return -(-count // per_block) * size


@dataclass(frozen=True)
class Tensor:
    """shape: as ggml has it, row length first. part, offset: which file, and where in it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    part: int
    offset: int

    @property
    def n_bytes(self) -> int:
        _, per_block, size = TYPES[self.kind]
        count = 1
        for dim in self.shape:
            count *= dim
        return count // per_block * size


@dataclass(frozen=True)
class Header:
    """Metadata by key (an array longer than 4,096 is its length), and the tensors of all parts by name."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    file_bytes: int


def read_header(path: str | Path) -> Header:
    """Read the header of a model, all parts of it. Raises: ModelError."""
    path = Path(path)
    meta: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    total = 0
    for index, part in enumerate(parts_of(path)):
        try:
            with part.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found, listed = _Reader(data).read(index)
                total += len(data)
        except OSError as exc:
            raise ModelError(f"The model file {part} cannot be read: {exc.strerror}.",
                             "Correct [model] path in hydra.toml (it counts from the place of that file).") from exc
        except (ValueError, struct.error, KeyError) as exc:
            raise ModelError(f"{part} is not a usable GGUF file: {exc}.",
                             "Fetch it again, or convert it to GGUF.") from exc
        meta = {**found, **meta}
        tensors.update(listed)
    return Header(path, meta, tensors, total)


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def read(self, part: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        magic, version, n_tensors, n_values = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, not GGUF")
        if version not in (2, 3):
            raise ValueError(f"its format version is {version}, not 2 or 3")
        if n_tensors > _MOST or n_values > _MOST:
            raise ValueError(f"it claims {n_tensors} tensors and {n_values} values")
        meta = {}
        for _ in range(n_values):
            key = self._text()
            meta[key] = self._value(self._unpack("<I")[0])
        raw = [self._tensor() for _ in range(n_tensors)]
        align = int(meta.get("general.alignment", 32))
        start = -(-self.at // align) * align
        tensors = {}
        for name, shape, kind, offset in raw:
            if kind not in TYPES:
                raise ValueError(f"tensor {name} has the unknown type {kind}")
            tensor = Tensor(name, shape, kind, part, start + offset)
            if tensor.offset + tensor.n_bytes > len(self.data):
                raise ValueError(f"tensor {name} ends beyond the file: it is not complete")
            tensors[name] = tensor
        return meta, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (n_dims,) = self._unpack("<I")
        if n_dims > 4:
            raise ValueError(f"tensor {name} has {n_dims} dimensions")
        shape = self._unpack(f"<{n_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        inner, count = self._unpack("<IQ")
        if count > _MOST:
            raise ValueError(f"an array of {count} values")
        if inner in _SCALARS:
            if count <= _KEEP:
                return list(self._unpack(f"<{count}{_SCALARS[inner]}"))
            self.at += struct.calcsize("<" + _SCALARS[inner]) * count
            return count
        if inner != _TEXT:
            raise ValueError(f"an array of the unknown type {inner}")
        size = struct.Struct("<Q")
        for _ in range(count):
            (length,) = size.unpack_from(self.data, self.at)
            self.at += 8 + length
            if self.at > len(self.data):
                raise ValueError("a text beyond the end of the file")
        return count

    def _text(self) -> str:
        (size,) = self._unpack("<Q")
        if size > _MOST or self.at + size > len(self.data):
            raise ValueError(f"a text of {size} bytes")
        self.at += size
        return self.data[self.at - size:self.at].decode("utf-8", "replace")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values
