"""This box's devices for `hydra ps`: what the driver says of its GPUs, else what the kernel says of its memory; and
how many cores there are.

Never loads llama.cpp: the processes that tell (the head's parent, the peer's listener) must not. nvidia-ml-py is an
extra; without it or without a driver there is the CPU.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from typing import Any

log = logging.getLogger("hydra.hardware")
FIGURES = ("memory_used", "memory_total", "utilisation", "temperature")

# A driver call takes a millisecond or more; `hydra ps --watch` and a dashboard may ask often.
_FRESH_S = 1.0
_PATIENCE_S = 1.0  # a driver whose card has failed may never return; /health has to, all the same
_last: tuple[float, list[dict[str, Any]]] = (0.0, [])
_asking: threading.Thread | None = None


def usable_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_devices() -> list[dict[str, Any]]:
    """name, memory_used, memory_total (bytes), utilisation (percent or None), temperature (°C or None) of each
    device."""
    global _asking
    if time.monotonic() - _last[0] > _FRESH_S or not _last[1]:
        if _asking is None or not _asking.is_alive():
            _asking = threading.Thread(target=_ask, name="nvml", daemon=True)
            _asking.start()
        _asking.join(_PATIENCE_S)
    return _last[1] or [_cpu()]


def _ask() -> None:
    global _last
    _last = (time.monotonic(), _gpus() or [_cpu()])


def figures_of(name: str, description: str, kind: str) -> dict[str, Any]:
    """FIGURES of one ggml device (`CUDA0`, its card's name, `gpu`), as they are now; empty where nobody knows.

    Of several cards of the same name the one with the device's number, in the driver's order.
    """
    if kind == "cpu":
        found = _cpu()
    else:
        same = [gpu for gpu in local_devices() if gpu["name"] == description]
        if not same:
            return {}
        number = int(digits[0]) if (digits := re.findall(r"\d+$", name)) else 0
        found = same[min(number, len(same) - 1)]
    return {key: found[key] for key in FIGURES}


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
    import psutil

    memory = psutil.virtual_memory()
    return {
        "name": "CPU",
        "memory_used": int(memory.total - memory.available),
        "memory_total": int(memory.total),
        "utilisation": int(psutil.cpu_percent()),
        "temperature": None,
    }
