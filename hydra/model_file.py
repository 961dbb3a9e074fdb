"""What a GGUF file says about itself, read from its first pages: architecture, layers, MTP blocks, size.

Knows nothing of tensors or llama.cpp. Our own reader, because the split is checked before anything heavy is imported
and gguf's GGUFReader builds an object for each of a vocabulary's entries.

Source: docs/gguf.md of ggml (version 3); src/llama-model.cpp and src/llama-hparams.cpp of the pinned llama.cpp
(`block_count` counts the MTP blocks, `nextn_predict_layers` says how many they are).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ModelError

# GGUF value type → struct format of one value; 8 is a text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 26  # entries or bytes in one value: more means that the file is damaged


@dataclass(frozen=True)
class ModelFile:
    """`n_layer` without the `n_nextn` MTP blocks; `size_bytes` of all parts together."""

    path: Path
    architecture: str
    name: str
    n_layer: int
    n_nextn: int
    context_length: int
    size_bytes: int


def read_model_file(path: str | Path) -> ModelFile:
    """Read the header. Raises: ModelError where the file is missing, damaged, or no language model."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            values = _metadata(file)
        size = sum(part.stat().st_size for part in parts_of(path))
    except FileNotFoundError as error:
        raise ModelError(f"The model file {error.filename} does not exist.",
                         "Correct [model] path in hydra.toml (it counts from the place of that file).") from error
    except OSError as error:
        raise ModelError(f"The model file {path} cannot be read: {error.strerror}.",
                         "Check its permissions.") from error
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a usable GGUF file: {error}.",
                         "Fetch it again, or convert it to GGUF.") from error
    architecture = str(values.get("general.architecture", ""))
    blocks = values.get(f"{architecture}.block_count")
    if not isinstance(blocks, int):
        raise ModelError(f"{path} is a GGUF file without {architecture or 'general.architecture'}.block_count.",
                         "It is not a language model (a projector or an adapter, perhaps).")
    nextn = int(values.get(f"{architecture}.nextn_predict_layers", 0))
    return ModelFile(path, architecture, str(values.get("general.name", path.stem)), blocks - nextn, nextn,
                     int(values.get(f"{architecture}.context_length", 0)), size)


def parts_of(path: Path) -> list[Path]:
    """All files of a model that is split as llama.cpp splits them (`x-00001-of-00003.gguf`), else just the one."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    return [path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, int(match[3]) + 1)]


def _metadata(file: BinaryIO) -> dict[str, Any]:
    """Scalars and texts by key; arrays are passed over."""
    magic, version, _, count = struct.unpack("<4sIQQ", _take(file, 24))
    if magic != b"GGUF":
        raise ValueError(f"it starts with {magic!r}, not GGUF")
    if version not in (2, 3):
        raise ValueError(f"its format version is {version}, not 2 or 3")
    if count > _MOST:
        raise ValueError(f"it claims {count} values")
    values: dict[str, Any] = {}
    for _ in range(count):
        key = _text(file)
        (kind,) = struct.unpack("<I", _take(file, 4))
        if kind == _ARRAY:
            _skip_array(file)
        elif kind == _TEXT:
            values[key] = _text(file)
        elif kind in _SCALARS:
            form = "<" + _SCALARS[kind]
            (values[key],) = struct.unpack(form, _take(file, struct.calcsize(form)))
        else:
            raise ValueError(f"{key} has the unknown type {kind}")
    return values


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"it ends at byte {file.tell()}")
    return data


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", _take(file, 8))
    if size > _MOST:
        raise ValueError(f"a text of {size} bytes")
    return _take(file, size).decode("utf-8", "replace")


def _skip_array(file: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", _take(file, 12))
    if count > _MOST:
        raise ValueError(f"an array of {count} values")
    if kind in _SCALARS:
        file.seek(struct.calcsize("<" + _SCALARS[kind]) * count, 1)
    elif kind == _TEXT:
        for _ in range(count):
            (size,) = struct.unpack("<Q", _take(file, 8))
            if size > _MOST:
                raise ValueError(f"a text of {size} bytes")
            file.seek(size, 1)
    else:
        raise ValueError(f"an array of the unknown type {kind}")
