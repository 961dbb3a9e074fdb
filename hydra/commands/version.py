"""`hydra version`: what is installed here, without loading any of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from .. import __version__, console
from ..ggml import library
from ..rpc import PROTOCOL_VERSION


def run(*, as_json: bool) -> None:
    try:
        package = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        package = "not installed"
    major, minor, patch = PROTOCOL_VERSION
    build = build_info()
    values = {"hydra": __version__, "llama_cpp_python": package, "ggml": library.PINNED_GGML,
              "ggml_rpc": f"{major}.{minor}.{patch}", "python": platform.python_version(),
              "platform": this_platform()}
    if as_json:
        console.result_json({**values, "one_file": build})
        return
    if build:
        values["one_file"] = ", ".join(f"{name} {value}" for name, value in build.items() if value)
    for name, value in values.items():
        console.result(f"{name:<17} {value}")


def this_platform() -> str:
    """System, kernel, processor and C library; platform.platform() would start a program to find them."""
    system = os.uname()
    return f"{system.sysname}-{system.release}-{system.machine}-{'-'.join(platform.libc_ver())}"


def build_info() -> dict[str, Any] | None:
    """What build/binary.sh wrote into the one-file program; None in any other installation."""
    try:
        found: dict[str, Any] = json.loads((Path(__file__).parent.parent / "build-info.json").read_text("utf-8"))
        return found
    except FileNotFoundError:
        return None
