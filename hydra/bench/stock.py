"""The stock C++ RPC server as a child process: what every hydra peer is measured against.

The server is in the shared library that hydra uses anyway (``ggml_backend_rpc_start_server``), so the two are
compared with the same kernels and need no extra build. It runs in a process of its own because it never returns,
serves one client at a time, and aborts on a malformed message. Knows nothing of hydra's own peer.

Source: ggml/src/ggml-rpc/ggml-rpc.cpp (ggml_backend_rpc_start_server), ggml/include/ggml-backend.h.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

from hydra.bench.process import ChildServer, die_with_parent
from hydra.errors import DeviceError, HydraError, LibraryError


class StockServer(ChildServer):
    """A running stock server.

    ``device`` is a ggml device name ("CPU", "CUDA0") or several joined by commas. ``cache_dir`` turns on the server's
    own tensor cache. ``netns`` starts it inside a network namespace.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        device: str = "CPU",
        threads: int = 2,
        cache_dir: Path | None = None,
        netns: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        arguments = ["--device", device, "--threads", str(threads)]
        if cache_dir is not None:
            cache_dir.mkdir(parents=True, exist_ok=True)
            arguments += ["--cache-dir", str(cache_dir)]
        super().__init__("stock", arguments, host, port, netns=netns, timeout_s=timeout_s)


def serve(endpoint: str, devices: list[str], threads: int, cache_dir: str | None) -> None:
    """Run the stock server in this process; returns only when it cannot start.

    Raises: DeviceError when a device does not exist, LibraryError when llama.cpp's libraries are not found.
    """
    # Imported here: the parent needs none of it.
    from hydra.ggml.library import load

    ggml = load()
    # Asked of the backend and not opened by name: where backends are plug-ins, its library is called otherwise.
    registered = ggml.registry.ggml_backend_reg_by_name(b"RPC")
    address = registered and ggml.ggml_backend_reg_get_proc_address(registered, b"ggml_backend_rpc_start_server")
    if not address:
        raise LibraryError(f"llama.cpp's libraries in {ggml.directory} were built without GGML_RPC=ON.",
                           "`bash build/test.sh` builds them with it.")
    start_server = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    )(address)
    handles = (ctypes.c_void_p * len(devices))()
    for index, name in enumerate(devices):
        handle = ggml.registry.ggml_backend_dev_by_name(name.encode())
        if not handle:
            raise DeviceError(f"llama.cpp has no device named {name!r} here.", "Give a name that `hydra doctor` lists.")
        handles[index] = handle
    start_server(
        endpoint.encode(), cache_dir.encode() if cache_dir else None, threads, len(devices), handles
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="hydra.bench.stock")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-dir")
    options = parser.parse_args(arguments)
    die_with_parent()
    try:
        serve(f"{options.host}:{options.port}", options.device.split(","), options.threads, options.cache_dir)
    except HydraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stderr.write(f"The stock server could not serve {options.host}:{options.port}.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
