"""Is the llama-cpp-python of this environment the one that hydra needs? Exit status 0 if so, else one line says why.

    python check_llama.py VERSION cpu|cuda

Imports llama_cpp as a user of it would, so a library that cannot be loaded is found here and not at the first run.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path


def problem(version: str, backend: str) -> str | None:
    try:
        found = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return "llama-cpp-python is not installed"
    if found != version:
        return f"llama-cpp-python is {found}, hydra needs exactly {version}"
    located = importlib.metadata.distribution("llama-cpp-python").locate_file("llama_cpp/lib")
    libraries = Path(str(located))
    if backend == "cuda":
        if not (libraries / "libggml-cuda.so").exists():
            return "llama-cpp-python was built without GGML_CUDA"
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            # Built for another machine's GPU: without the driver the library cannot be loaded, so its files must do.
            has_rpc = (libraries / "libggml-rpc.so").exists()
            return None if has_rpc else "llama-cpp-python was built without GGML_RPC"
    try:
        import llama_cpp
    except Exception as error:
        return f"llama-cpp-python cannot be imported: {error}"
    if not llama_cpp.llama_supports_rpc():
        return "llama-cpp-python was built without GGML_RPC"
    return None


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[2] not in ("cpu", "cuda"):
        print("usage: check_llama.py VERSION cpu|cuda", file=sys.stderr)
        return 2
    found = problem(sys.argv[1], sys.argv[2])
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
