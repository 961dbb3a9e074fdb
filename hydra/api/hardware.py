"""This box's devices for `hydra ps`: what the driver says of its GPUs, else what the kernel says of its memory.

Never loads llama.cpp: the API's process must not. nvidia-ml-py is an extra; without it or without a driver there is the
CPU.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil

log = logging.getLogger("hydra.api")

# A driver call takes a millisecond or more; `hydra ps --watch` and a dashboard may ask often.
_FRESH_S = 1.0
_last: tuple[float, list[dict[str, Any]]] = (0.0, [])


def local_devices() -> list[dict[str, Any]]:
    """name, memory_used, memory_total (bytes), utilisation (percent or None), temperature (°C or None) of each
    device."""
    global _last
    now = time.monotonic()
    if now - _last[0] > _FRESH_S or not _last[1]:
        _last = (now, _gpus() or [_cpu()])
    return _last[1]


def _gpus() -> list[dict[str, Any]]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.debug("NVML: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "memory_used": int(memory.used),
        "memory_total": int(memory.total),
        "utilisation": _maybe(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "temperature": _maybe(nvml, lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
    }


def _maybe(nvml: Any, ask: Any) -> int | None:
    """A figure that some cards and slices of cards do not have."""
    try:
        return int(ask())
    except nvml.NVMLError:
        return None


def _cpu() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "name": "CPU",
        "memory_used": int(memory.total - memory.available),
        "memory_total": int(memory.total),
        "utilisation": int(psutil.cpu_percent()),
        "temperature": None,
    }
