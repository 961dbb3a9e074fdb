"""Weights that the box has in a model file of its own: found by name, type and shape; trusted where bytes are equal."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from hydra.errors import ModelError
from hydra.peer.weights import TensorKey, WeightCache, list_entries
from hydra.peer.weights_gguf import index
from tests.test_peer_weights import fetch, store

F32 = 0
SHAPE = (64, 3000)  # numpy order; ne is the other way round


def tensor(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


def write_model(path: Path, tensors: dict[str, np.ndarray], alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("some.number", 5)
    writer.add_bool("some.flag", True)
    writer.add_float64("some.double", 0.5)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.nested", [[1, 2], [3]])
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def key_of(name: str, offset: int = 0, kind: int = F32, shape: tuple[int, ...] = SHAPE) -> TensorKey:
    return TensorKey(name, kind, (*reversed(shape), 1, 1), offset)


def open_cache(tmp_path: Path, max_bytes: int = 1 << 30) -> WeightCache:
    return WeightCache(tmp_path / "cache", max_bytes, model_path=tmp_path / "model.gguf", reserve_bytes=0)


@pytest.mark.parametrize("alignment", [None, 256])
def test_the_index_agrees_with_ggufs_own_reader(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, {"a": tensor(1), "b": tensor(2, (5,)), "c": tensor(3, (2, 3, 4, 5))}, alignment)
    places = index(path)
    theirs = gguf.GGUFReader(str(path)).tensors
    assert len(places) == len(theirs) == 3
    for entry in theirs:
        place = places[entry.name]
        assert place.offset == entry.data_offset and place.type == int(entry.tensor_type)
        assert place.ne == (*(int(n) for n in entry.shape), *(1,) * (4 - len(entry.shape)))


def test_files_in_parts_count_as_one(tmp_path: Path) -> None:
    for part, name in ((1, "a"), (2, "b")):
        write_model(tmp_path / f"m-{part:05d}-of-00002.gguf", {name: tensor(part)})
    places = index(tmp_path / "m-00001-of-00002.gguf")
    assert {name: place.path.name for name, place in places.items()} == {
        "a": "m-00001-of-00002.gguf",
        "b": "m-00002-of-00002.gguf",
    }


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", {"a": tensor()})
    whole = (tmp_path / "model.gguf").read_bytes()
    for content in (b"", b"GGUF", b"ELF" + bytes(100), whole[:60], whole[:150], b"GGUF\3\0\0\0" + b"\xff" * 400):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=r"peer\.model_path"):
            index(tmp_path / "bad.gguf")
    with pytest.raises(ModelError):
        index(tmp_path / "absent.gguf")


def test_equal_bytes_are_referred_to_and_not_copied(tmp_path: Path) -> None:
    data = tensor(1).tobytes()
    write_model(tmp_path / "model.gguf", {"a": tensor(0), "b": tensor(1)})
    with open_cache(tmp_path, max_bytes=10_000) as cache:  # a copy would not even fit
        assert store(cache, 7, data, key_of("b"), piece=100_000)
        assert cache.counters.referenced == 1 and cache.counters.stored == 0
        assert fetch(cache, 7, len(data)) == data
    (entry,) = list_entries(tmp_path / "cache")
    assert entry.size_bytes == len(data) and entry.stored_bytes < 1000
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, len(data)) == data


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", {"a": tensor(0)})
    part = tensor(0).tobytes()[1000:90_001]
    with open_cache(tmp_path) as cache:
        store(cache, 7, part, key_of("a", offset=1000))
        assert cache.counters.referenced == 1
        assert fetch(cache, 7, len(part)) == part


@pytest.mark.parametrize("differs_at", [0, 400_000, 767_999])
def test_other_bytes_are_stored_as_they_came(tmp_path: Path, differs_at: int) -> None:
    write_model(tmp_path / "model.gguf", {"a": tensor(0)})
    data = bytearray(tensor(0).tobytes())
    data[differs_at] ^= 1
    with open_cache(tmp_path) as cache:
        assert store(cache, 7, bytes(data), key_of("a"), piece=100_000)
        assert cache.counters.referenced == 0 and cache.counters.stored == 1
        assert fetch(cache, 7, len(data)) == bytes(data)


def test_another_name_type_or_shape_is_not_compared(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", {"a": tensor(0)})
    data = tensor(0).tobytes()
    with open_cache(tmp_path) as cache:
        for fnv, key in enumerate(
            (key_of("x"), key_of("a", kind=1), key_of("a", shape=(3000, 64)), key_of("a", offset=64))
        ):
            store(cache, fnv, data, key)
        assert cache.counters.referenced == 0


def test_a_model_file_that_has_changed_is_not_served(tmp_path: Path) -> None:
    data = tensor(0).tobytes()
    model = tmp_path / "model.gguf"
    write_model(model, {"a": tensor(0)})
    offset = index(model)["a"].offset
    with open_cache(tmp_path) as cache:
        store(cache, 7, data, key_of("a"))
    status = model.stat()
    with open(model, "r+b") as file:
        file.seek(offset + 5)
        file.write(b"\0\0\0\0")
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, len(data)) is None  # by its time
    write_model(model, {"a": tensor(0)})
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    with open_cache(tmp_path) as cache:
        store(cache, 7, data, key_of("a"))
    with open(model, "r+b") as file:
        file.seek(offset + 5)
        file.write(b"\0\0\0\0")
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    with open_cache(tmp_path) as cache:
        assert fetch(cache, 7, len(data)) is None  # by its bytes, though size and time are the same
        assert cache.counters.corrupt == 1


def test_a_model_file_that_has_gone(tmp_path: Path) -> None:
    data = tensor(0).tobytes()
    write_model(tmp_path / "model.gguf", {"a": tensor(0)})
    with open_cache(tmp_path) as cache:
        store(cache, 7, data, key_of("a"))
        (tmp_path / "model.gguf").unlink()
        assert fetch(cache, 7, len(data)) is None
        assert cache.begin(8, len(data), key_of("a")) is not None  # stored as a copy instead
