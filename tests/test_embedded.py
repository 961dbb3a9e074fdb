"""hydra/embedded.py, with a small stand-in for the package: whole, once, checked, and its notice shown once."""

from __future__ import annotations

import hashlib
import sys
import types
from typing import Any

import pytest

from hydra import embedded
from hydra.errors import ModelError


@pytest.fixture
def package(tmp_path, monkeypatch):
    parts = []
    for index, content in enumerate((b"GGUF", b"one", b"two")):
        part = tmp_path / f"part{index}"
        part.write_bytes(content)
        parts.append(part)
    fake: Any = types.ModuleType(embedded.PACKAGE)
    fake.__file__ = str(tmp_path / "__init__.py")
    fake.MODEL_NAME = "small.gguf"
    fake.EXPECTED_SHA256 = hashlib.sha256(b"GGUFonetwo").hexdigest()
    fake.chunk_paths = lambda: parts
    monkeypatch.setitem(sys.modules, embedded.PACKAGE, fake)
    return fake


def test_assembled_once_and_notice_once(package, tmp_path):
    first = embedded.embedded_model(tmp_path / "cache")
    assert first.path.read_bytes() == b"GGUFonetwo"
    assert "Gemma Terms of Use" in first.notice and "GEMMA_TERMS.html" in first.notice
    stamp = first.path.stat().st_mtime_ns
    again = embedded.embedded_model(tmp_path / "cache")
    assert again.notice == "" and again.path.stat().st_mtime_ns == stamp
    assert [p.name for p in first.path.parent.iterdir() if p.name.startswith(".")] == []


def test_a_truncated_copy_is_replaced(package, tmp_path):
    path = embedded.embedded_model(tmp_path / "cache").path
    path.write_bytes(b"GGUF")
    assert embedded.embedded_model(tmp_path / "cache").path.read_bytes() == b"GGUFonetwo"


def test_damage_and_absence_are_told(package, tmp_path, monkeypatch):
    package.EXPECTED_SHA256 = "0" * 64
    with pytest.raises(ModelError, match="checksum"):
        embedded.embedded_model(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    (tmp_path / "part1").unlink()
    with pytest.raises(ModelError, match="cannot be put together"):
        embedded.embedded_model(tmp_path / "cache")
    monkeypatch.setitem(sys.modules, embedded.PACKAGE, None)
    with pytest.raises(ModelError, match="not installed"):
        embedded.embedded_model(tmp_path / "cache")


def test_cache_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    assert str(embedded.cache_home({})) == "/home/u/.cache/hydra"
    assert str(embedded.cache_home({"XDG_CACHE_HOME": "/c"})) == "/c/hydra"
    assert str(embedded.cache_home({"XDG_CACHE_HOME": "rel"})) == "/home/u/.cache/hydra"
