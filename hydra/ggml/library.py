"""Finds, loads and checks libggml: the very files that libllama is linked to.

A wheel holds three copies of every library (``libggml.so``, ``.so.0``, ``.so.0.25.3``), not links. libllama depends on
the ``.so.0`` names; a library opened under any other name is a second one with a second, empty device registry. So
only the ``.so.0`` names are opened here, and ``loaded_files`` lets the doctor prove it.

Does not import llama_cpp (that is for hydra.head.llama alone): the package is only located.

Source: ggml/include/{ggml,ggml-backend,ggml-rpc}.h of llama.cpp as vendored by llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

from hydra.errors import LibraryError

PINNED_PACKAGE = "0.3.36"  # llama-cpp-python
PINNED_GGML = "0.25.3"
PINNED_OP_COUNT = 101
PINNED_TENSOR_OVERHEAD = 368  # ggml_object (32) + ggml_tensor (336)

STATUS_SUCCESS = 0
DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}

_BASE: dict[str, tuple[object, list[object]]] = {
    "ggml_version": (c_char_p, []),
    "ggml_commit": (c_char_p, []),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_op_name": (c_char_p, [c_int]),
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_hash_size": (c_size_t, [c_size_t]),
    "ggml_init": (c_void_p, [c_size_t, c_void_p, c_bool]),  # struct ggml_init_params: see Ggml.context
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_1d": (c_void_p, [c_void_p, c_int, c_int64]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_add": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_mul": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_graph_size": (c_int, [c_void_p]),
    "ggml_graph_n_nodes": (c_int, [c_void_p]),
    "ggml_graph_node": (c_void_p, [c_void_p, c_int]),
    "ggml_graph_add_node": (None, [c_void_p, c_void_p]),
    "ggml_graph_clear": (None, [c_void_p]),
    "ggml_graph_next_uid": (c_uint64, []),
    "ggml_log_set": (None, [c_void_p, c_void_p]),
    "ggml_backend_buft_alloc_buffer": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buft_get_alignment": (c_size_t, [c_void_p]),
    "ggml_backend_buft_get_max_size": (c_size_t, [c_void_p]),
    "ggml_backend_buft_get_alloc_size": (c_size_t, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_buffer_get_base": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_get_size": (c_size_t, [c_void_p]),
    "ggml_backend_buffer_init_tensor": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_buffer_clear": (None, [c_void_p, c_uint8]),
    "ggml_backend_buffer_is_host": (c_bool, [c_void_p]),
    "ggml_backend_buffer_copy_tensor": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
    "ggml_backend_get_default_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_tensor_set_async": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get_async": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_memset": (None, [c_void_p, c_uint8, c_size_t, c_size_t]),
    "ggml_backend_synchronize": (None, [c_void_p]),
    "ggml_backend_graph_compute_async": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_event_new": (c_void_p, [c_void_p]),
    "ggml_backend_event_free": (None, [c_void_p]),
    "ggml_backend_event_record": (None, [c_void_p, c_void_p]),
    "ggml_backend_event_synchronize": (None, [c_void_p]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, c_void_p, c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_host_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_reg_name": (c_char_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
}
_REGISTRY: dict[str, tuple[object, list[object]]] = {
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_count": (c_size_t, []),
    "ggml_backend_reg_get": (c_void_p, [c_size_t]),
    "ggml_backend_register": (None, [c_void_p]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class Ggml:
    """The loaded library: every function of ggml that hydra calls, as an attribute with its C name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = _open(directory, "libggml-base.so.0")
        self.registry = _open(directory, "libggml.so.0")
        for library, table in ((self.base, _BASE), (self.registry, _REGISTRY)):
            for name, (restype, argtypes) in table.items():
                try:
                    function = getattr(library, name)
                except AttributeError as exc:
                    raise LibraryError(
                        f"{directory} has no function {name}: not one that llama-cpp-python {PINNED_PACKAGE} builds.",
                        "Run `bash build/test.sh` or reinstall llama-cpp-python at the pinned version.",
                    ) from exc
                function.restype = restype
                function.argtypes = argtypes
                setattr(self, name, function)
        self.base.ggml_init.argtypes = [InitParams]
        if not self.registry.ggml_backend_dev_count():
            # Built with GGML_BACKEND_DL, as the one-file program is: the backends are plug-ins beside the library. One
            # that does not load (CUDA's, without a driver) is passed over; ggml's log of the others is not our user's.
            self.quiet()
            self.registry.ggml_backend_load_all_from_path(str(directory).encode())
            self.base.ggml_log_set(None, None)

    def __getattr__(self, name: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
        raise AttributeError(name)  # set in __init__; here for the type checker

    def context(self, size_bytes: int) -> int:
        """A ggml_context for tensor headers only (no_alloc); free it with ggml_free."""
        ctx = self.base.ggml_init(InitParams(size_bytes, None, True))
        if not ctx:
            raise LibraryError(f"ggml_init refused a context of {size_bytes} bytes.")
        return int(ctx)

    def version(self) -> str:
        return str(self.base.ggml_version().decode())

    def quiet(self) -> None:
        """Sends ggml's log to nowhere; a worker's own log says what matters."""
        self._log = LOG_CALLBACK(lambda level, text, data: None)
        self.base.ggml_log_set(ctypes.cast(self._log, c_void_p), None)


def _open(directory: Path, name: str) -> ctypes.CDLL:
    path = directory / name
    try:
        # Never RTLD_GLOBAL: where the libraries link libstdc++ statically, its symbols would then be taken for
        # libllama's own, and the first std::stringstream there crashes.
        return ctypes.CDLL(str(path))
    except OSError as exc:
        raise LibraryError(
            # In the one file, the loader's own words are the cause of another error.
            f"{path} cannot be loaded: {exc.__cause__ or exc}.",
            f"Install llama-cpp-python {PINNED_PACKAGE} built with GGML_RPC=ON (build/test.sh does it).",
        ) from exc


def library_dir() -> Path:
    """Where llama.cpp's shared libraries are: LLAMA_CPP_LIB_PATH, else beside the llama_cpp package.

    Raises: LibraryError when there is neither.
    """
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override:
        return Path(override)
    return package_dir() / "lib"


def package_dir() -> Path:
    """The folder of the llama_cpp package, found without importing it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise LibraryError(
            "The Python package llama-cpp-python is not installed.",
            f"Install version {PINNED_PACKAGE} built with GGML_RPC=ON; `bash build/demo.sh` does all of it.",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def package_version() -> str | None:
    """llama-cpp-python's version as its own source states it; None when it states none."""
    text = (package_dir() / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return match.group(1) if match else None


def check_version(ggml: Ggml) -> None:
    """Refuses any library but the pinned one: op numbers, struct layouts and the protocol move between releases.

    Raises: LibraryError naming both versions.
    """
    found = ggml.version()
    package = package_version()
    hint = f"Install llama-cpp-python {PINNED_PACKAGE} on every box (`bash build/test.sh` does it)."
    if package is not None and package != PINNED_PACKAGE:
        raise LibraryError(f"llama-cpp-python {package} is installed; hydra is built for {PINNED_PACKAGE}.", hint)
    if found != PINNED_GGML:
        raise LibraryError(f"libggml {found} is loaded; hydra is built for {PINNED_GGML}.", hint)
    # ggml_op_name(GGML_OP_COUNT) reads past its table, so the count is checked at its last op.
    last_op = ggml.base.ggml_op_name(PINNED_OP_COUNT - 1)
    overhead = ggml.base.ggml_tensor_overhead()
    if last_op != b"GLU" or overhead != PINNED_TENSOR_OVERHEAD:
        raise LibraryError(
            f"libggml {found} has op {PINNED_OP_COUNT - 1} = {last_op!r} and tensors of {overhead} bytes with overhead;"
            f" hydra expects GLU and {PINNED_TENSOR_OVERHEAD}.",
            hint,
        )


@lru_cache(maxsize=1)
def load() -> Ggml:
    """The library, loaded and checked once per process.

    Raises: LibraryError.
    """
    ggml = Ggml(library_dir())
    check_version(ggml)
    return ggml


def loaded_files() -> list[str]:
    """The ggml and llama libraries mapped into this process, by path. Source: /proc/self/maps."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if re.search(r"/lib(ggml|llama)[^/]*\.so", path):
                found.add(path)
    return sorted(found)
