"""The only importer of llama_cpp: owning handles over libllama, and nothing that decides anything.

Knows how to register peers, load a model with layers placed on given devices, make contexts, fill batches and run
samplers. Does not know slots, requests, drafting or hydra.toml. Every native handle has one owner with ``close()``;
contexts close before models.

llama-cpp-python's ``rpc_servers=`` does nothing in 0.3.36, so peers are registered through ggml's registry. Functions
whose results are read in the hot path get prototypes of their own here: ctypes' typed pointers cost more than the call.

Longer than a file of ours should be, because it is the one that may import llama_cpp.

Source: include/llama.h, src/llama-ext.h, ggml/include/ggml-rpc.h of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hydra.errors import (
    DeviceError,
    DeviceMissing,
    EngineError,
    LibraryError,
    ModelError,
    PeerUnreachable,
    RequestError,
)
from hydra.ggml import library

from .loadlog import ERROR, WARN, LoadLog
from .samecore import SameCore, partners

log = logging.getLogger("hydra.llama")

CTX_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
SPLIT_LAYER = 1
POOLING_MEAN = 1
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
MROPE = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, _IMROPE
DEVICE_CPU, DEVICE_GPU, DEVICE_IGPU = 0, 1, 2
_NEXTN = "_Z26llama_get_embeddings_nextnP13llama_context"  # a C++ function: llama_cpp_ext has the same name
# Members of llama_context behind the public functions, which wait for every device before they answer.
_SCHED = "_ZNK13llama_context9get_schedEv"
_SAMPLED_NOW = "_ZN13llama_context21get_sampled_token_ithEi"
_NEXTN_NOW = "_ZN13llama_context20get_embeddings_nextnEv"
_LOGITS_NOW = "_ZN13llama_context10get_logitsEv"
_VIEWS_MAX = 512
_FEW = 32
_STATE_FLAGS = 1 | 2  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: what cannot be cut back; ON_DEVICE: copies stay there
Progress = Callable[[float], bool]


class _Api:
    """llama_cpp's functions, with faster prototypes for those of the hot path."""

    def __init__(self) -> None:
        library.load()  # first, so that a missing or wrong library is one clear error and not an ImportError
        import llama_cpp.llama_cpp as c
        import llama_cpp.llama_cpp_ext as ext

        if not c.llama_supports_rpc():
            raise LibraryError(
                "This llama-cpp-python was built without GGML_RPC, so it cannot use a peer.",
                "Rebuild it with CMAKE_ARGS=-DGGML_RPC=ON; `bash build/demo.sh` does it.",
            )
        self.c = c
        self.ext = ext
        lib = c._lib
        self.decode = self._fast(lib, "llama_decode", [ctypes.c_void_p, c.llama_batch], ctypes.c_int32)
        self.synchronize = self._fast(lib, "llama_synchronize", [ctypes.c_void_p], None)
        self.logits = self._fast(lib, "llama_get_logits", [ctypes.c_void_p], ctypes.c_void_p)
        self.sampled_ith = self._fast(lib, "llama_get_sampled_token_ith", [ctypes.c_void_p, ctypes.c_int32],
                                      ctypes.c_int32)
        self.sample = self._fast(lib, "llama_sampler_sample",
                                 [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32], ctypes.c_int32)
        self.nextn = self._fast(lib, _NEXTN, [ctypes.c_void_p], ctypes.c_void_p)
        self.sched = self._fast(lib, _SCHED, [ctypes.c_void_p], ctypes.c_void_p)
        self.sampled_now = self._fast(lib, _SAMPLED_NOW, [ctypes.c_void_p, ctypes.c_int32], ctypes.c_int32)
        self.nextn_now = self._fast(lib, _NEXTN_NOW, [ctypes.c_void_p], ctypes.c_void_p)
        self.logits_now = self._fast(lib, _LOGITS_NOW, [ctypes.c_void_p], ctypes.c_void_p)
        self.backend_wait = self._fast(library.load().base, "ggml_backend_synchronize", [ctypes.c_void_p], None)

    @staticmethod
    def _fast(lib: ctypes.CDLL, name: str, argtypes: list[Any], restype: Any) -> Any:
        try:
            function = lib[name]  # indexing makes a new function object: llama_cpp's own prototype stays as it is
        except AttributeError as exc:
            raise LibraryError(f"libllama has no function {name}.",
                               "hydra needs the llama-cpp-python of constraints.txt; see `hydra doctor`.") from exc
        function.argtypes = argtypes
        function.restype = restype
        return function


# Said of every model whose MTP block is left out on purpose, and of several well-made vocabularies.
_EXPECTED_WARNINGS = ("model has unused tensor", "load: control-looking token")
_log_sink: LoadLog | None = None
_log_callback: Any = None


@lru_cache(maxsize=1)
def api() -> _Api:
    """libllama, loaded, checked and initialised once per process. Raises LibraryError."""
    global _log_callback
    loaded = _Api()

    def on_log(level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace")
        if _log_sink is not None:
            _log_sink.feed(level, line)
        if WARN <= level <= ERROR and not line.startswith(_EXPECTED_WARNINGS):
            log.log(logging.ERROR if level == ERROR else logging.WARNING, "%s", line.rstrip())

    _log_callback = loaded.c.llama_log_callback(on_log)
    loaded.c.llama_log_set(_log_callback, None)
    loaded.c.llama_backend_init()
    return loaded


@contextmanager
def collect(sink: LoadLog) -> Iterator[LoadLog]:
    """While this is open, every line of llama.cpp's log goes to ``sink``."""
    global _log_sink
    before, _log_sink = _log_sink, sink
    try:
        yield sink
    finally:
        _log_sink = before


class _BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of include/llama.h: pattern, buffer type; a list ends with a null
    pattern.
    """

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class Device:
    """One ggml device: the handle, its name as llama.cpp prints it, and its memory."""

    def __init__(self, handle: int) -> None:
        base = library.load().base
        self.handle = handle
        self.name = str(base.ggml_backend_dev_name(handle).decode())
        self.description = str(base.ggml_backend_dev_description(handle).decode())
        self.kind = int(base.ggml_backend_dev_type(handle))

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.load().base.ggml_backend_dev_memory(self.handle, ctypes.byref(free), ctypes.byref(total))
        return int(free.value), int(total.value)


def local_devices(names: Sequence[str] = ()) -> list[Device]:
    """The local devices named, or all local GPUs; the CPU when there is none.

    Raises: DeviceMissing for a name that is not here, listing those that are.
    """
    registry = library.load().registry
    found = [Device(registry.ggml_backend_dev_get(i)) for i in range(registry.ggml_backend_dev_count())]
    found = [device for device in found if not device.name.startswith("RPC")]
    if names:
        by_name = {device.name: device for device in found}
        for name in names:
            if name not in by_name:
                raise DeviceMissing.among(name, by_name)
        return [by_name[name] for name in names]
    gpus = [device for device in found if device.kind == DEVICE_GPU]
    gpus = gpus or [device for device in found if device.kind == DEVICE_IGPU]
    return gpus or [device for device in found if device.kind == DEVICE_CPU]


def register_peer(address: str, index: int = 0, timeout_s: float = 5.0) -> Device:
    """Device ``index`` of the ggml-RPC server at ``address`` (``host:port``).

    Raises: PeerUnreachable when nobody listens there (libggml would abort this process), DeviceError when it has no
    such device.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            pass
    except (OSError, ValueError) as exc:
        raise PeerUnreachable(f"Nobody answers at {address}: {exc}.",
                              "Start `hydra up` on that box, and check address, port and firewall.") from exc
    ggml = library.load()
    rpc = ggml.registry.ggml_backend_reg_by_name(b"RPC")
    if not rpc:
        raise LibraryError("libggml has no RPC backend.", "Rebuild llama-cpp-python with CMAKE_ARGS=-DGGML_RPC=ON.")
    entry = ggml.base.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(entry)
    registration = add_server(address.encode())
    if not registration:
        raise DeviceError(f"The peer at {address} offers no device.", "See its log, and `hydra doctor` on that box.")
    ggml.registry.ggml_backend_register(registration)
    base = ggml.base
    count_fn, get_fn = base["ggml_backend_reg_dev_count"], base["ggml_backend_reg_dev_get"]
    count_fn.restype, count_fn.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    get_fn.restype, get_fn.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    count = int(count_fn(registration))
    if not 0 <= index < count:
        raise DeviceError(f"The peer at {address} offers {count} device(s); number {index} was asked for.")
    return Device(get_fn(registration, index))


class Model:
    """One loaded model.

    ``devices`` in order, with ``split`` layers each (see placement.py); no devices = everything in CPU buffers.
    ``n_gpu_layers``: only so many, the last ones and the output counted, lie on them and the rest in CPU buffers.
    ``pipeline`` off keeps the scheduler at one copy of every input: decode does not then pay for prefill's pipelining.

    Raises: ModelError with llama.cpp's own reason.
    """

    def __init__(self, path: str, devices: Sequence[Device], split: Sequence[float], *, load_mtp: bool, pipeline: bool,
                 use_extra_bufts: bool, progress: Progress | None = None, no_alloc: bool = False,
                 vocab_only: bool = False, n_gpu_layers: int = -1) -> None:
        c = api().c
        self._c = c
        params = c.llama_model_default_params()
        handles = (ctypes.c_void_p * (len(devices) + 1))(*[device.handle for device in devices], None)
        shares = (ctypes.c_float * max(int(c.llama_max_devices()), len(split) + 1))(*split)
        params.devices = ctypes.cast(handles, ctypes.c_void_p)
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        params.n_gpu_layers = (1 << 20 if n_gpu_layers < 0 else n_gpu_layers) if devices else 0
        params.split_mode = SPLIT_LAYER
        params.load_mtp = load_mtp
        params.use_extra_bufts = use_extra_bufts
        params.no_alloc = no_alloc
        params.vocab_only = vocab_only
        if no_alloc:
            params.load_mode = 0  # LLAMA_LOAD_MODE_NONE: a mapped file would count as already allocated
        overrides = (_BuftOverride * 2)()
        if not pipeline:
            # llama_context turns pipelining off when the model has any override; this one matches no tensor.
            overrides[0].pattern = b"^hydra-matches-no-tensor$"
            overrides[0].buft = _cpu_buffer_type()
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        report = progress or (lambda _fraction: True)
        callback = c.llama_progress_callback(lambda fraction, _data: bool(report(float(fraction))))
        params.progress_callback = callback
        self._keep = (handles, shares, overrides, callback)
        self.log = LoadLog()
        with collect(self.log):
            self.handle = c.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise ModelError(f"{path} cannot be loaded: {self.log.why()}.",
                             "Check the path, the free memory of every node, and that the file is complete.")
        self.n_layer = int(c.llama_model_n_layer(self.handle))
        self.n_layer_nextn = int(c.llama_model_n_layer_nextn(self.handle))
        self.n_embd = int(c.llama_model_n_embd_out(self.handle))
        self.n_swa = int(c.llama_model_n_swa(self.handle))
        self.n_ctx_train = int(c.llama_model_n_ctx_train(self.handle))
        self.recurrent = bool(c.llama_model_is_recurrent(self.handle) or c.llama_model_is_hybrid(self.handle))
        self.size_bytes = int(c.llama_model_size(self.handle))
        # With several positions a token, llama.cpp takes batches that leave some out; else they must follow each other.
        self.may_skip_positions = int(c.llama_model_rope_type(self.handle)) in MROPE
        self.vocab = Vocab(c.llama_model_get_vocab(self.handle))

    def meta(self, key: str) -> str | None:
        """One metadata value of the GGUF as text, None when it has none."""
        size = self._c.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self._c.llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def chat_template(self) -> str | None:
        text = self._c.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    def describe(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._c.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            self._c.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cpu_buffer_type() -> int:
    function = library.load().base["ggml_backend_cpu_buffer_type"]
    function.restype = ctypes.c_void_p
    function.argtypes = []
    return int(function())


class Vocab:
    """Tokens and text. Safe to use from any thread."""

    def __init__(self, handle: Any) -> None:
        c = api().c
        self._c = c
        self.handle = handle
        self.n_tokens = int(c.llama_vocab_n_tokens(handle))
        self.bos = int(c.llama_vocab_bos(handle))
        self.eos = int(c.llama_vocab_eos(handle))
        self.eot = int(c.llama_vocab_eot(handle))
        self.add_bos = bool(c.llama_vocab_get_add_bos(handle))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._ends: dict[int, bool] = {}

    def is_eog(self, token: int) -> bool:
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(self._c.llama_vocab_is_eog(self.handle, token))
        return known

    def is_control(self, token: int) -> bool:
        return bool(self._c.llama_vocab_is_control(self.handle, token))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Raises: RequestError when the text cannot be tokenised."""
        data = text.encode("utf-8", "surrogatepass")
        capacity = len(data) + 8
        for _ in range(2):
            buffer = (ctypes.c_int32 * capacity)()
            count = self._c.llama_tokenize(self.handle, data, len(data), buffer, capacity, add_special, parse_special)
            if count >= 0:
                return list(buffer[:count])
            capacity = -count
        raise RequestError(f"A text of {len(data)} bytes cannot be tokenised.")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """One token's bytes (possibly part of a character); empty for control tokens unless ``special``."""
        cached = self._pieces.get((token, special))
        if cached is not None:
            return cached
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            size = self._c.llama_token_to_piece(self.handle, token, buffer, capacity, 0, special)
            if size >= 0:
                self._pieces[(token, special)] = buffer.raw[:size]
                return buffer.raw[:size]
            capacity = -size

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for none."""
        if token < 0:
            return ""
        return str(self._c.llama_vocab_get_text(self.handle, token).decode("utf-8", "replace"))

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", "replace")


class Batch:
    """Tokens for one ``llama_decode``, in numpy arrays that are filled by slices and never reallocated.

    With ``n_embd`` each token also carries a row of float32 (MTP: the hidden state of the token before it).
    """

    def __init__(self, capacity: int, n_embd: int = 0) -> None:
        c = api().c
        self.capacity = capacity
        self.n = 0
        self.n_outputs = 0
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.seq = np.zeros(capacity, np.int32)
        self.output = np.zeros(capacity, np.int8)
        self.embd: npt.NDArray[np.float32] = np.zeros((capacity if n_embd else 0, n_embd or 1), np.float32)
        # A few tokens are written one by one: this costs less than numpy's slices, most of all with cold caches.
        self._token_at, self._pos_at = self.token.data, self.pos.data
        self._seq_at, self._output_at = self.seq.data, self.output.data
        self._rows: dict[int, int] = {}
        self._n_seq = np.ones(capacity, np.int32)
        self._steps = np.arange(capacity, dtype=np.int32)
        self._seq_ptr = (self.seq.ctypes.data + 4 * np.arange(capacity)).astype(np.uint64)
        self._struct = c.llama_batch()
        fields: dict[str, npt.NDArray[Any]] = {
            "token": self.token, "pos": self.pos, "n_seq_id": self._n_seq, "seq_id": self._seq_ptr,
            "logits": self.output}
        if n_embd:
            fields["embd"] = self.embd
        kinds = dict(c.llama_batch._fields_)
        self._embd_type = kinds["embd"]
        for name, array in fields.items():
            setattr(self._struct, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def clear(self) -> None:
        self.n = 0
        self.n_outputs = 0
        self._rows.clear()

    def output_row(self, index: int) -> int:
        """The place of token ``index`` among the batch's outputs."""
        row = self._rows.get(index)
        return int(self.output[:index].sum()) if row is None else row

    def rows_at(self, address: int | None) -> None:
        """Take the rows from this address, [n, n_embd] float32, instead of ``embd`` (None: ``embd`` again)."""
        self._struct.embd = ctypes.cast(self.embd.ctypes.data if address is None else address, self._embd_type)

    def add(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos0: int, seq: int, *, output: str) -> int:
        """Consecutive tokens of one sequence; ``output``: ``all``, ``last`` or ``none`` have logits. Returns the first
        index.
        """
        first, count = self.n, len(tokens)
        end = first + count
        if end > self.capacity:
            raise EngineError(f"A batch of {self.capacity} tokens was asked to hold {end}.")
        if output == "all" and count <= _FEW:
            for i, token in enumerate(tokens):
                self.add_one(int(token), pos0 + i, seq)
            return first
        self.token[first:end] = tokens
        self.pos[first:end] = self._steps[:count]
        self.pos[first:end] += pos0
        self.seq[first:end] = seq
        self.output[first:end] = output == "all"
        if output == "last":
            self.output[end - 1] = 1
        self.n_outputs += count if output == "all" else int(output == "last")
        self.n = end
        return first

    def add_one(self, token: int, pos: int, seq: int) -> int:
        """One token with logits: what ``add`` does, without its slices. Returns its index."""
        at = self.n
        if at >= self.capacity:
            raise EngineError(f"A batch of {self.capacity} tokens was asked to hold {at + 1}.")
        self._token_at[at] = token
        self._pos_at[at] = pos
        self._seq_at[at] = seq
        self._output_at[at] = 1
        self._rows[at] = self.n_outputs
        self.n_outputs += 1
        self.n = at + 1
        return at

    @property
    def struct(self) -> Any:
        self._struct.n_tokens = self.n
        return self._struct


class Context:
    """One llama_context: decode, logits, hidden rows, and the memory of its sequences.

    Raises: DeviceError with llama.cpp's own reason when it cannot be made (mostly: out of memory).
    """

    def __init__(self, model: Model, *, n_ctx: int, n_batch: int, n_ubatch: int, n_seq_max: int, n_outputs_max: int,
                 type_k: str, type_v: str, flash_attn: str, n_threads: int, n_rs_seq: int = 0,
                 mtp_of: Context | None = None,
                 swa_full: bool = False, embeddings: bool = False, greedy: bool = False) -> None:
        a = api()
        c = a.c
        self._a = a
        params = c.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_outputs_max = n_outputs_max
        params.n_rs_seq = n_rs_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTN[flash_attn]
        params.type_k = CACHE_TYPES[type_k]
        params.type_v = CACHE_TYPES[type_v]
        params.kv_unified = n_seq_max > 1
        params.swa_full = swa_full
        params.no_perf = True
        params.embeddings = embeddings
        if embeddings:
            params.pooling_type = POOLING_MEAN
        if mtp_of is not None:
            params.ctx_type = CTX_MTP
            params.ctx_other = mtp_of.handle
        # With `greedy` the device itself takes the largest logit: a token comes back instead of a vocabulary of floats.
        self._samplers = [c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
                          for _ in range(n_seq_max if greedy else 0)]
        configs = (c.llama_sampler_seq_config * max(1, len(self._samplers)))()
        for seq, sampler in enumerate(self._samplers):
            c.llama_sampler_chain_add(sampler, c.llama_sampler_init_greedy())
            configs[seq].seq_id = seq
            configs[seq].sampler = ctypes.cast(sampler, ctypes.c_void_p)
        if self._samplers:
            params.samplers, params.n_samplers = configs, len(self._samplers)
        self.model = model
        self.log = LoadLog()
        self.handle: Any
        with collect(self.log):
            self.handle = c.llama_init_from_model(model.handle, params)
        if not self.handle:
            self._free_samplers()
            raise DeviceError(f"A context of {n_ctx} tokens cannot be made: {self.log.why()}.",
                              'Use a smaller ctx_size, a quantised KV cache (cache_type_k/v = "q8_0"), or move layers.')
        self.n_ctx = int(c.llama_n_ctx(self.handle))
        self.n_ubatch = int(c.llama_n_ubatch(self.handle))
        self.n_rs_seq = int(c.llama_n_rs_seq(self.handle))
        self._memory = c.llama_get_memory(self.handle)
        self._row = ctypes.c_float * model.vocab.n_tokens
        self._hidden = ctypes.c_float * model.n_embd
        self._hidden_bytes = 4 * model.n_embd
        self._row_bytes = 4 * model.vocab.n_tokens
        self._nextn_masked = False
        # Where the last decode's outputs lie. Each asking waits for every device, the peers included, so it is done
        # once; hidden rows lie where they lay after the last decode with as many outputs, unless the buffer had to grow
        # since.
        self._n_seq = n_seq_max
        self._logits_base = 0
        self._hidden_base = 0
        self._hidden_bases: dict[int, int] = {}
        self._most_outputs = 0
        self._waited = False
        self._decoded: Batch | None = None
        self._here: list[int] = []
        self._core: SameCore | None = None
        # Views of llama.cpp's output buffer by address: it stays where it is until it must grow.
        self._logits_at: dict[int, npt.NDArray[np.float32]] = {}
        self._hidden_at: dict[int, npt.NDArray[np.float32]] = {}

    def wait_here_only(self) -> None:
        """Wait for this box's devices, no longer for the peers': for a context whose graphs use none of theirs.

        llama.cpp's own functions wait for every device of the model; a peer's answers from a thread of the RPC client,
        which costs a decode of an MTP block two changes of thread each time.
        """
        self._here = self._backends(peers=False)

    def share_core(self) -> None:
        """Decode on one core with the threads of the RPC client (samecore.py). For the thread that calls this."""
        waits = [partial(self._a.backend_wait, backend) for backend in self._backends(peers=True)]
        threads = partners(waits) if waits else []
        self._core = SameCore(threads) if threads else None

    def _backends(self, *, peers: bool) -> list[int]:
        """The backends of this context's scheduler: the peers', or all others."""
        base, sched = library.load().base, self._a.sched(self.handle)
        functions = ("sched_get_n_backends", "sched_get_backend", "name")
        count, get, name = (base[f"ggml_backend_{function}"] for function in functions)
        count.argtypes, count.restype = [ctypes.c_void_p], ctypes.c_int
        get.argtypes, get.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_void_p
        name.argtypes, name.restype = [ctypes.c_void_p], ctypes.c_char_p
        backends = [get(sched, i) for i in range(count(sched))]
        return [backend for backend in backends if name(backend).startswith(b"RPC") == peers]

    def _ask(self, function: Any, function_now: Any) -> int:
        """An address of the last decode's outputs, once it is done."""
        if not self._here:
            self._waited = True
            return function(self.handle) or 0  # waits by itself
        self._settle()
        return function_now(self.handle) or 0

    def _settle(self) -> None:
        if not self._waited:
            for backend in self._here:
                self._a.backend_wait(backend)
            self._waited = True

    def use_nextn(self, *, masked: bool) -> None:
        """Keep hidden rows of each decode: of every token, or only (masked) of those with output."""
        self._a.ext.llama_set_embeddings_nextn(self.handle, True, masked)
        self._nextn_masked = masked

    def decode(self, batch: Batch) -> int:
        """llama_decode's return code: 0 good, 1 no room in the memory, 2 aborted. Raises EngineError for the rest."""
        self._logits_base = self._hidden_base = 0
        self._waited = False
        self._decoded = batch
        if batch.n_outputs > self._most_outputs:
            self._most_outputs = batch.n_outputs
            self._hidden_bases.clear()
        core = self._core
        if core is not None:
            core.hold()
        code = int(self._a.decode(self.handle, batch.struct))
        if core is not None:
            core.release()
        if code < 0:
            raise EngineError(f"llama_decode failed with {code} on a batch of {batch.n} tokens.",
                              "See the log above this line; `hydra doctor` checks devices and peers.")
        return code

    def wait(self) -> None:
        """Return when the last decode is done. Where its outputs lie is asked for on the way, which waits by itself."""
        if self._decoded is None or not self._decoded.n_outputs:
            self._a.synchronize(self.handle)
        elif not self._logits_base:
            self._logits_base = self._ask(self._a.logits, self._a.logits_now)

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """Logits of the batch's token ``index``: [n_vocab], a view that the next decode overwrites."""
        if not self._logits_base:
            self._logits_base = self._ask(self._a.logits, self._a.logits_now)
            if not self._logits_base:
                raise EngineError("The last decode gave no logits.")
        address = self._logits_base + self._output_row(index) * self._row_bytes
        view = self._logits_at.get(address)
        return view if view is not None else _view(self._logits_at, address, self._row)

    def _output_row(self, index: int) -> int:
        """The place among the outputs of the batch's token ``index``; llama.cpp keeps them in the batch's order."""
        batch = self._decoded
        if batch is None or batch.n_outputs == batch.n:
            return index
        return batch.output_row(index)

    def sampled(self, index: int) -> int:
        """The token that the device chose for the batch's token ``index`` (contexts made ``greedy``)."""
        if self._here:
            self._settle()
            return int(self._a.sampled_now(self.handle, index))
        self._waited = True
        return int(self._a.sampled_ith(self.handle, index))

    def hidden(self, index: int) -> npt.NDArray[np.float32]:
        """Hidden row of the batch's token ``index``: [n_embd], a view that the next decode overwrites."""
        address = self.hidden_address(index)
        view = self._hidden_at.get(address)
        return view if view is not None else _view(self._hidden_at, address, self._hidden)

    def copy_hidden(self, first: int, count: int, out: npt.NDArray[np.float32]) -> None:
        """Hidden rows of ``count`` consecutive tokens of one sequence into ``out`` [count, n_embd]."""
        ctypes.memmove(out.ctypes.data, self.hidden_address(first), count * self._hidden_bytes)

    def hidden_address(self, index: int) -> int:
        """Where the hidden row of the batch's token ``index`` lies, the rows of the tokens after it behind it.

        Rows are in the batch's order: of every token, or with masked rows of those with output.
        """
        if not self._hidden_base:
            key = max(self._decoded.n_outputs if self._decoded is not None else 0, self._n_seq)
            known = self._hidden_bases.get(key, 0) if self._waited else 0
            self._hidden_base = known or self._ask(self._a.nextn, self._a.nextn_now)
            if not self._hidden_base:
                raise EngineError("The last decode gave no hidden rows.")
            self._hidden_bases[key] = self._hidden_base
        row = self._output_row(index) if self._nextn_masked else index
        return self._hidden_base + row * self._hidden_bytes

    def embedding(self, seq: int) -> list[float]:
        """The pooled embedding of one sequence."""
        row = self._a.c.llama_get_embeddings_seq(self.handle, seq)
        if not row:
            raise RequestError("This model gives no embeddings.")
        return [float(value) for value in row[:self.model.n_embd]]

    def remove(self, seq: int, first: int) -> bool:
        """Forget positions ``first`` and up of a sequence. False when this kind of memory cannot."""
        return bool(self._a.c.llama_memory_seq_rm(self._memory, seq, first, -1))

    def pos_min(self, seq: int) -> int:
        return int(self._a.c.llama_memory_seq_pos_min(self._memory, seq))

    def pos_max(self, seq: int) -> int:
        return int(self._a.c.llama_memory_seq_pos_max(self._memory, seq))

    def can_shift(self) -> bool:
        return bool(self._a.c.llama_memory_can_shift(self._memory))

    def shift(self, seq: int, first: int, count: int, end: int) -> bool:
        """Drop ``count`` positions from ``first`` and move those up to ``end`` down by as many."""
        if not self._a.c.llama_memory_seq_rm(self._memory, seq, first, first + count):
            return False
        self._a.c.llama_memory_seq_add(self._memory, seq, first + count, end, -count)
        return True

    def state(self, seq: int) -> bytes:
        """One sequence's whole state as bytes."""
        size = int(self._a.c.llama_state_seq_get_size(self.handle, seq))
        buffer = (ctypes.c_uint8 * size)()
        written = int(self._a.c.llama_state_seq_get_data(self.handle, buffer, size, seq))
        return bytes(memoryview(buffer)[:written])

    def keep_state(self, seq: int) -> bytes:
        """Keep a copy of one sequence's recurrent state on its devices, in place of the last one kept.

        Returns what ``go_back`` wants; the state itself does not leave the devices, the peers' included.
        Raises: EngineError.
        """
        c = self._a.c
        size = int(c.llama_state_seq_get_size_ext(self.handle, seq, _STATE_FLAGS))
        buffer = (ctypes.c_uint8 * max(1, size))()
        written = int(c.llama_state_seq_get_data_ext(self.handle, buffer, size, seq, _STATE_FLAGS))
        if written != size:
            raise EngineError(f"The state of sequence {seq} could not be kept: {written} of {size} bytes were written.")
        return bytes(memoryview(buffer)[:written])

    def go_back(self, seq: int, kept: bytes) -> bool:
        """Put back what ``keep_state`` kept for this sequence last."""
        c = self._a.c
        buffer = (ctypes.c_uint8 * max(1, len(kept))).from_buffer_copy(kept)
        return int(c.llama_state_seq_set_data_ext(self.handle, buffer, len(kept), seq, _STATE_FLAGS)) == len(kept)

    def restore(self, seq: int, state: bytes) -> None:
        """Makes a sequence what another was when ``state`` was taken. Raises: DeviceError when there is no room."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if not self._a.c.llama_state_seq_set_data(self.handle, buffer, len(state), seq):
            raise DeviceError(f"A state of {len(state)} bytes cannot be restored.", "Use a larger ctx_size.")

    def _free_samplers(self) -> None:
        for sampler in self._samplers:
            self._a.c.llama_sampler_free(sampler)
        self._samplers = []

    def close(self) -> None:
        if self.handle:
            self._a.c.llama_free(self.handle)
            self.handle = None
            self._free_samplers()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _view(views: dict[int, npt.NDArray[np.float32]], address: int, kind: Any) -> npt.NDArray[np.float32]:
    if len(views) > _VIEWS_MAX:
        views.clear()
    view = views[address] = np.frombuffer(memoryview(kind.from_address(address)), np.float32)
    return view


def json_schema_to_gbnf(schema: str) -> str:
    """llama-cpp-python's own converter; it raises whatever its parts raise."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf as convert

    return str(convert(schema))
