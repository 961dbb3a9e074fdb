"""`hydra version`: what is installed here, without loading any of it."""

from __future__ import annotations

import importlib.metadata
import platform

from .. import __version__, console
from ..rpc import wire


def run(*, as_json: bool) -> None:
    try:
        package = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        package = "not installed"
    major, minor, patch = wire.PROTOCOL_VERSION
    values = {"hydra": __version__, "llama_cpp_python": package, "ggml_rpc": f"{major}.{minor}.{patch}",
              "python": platform.python_version(), "platform": platform.platform()}
    if as_json:
        console.result_json(values)
        return
    for name, value in values.items():
        console.result(f"{name:<17} {value}")
