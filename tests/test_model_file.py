"""hydra/model_file.py: layers, MTP blocks and size from a GGUF header, and clear errors for what is none."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hydra.errors import ModelError
from hydra.model_file import parts_of, read_model_file


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        body = b"".join(map(text, value)) if isinstance(value[0], str) else struct.pack(f"<{len(value)}i", *value)
        return text(key) + struct.pack("<IIQ", 9, 8 if isinstance(value[0], str) else 5, len(value)) + body
    return text(key) + struct.pack("<II", 4, value)


def gguf(tmp_path: Path, name: str = "m.gguf", **values) -> Path:
    entries = {key.replace("__", "."): value for key, value in values.items()}
    path = tmp_path / name
    body = b"".join(entry(key, value) for key, value in entries.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(entries)) + body)
    return path


def test_header(tmp_path):
    got = read_model_file(gguf(tmp_path, general__architecture="qwen35", tokenizer__tokens=["a", "bc"], x__ids=[1, 2],
                               qwen35__block_count=65, qwen35__nextn_predict_layers=1, qwen35__context_length=262144))
    assert (got.architecture, got.n_layer, got.n_nextn, got.context_length, got.name) == ("qwen35", 64, 1, 262144, "m")
    assert got.size_bytes == got.path.stat().st_size


def test_parts(tmp_path):
    first = gguf(tmp_path, "m-00001-of-00002.gguf", general__architecture="a", a__block_count=2)
    assert [p.name for p in parts_of(first)] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf does not exist"):
        read_model_file(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"12345")
    assert read_model_file(first).size_bytes == first.stat().st_size + 5


@pytest.mark.parametrize(("data", "words"), [
    (b"", "it ends at byte 0"),
    (b"PK\x03\x04" + bytes(40), "not GGUF"),
    (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "format version is 9"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "it claims"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 60), "a text of"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("k") + struct.pack("<I", 77), "unknown type 77"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "without general.architecture"),
])
def test_faults(tmp_path, data, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_model_file(path)
    assert words in caught.value.message and caught.value.hint


def test_missing(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_model_file(tmp_path / "none.gguf")
