"""`hydra bench device`: the two figures of a device that decide how fast it decodes, measured with ggml itself.

Bandwidth: a product of one vector with a matrix larger than any cache, which is what decode is made of; bytes of the
matrix over the time. Cost of an operation: a chain of additions of a few numbers, where nothing but starting them
costs.
`hydra plan` predicts with both. Knows nothing of models.

Source: ggml/include/ggml.h and ggml-backend.h of the pinned llama.cpp for the calls.
"""

from __future__ import annotations

import time
from ctypes import c_void_p
from dataclasses import asdict, dataclass
from typing import Any

from hydra.doctor.kernels import F32, LocalProduct, LocalTensor
from hydra.errors import DeviceError
from hydra.ggml.backend import Backend, Device, memory, pick_device
from hydra.ggml.library import Ggml, load
from hydra.plan import cards
from hydra.plan.gguf import BY_NAME, row_bytes

ROW = 4096
CHAIN = 512
MEASURE_S = 0.5
ROUNDS = 5


@dataclass(frozen=True)
class DeviceFigures:
    """bandwidth_bytes_s: the best of some rounds; op_s: of one small operation; sheet_bytes_s: by data sheet, 0 =
    unknown; matrix_bytes: what was read each time."""

    device: str
    description: str
    kind: str
    matrix_type: str
    matrix_bytes: int
    bandwidth_bytes_s: float
    op_s: float
    sheet_bytes_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def toml(self) -> str:
        """The line for the node's table in hydra.toml."""
        return f"bandwidth_gbs = {self.bandwidth_bytes_s / 1e9:.1f}"


def measure(name: str = "auto", *, mib: int = 512, kind: str = "q8_0", threads: int = 0) -> DeviceFigures:
    """Measure one device of this box.

    mib: size of the matrix, cut down to a quarter of the device's free memory; kind: its type.
    Raises: DeviceError when there is no such device, or no room.
    """
    ggml = load()
    ggml.quiet()
    device = pick_device(ggml, name)
    free, _ = memory(ggml, device)
    size = min(mib << 20, free // 4)
    rows = size // row_bytes(kind, ROW)
    if rows < 64:
        raise DeviceError(f"{device.name} has only {free / 2**20:.0f} MiB free.", "End what else uses it.")
    with LocalProduct(ggml, device, rows, ROW, 1, a_type=BY_NAME[kind], threads=threads) as product:
        pace = _best(product)
    found = cards.find(device.description)
    return DeviceFigures(device.name, device.description, device.kind, kind, rows * row_bytes(kind, ROW),
                         rows * row_bytes(kind, ROW) / pace, operation_s(ggml, device, threads),
                         found[1] * 1e9 if found and device.kind == "gpu" else 0.0)


def _best(product: LocalProduct) -> float:
    """Seconds of one product: the shortest mean of some rounds, each of MEASURE_S."""
    once = max(product.seconds(2) / 2, 1e-6)  # also touches every page
    repeats = max(3, int(MEASURE_S / once))
    return min(product.seconds(repeats) / repeats for _ in range(ROUNDS))


def operation_s(ggml: Ggml, device: Device, threads: int = 0) -> float:
    """What one operation costs that has nothing to do: a long chain of them less a short one, per operation."""
    long, short = _Chain(ggml, device, CHAIN, threads), _Chain(ggml, device, 1, threads)
    try:
        times = [chain.seconds() for chain in (long, short)]
    finally:
        long.close()
        short.close()
    return max(0.0, (times[0] - times[1]) / (CHAIN - 1))


class _Chain:
    """x + x, that + x, …: ``count`` additions of 64 numbers, each waiting for the one before."""

    def __init__(self, ggml: Ggml, device: Device, count: int, threads: int) -> None:
        self.ggml = ggml
        self.backend = Backend(ggml, device, threads)
        self.context = ggml.context((count + 8) * 1024 + (1 << 20))
        x = ggml.ggml_new_tensor_1d(self.context, F32, 64)
        tensors = [x]
        for _ in range(count):
            tensors.append(ggml.ggml_add(self.context, tensors[-1], x))
        self.graph = ggml.ggml_new_graph_custom(self.context, count + 8, False)
        ggml.ggml_build_forward_expand(self.graph, tensors[-1])
        step = max(self.backend.alignment, 256)
        buffer = self.backend.alloc(step * len(tensors))
        if buffer is None:
            raise DeviceError(f"{device.name} has no room for {step * len(tensors):,} bytes.")
        self.buffer = buffer
        self._keep = [LocalTensor(int(c_void_p(t).value or 0), buffer, step * at) for at, t in enumerate(tensors)]

    def seconds(self) -> float:
        """The shortest of some runs."""
        best = float("inf")
        for _ in range(30):
            began = time.perf_counter()
            self.ggml.ggml_backend_graph_compute_async(self.backend.handle, self.graph)
            self.backend.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    def close(self) -> None:
        self.buffer.close()
        self.ggml.ggml_free(self.context)
        self.backend.close()
