"""Small graphs with answers known beforehand: a matrix product of whole numbers, on a local device or through a peer.

The values are whole numbers between -2 and 2 and the sums stay below 2^11, so that every way of computing a product
(f32, TF32, f16 or bf16 inputs with any order of adding) gives the very same result: the comparison is exact, and a sick
card, slot or cable shows as a difference. Knows nothing of findings.

Source: ggml/include/ggml.h of the pinned llama.cpp for the calls; hydra.rpc.wire for the layout on the wire.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import c_float, c_int, c_int64, c_void_p

import numpy as np

from hydra.errors import DeviceError, PeerError
from hydra.ggml.backend import Backend, Buffer, Device
from hydra.ggml.library import STATUS_SUCCESS, Ggml
from hydra.rpc import messages, wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command

F32, F16 = 0, 1
OP_MUL_MAT = 29
COMPUTE_FLAG = 16
_TENSOR_BUFFER, _TENSOR_DATA = 8, 248  # offsets in ggml_tensor


def whole_numbers(rows: int, cols: int, seed: int) -> np.ndarray:
    """float32 [rows, cols] of whole numbers from -2 to 2."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, cols)).astype(np.float32)


def differing(result: np.ndarray, expected: np.ndarray) -> int:
    """How many elements are not exactly as expected (NaN counts)."""
    return int(np.count_nonzero(~(result == expected)))


class LocalTensor:
    """A tensor header of a ggml context, laid into a buffer at an offset."""

    def __init__(self, handle: int, buffer: Buffer, offset: int) -> None:
        self.handle = handle
        self.buffer = buffer
        self.offset = offset
        c_void_p.from_address(handle + _TENSOR_BUFFER).value = buffer.handle
        c_void_p.from_address(handle + _TENSOR_DATA).value = buffer.base + offset
        ggml = buffer.backend.ggml
        self.size = int(ggml.ggml_nbytes(handle))
        if ggml.ggml_backend_buffer_init_tensor(buffer.handle, handle) != STATUS_SUCCESS:
            raise DeviceError(f"{buffer.backend.device.name} refuses a tensor of {self.size} bytes.")

    def set(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values)
        self.buffer.backend.ggml.ggml_backend_tensor_set(self.handle, data.ctypes.data, 0, data.nbytes)

    def get(self, shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, np.float32)
        self.buffer.backend.ggml.ggml_backend_tensor_get(self.handle, out.ctypes.data, 0, out.nbytes)
        return out


class LocalProduct:
    """`b @ a.T` on one local device: a [n, k] of any type, b [m, k] f32, result [m, n] f32. Use with ``with``.

    Raises: DeviceError when the device has no room or fails.
    """

    def __init__(self, ggml: Ggml, device: Device, n: int, k: int, m: int, *, a_type: int = F32,
                 threads: int = 0) -> None:
        self.ggml = ggml
        self.m, self.n, self.k = m, n, k
        self.backend = Backend(ggml, device, threads)
        self._buffer: Buffer | None = None
        self._context = ggml.context(1 << 20)
        try:
            a = ggml.ggml_new_tensor_2d(self._context, a_type, k, n)
            b = ggml.ggml_new_tensor_2d(self._context, F32, k, m)
            out = ggml.ggml_mul_mat(self._context, a, b)
            self.graph = ggml.ggml_new_graph_custom(self._context, 16, False)
            ggml.ggml_build_forward_expand(self.graph, out)
            if not ggml.ggml_backend_dev_supports_op(device.handle, out):
                raise DeviceError(f"{device.name} says that it cannot multiply matrices of type {a_type}.")
            step = max(self.backend.alignment, 256)
            sizes = [ggml.ggml_backend_buft_get_alloc_size(self.backend.buffer_type, t) for t in (a, b, out)]
            offsets = np.cumsum([0, *(-(-size // step) * step for size in sizes)])
            self._buffer = self.backend.alloc(int(offsets[-1]))
            if self._buffer is None:
                raise DeviceError(f"{device.name} has no room for {int(offsets[-1]):,} bytes.",
                                  "See who uses its memory: `nvidia-smi`.")
            self.a, self.b, self.out = (LocalTensor(t, self._buffer, int(at))
                                        for t, at in zip((a, b, out), offsets[:3], strict=True))
        except BaseException:
            self.close()
            raise

    def compute(self) -> None:
        """Run it and wait. Raises: DeviceError."""
        status = self.ggml.ggml_backend_graph_compute_async(self.backend.handle, self.graph)
        self.backend.synchronize()
        if status != STATUS_SUCCESS:
            raise DeviceError(f"{self.backend.device.name} failed to compute (ggml status {status}).")

    def seconds(self, repeats: int) -> float:
        """Wall time of ``repeats`` runs, waited for once."""
        began = time.perf_counter()
        for _ in range(repeats):
            self.ggml.ggml_backend_graph_compute_async(self.backend.handle, self.graph)
        self.backend.synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._context:
            self.ggml.ggml_free(self._context)
            self._context = 0
        self.backend.close()

    def __enter__(self) -> LocalProduct:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_product(ggml: Ggml, device: Device, size: int = 256, rounds: int = 4) -> int:
    """Elements that differ from the CPU's (numpy's) result over ``rounds`` products. Raises: DeviceError."""
    wrong = 0
    with LocalProduct(ggml, device, size, size, size) as product:
        for seed in range(rounds):
            a, b = whole_numbers(size, size, seed), whole_numbers(size, size, 100 + seed)
            product.a.set(a)
            product.b.set(b)
            product.compute()
            wrong += differing(product.out.get((size, size)), b @ a.T)
    return wrong


def flash_attention_supported(ggml: Ggml, device: Device, type_k: int, type_v: int, head_dim: int) -> bool:
    """Whether this build of the device's backend has flash attention for these cache types and head size."""
    new_4d, flash = ggml.base["ggml_new_tensor_4d"], ggml.base["ggml_flash_attn_ext"]
    new_4d.restype = flash.restype = c_void_p
    new_4d.argtypes = [c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]
    flash.argtypes = [c_void_p] * 5 + [c_float] * 3
    context = ggml.context(1 << 20)
    try:
        q = new_4d(context, F32, head_dim, 1, 8, 1)
        k = new_4d(context, type_k, head_dim, 256, 2, 1)
        v = new_4d(context, type_v, head_dim, 256, 2, 1)
        mask = new_4d(context, F16, 256, 64, 1, 1)
        op = flash(context, q, k, v, mask, 1.0, 0.0, 0.0)
        return bool(ggml.ggml_backend_dev_supports_op(device.handle, op))
    finally:
        ggml.ggml_free(context)


def features(ggml: Ggml, device: Device) -> dict[str, str]:
    """What the device's backend says of its build: ARCHS, FA_ALL_QUANTS, AVX2 …; empty where it says nothing."""
    registry = ggml.ggml_backend_dev_backend_reg(device.handle)
    entry = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
    if not entry:
        return {}

    class Feature(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]

    rows = ctypes.CFUNCTYPE(ctypes.POINTER(Feature), c_void_p)(entry)(registry)
    found: dict[str, str] = {}
    at = 0
    while rows[at].name:
        found[rows[at].name.decode()] = (rows[at].value or b"").decode()
        at += 1
    return found


class RemoteGraph:
    """A product over one connection, in one buffer of the peer: a [n, k] and b [m, k] f32 in, [m, n] f32 out.

    Also what the link's round trip is measured with: many small sends, then one reply.
    Raises: PeerError when the peer has no room for it.
    """

    def __init__(self, client: Client, n: int, k: int, m: int, spare_bytes: int = 1 << 16) -> None:
        self.client = client
        self.n, self.k, self.m = n, k, m
        step = 512
        sizes = [4 * n * k, 4 * m * k, 4 * n * m, spare_bytes]
        offsets = np.cumsum([0, *(-(-size // step) * step for size in sizes)])
        self.handle, size = client.alloc(int(offsets[-1]))
        if size < int(offsets[-1]):
            raise PeerError(f"Peer {client.address} has no room for {int(offsets[-1]):,} bytes.",
                            "Its memory is full: see who uses it.")
        base = client.base(self.handle)
        self.a = self._row(1, (k, n), base + int(offsets[0]))
        self.b = self._row(2, (k, m), base + int(offsets[1]))
        self.out = self._row(3, (n, m), base + int(offsets[2]), op=OP_MUL_MAT, src=[1, 2] + [0] * (wire.MAX_SRC - 2),
                             flags=COMPUTE_FLAG)
        self.spare = self._row(4, (spare_bytes // 4, 1), base + int(offsets[3]))

    def _row(self, number: int, shape: tuple[int, int], data: int, **fields: object) -> np.ndarray:
        ne0, ne1 = shape
        row = np.zeros(1, dtype=wire.RPC_TENSOR)
        values: dict[str, object] = {"id": number, "type": F32, "buffer": self.handle, "ne": (ne0, ne1, 1, 1),
                                     "nb": (4, 4 * ne0, 4 * ne0 * ne1, 4 * ne0 * ne1), "data": data,
                                     "name": f"doctor{number}".encode(), **fields}
        for name, value in values.items():
            row[name][0] = value
        return row

    def set(self, row: np.ndarray, values: np.ndarray | bytes, offset: int = 0) -> None:
        data = values if isinstance(values, bytes) else np.ascontiguousarray(values).tobytes()
        self.client.send(messages.SetTensor(row.tobytes(), offset, data))

    def compute(self) -> None:
        self.client.send(messages.GraphCompute(0, [3], np.concatenate([self.a, self.b, self.out])))

    def recompute(self) -> None:
        self.client.send(messages.DeviceRequest(Command.GRAPH_RECOMPUTE))

    def get(self, row: np.ndarray, size: int, offset: int = 0) -> bytes:
        return self.client.call(messages.GetTensor(row.tobytes(), offset, size))

    def result(self) -> np.ndarray:
        return np.frombuffer(self.get(self.out, 4 * self.n * self.m), np.float32).reshape(self.m, self.n)

    def free(self) -> None:
        self.client.send(messages.BufferRequest(Command.FREE_BUFFER, self.handle))

