"""The cards as the driver sees them (NVML), against what ggml sees of them and what hydra.toml says.

nvidia-ml-py is an extra; without it, or without a driver, there is one finding that says so. What ggml saw comes from
the inner process (hydra.doctor.inside) as findings' data: this process loads no CUDA.

Rules: the NVML API reference (nvmlClocksEventReasons, nvmlDeviceGetMaxPcieLinkGeneration); the CUDA C++ programming
guide on binary compatibility (code for X.y runs on X.z with z >= y; PTX runs on all later).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.doctor.finding import Finding, fail, ok, skip, warn

HOT_C = 87
FULL_SHARE = 0.5
# nvmlClocksEventReasons; the power cap is normal under load, the others are not.
_REASONS = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
_POWER_CAP, _IDLE = 0x04, 0x01


@dataclass(frozen=True)
class Seen:
    """A device that ggml listed: name (CUDA0), description (the card's), archs of the build ((86, 120) …)."""

    name: str
    description: str
    archs: tuple[int, ...]
    total_bytes: int


def seen_by_ggml(findings: Iterable[Finding]) -> list[Seen]:
    """The CUDA devices among the findings of the inner process."""
    found = []
    for finding in findings:
        name = str(finding.data.get("name", ""))
        if finding.check.startswith("device CUDA"):
            features: Mapping[str, str] = finding.data.get("features") or {}
            archs = tuple(int(number) // 10 for number in re.findall(r"\d+", features.get("ARCHS", "")))
            found.append(Seen(name, finding.seen.split(",")[0], archs, int(finding.data.get("total_bytes", 0))))
    return found


def load_nvml() -> Any:
    """The NVML bindings, or None where they are not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def visible_cards(nvml: Any = None, env: Mapping[str, str] | None = None) -> list[tuple[str, int, int]]:
    """(name, free, total bytes) of each card that CUDA may use, by the driver; empty without one or without NVML."""
    env = os.environ if env is None else env
    nvml = nvml or load_nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        indices = list(range(nvml.nvmlDeviceGetCount()))
        visible = env.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            wanted = [int(part) for part in visible.split(",") if part.strip().isdigit()]
            indices = [index for index in wanted if index in indices]
        found = []
        for index in indices:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append((_text(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total)))
        return found
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def check(ggml: list[Seen], *, wants_gpu: bool, nvml: Any = None,
          env: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """All findings about cards. nvml: the bindings (for tests); env: os.environ unless given."""
    env = os.environ if env is None else env
    yield from visible_devices(env)
    nvml = nvml or load_nvml()
    if nvml is None:
        yield skip("gpu", "driver", "nvidia-ml-py is not installed (pip install 'hydra-llm[gpu]'): the cards are not "
                   "looked at")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        if wants_gpu or ggml:
            yield fail("gpu", "driver", f"the NVIDIA driver does not answer ({exc})",
                       "Install or reload the driver (nvidia-smi must work), and restart the box after an update.")
        else:
            yield skip("gpu", "driver", "no NVIDIA driver here, and none is asked for")
        return
    try:
        yield from _driver(nvml)
        cards = [_Card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        yield from compare(cards, ggml, env)
        archs = next((device.archs for device in ggml if device.archs), ())
        for card in cards:
            yield from card.check(archs)
    finally:
        nvml.nvmlShutdown()


def visible_devices(env: Mapping[str, str]) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, where they surprise."""
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    if value.strip() in ("", "-1", "NoDevFiles"):
        yield fail("gpu", "CUDA_VISIBLE_DEVICES", f"it is {value!r}, which hides every card",
                   "Unset it (unset CUDA_VISIBLE_DEVICES), also in the service's environment.")
    else:
        yield warn("gpu", "CUDA_VISIBLE_DEVICES", f"it is {value!r}: ggml numbers only those, from CUDA0 on",
                   "Mind that the numbers in hydra.toml are ggml's, or unset it.")


def _driver(nvml: Any) -> Iterator[Finding]:
    version = _text(nvml.nvmlSystemGetDriverVersion())
    cuda = _maybe(nvml, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
    words = f"NVIDIA {version}"
    if cuda:
        words += f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    yield ok("gpu", "driver", words, driver=version, cuda=cuda)


def compare(cards: list[_Card], ggml: list[Seen], env: Mapping[str, str]) -> Iterator[Finding]:
    """As many cards for ggml as for the driver, and in the same order?"""
    mine, theirs = [card.name for card in cards], [device.description for device in ggml]
    if not ggml:
        yield fail("gpu", "cards", f"the driver has {', '.join(mine) or 'none'}; ggml sees none of them",
                   "CUDA_VISIBLE_DEVICES, a driver older than the CUDA that llama-cpp-python was built with, or a "
                   "build without CUDA.")
    elif len(mine) != len(theirs) and "CUDA_VISIBLE_DEVICES" not in env:
        yield warn("gpu", "cards", f"the driver has {len(mine)} ({', '.join(mine)}), ggml sees {len(theirs)} "
                   f"({', '.join(theirs)})", "A card that CUDA cannot use: too old for this build, or in use.")
    elif len(mine) > 1 and len(mine) == len(theirs) and mine != theirs:
        pairs = ", ".join(f"{device.name} = {device.description}" for device in ggml)
        yield warn("gpu", "cards", f"ggml numbers them otherwise than nvidia-smi: {pairs}",
                   "Name the device that you mean in hydra.toml by ggml's number, or set CUDA_DEVICE_ORDER=PCI_BUS_ID.")
    else:
        yield ok("gpu", "cards", f"{', '.join(theirs)}: the same for the driver and for ggml")


class _Card:
    """One card, asked through NVML; figures that a card does not have are left out."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml = nvml
        self.handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = _text(nvml.nvmlDeviceGetName(self.handle))
        self.check_name = f"GPU {index}" + f" ({self.name})"

    def ask(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.nvml, name, None)
        return None if function is None else _maybe(self.nvml, lambda: function(self.handle, *arguments))

    def check(self, archs: tuple[int, ...]) -> Iterator[Finding]:
        yield from self._memory()
        yield from self._capability(archs)
        yield from self._slot()
        yield from self._health()

    def _memory(self) -> Iterator[Finding]:
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        if memory is None:
            return
        users = self._users()
        words = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
        words += f"; used by {', '.join(users)}" if users else ""
        data = {"free_bytes": int(memory.free), "total_bytes": int(memory.total), "users": users}
        strangers = [user for user in users if "hydra" not in user and "python" not in user]
        if memory.free < FULL_SHARE * memory.total and (strangers or not users):
            yield warn("gpu", f"{self.check_name}: memory", words,
                       "End what else uses the card, or give this node fewer layers (`hydra plan`).", **data)
        else:
            yield ok("gpu", f"{self.check_name}: memory", words, **data)

    def _users(self) -> list[str]:
        import psutil

        rows = {}
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self.ask(name) or ():
                rows[process.pid] = process.usedGpuMemory or 0
        users = []
        for pid, used in sorted(rows.items(), key=lambda row: -row[1]):
            name = "?"
            with contextlib.suppress(psutil.Error):
                name = psutil.Process(pid).name()
                name = "hydra" if "hydra" in " ".join(psutil.Process(pid).cmdline()) else name
            users.append(f"{name} (process {pid}{f', {used / 2**30:.1f} GiB' if used else ''})")
        return users

    def _capability(self, archs: tuple[int, ...]) -> Iterator[Finding]:
        found = self.ask("nvmlDeviceGetCudaComputeCapability")
        if found is None or not archs:
            return
        major, minor = found
        number = 10 * major + minor
        built = ", ".join(f"{arch // 10}.{arch % 10}" for arch in archs)
        words = f"compute capability {major}.{minor}; this build has code for {built}"
        name = f"{self.check_name}: kernels"
        if number in archs or any(arch // 10 == major and arch <= number for arch in archs):
            yield ok("gpu", name, words, capability=number, archs=list(archs))
        elif any(arch < number for arch in archs):
            yield warn("gpu", name, f"{words}: kernels for it are compiled at every first start",
                       f"Rebuild llama-cpp-python with CMAKE_CUDA_ARCHITECTURES={number} (bash build/demo.sh does).",
                       capability=number, archs=list(archs))
        else:
            yield fail("gpu", name, f"{words}: nothing in it runs on this card",
                       f"Rebuild llama-cpp-python with CMAKE_CUDA_ARCHITECTURES={number}.", capability=number,
                       archs=list(archs))

    def _slot(self) -> Iterator[Finding]:
        width, widest = self.ask("nvmlDeviceGetCurrPcieLinkWidth"), self.ask("nvmlDeviceGetMaxPcieLinkWidth")
        speed, fastest = self.ask("nvmlDeviceGetCurrPcieLinkGeneration"), self.ask("nvmlDeviceGetMaxPcieLinkGeneration")
        if not width or not widest:
            return
        words = f"PCIe generation {speed} x{width} now, {fastest} x{widest} at most"
        data = {"generation": speed, "width": width, "max_generation": fastest, "max_width": widest}
        if width < widest:
            yield warn("gpu", f"{self.check_name}: slot", words,
                       "Loading is slower; decode hardly is. Another slot, or reseat the card and its riser.", **data)
        else:
            idle = " (idle cards lower it)" if speed and fastest and speed < fastest else ""
            yield ok("gpu", f"{self.check_name}: slot", words + idle, **data)

    def _health(self) -> Iterator[Finding]:
        temperature = self.ask("nvmlDeviceGetTemperature", 0)
        limit = self.ask("nvmlDeviceGetPowerManagementLimit")
        default = self.ask("nvmlDeviceGetPowerManagementDefaultLimit")
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        slowed = [words for bit, words in _REASONS.items() if (reasons or 0) & bit]
        words = f"{temperature} °C" if temperature is not None else "no thermometer"
        if limit and default:
            words += f", power limit {limit / 1000:.0f} W of {default / 1000:.0f} W by default"
        words += ", held at its power limit" if (reasons or 0) & _POWER_CAP else ""
        data = {"temperature": temperature, "power_limit_mw": limit, "default_mw": default, "reasons": reasons}
        name = f"{self.check_name}: clocks"
        if slowed or (temperature or 0) >= HOT_C:
            yield warn("gpu", name, f"{words}; slowed down: {', '.join(slowed) or 'very hot'}",
                       "Clean its fans and filters, let air in; check its power cables.", **data)
        elif limit and default and limit < 0.7 * default:
            yield warn("gpu", name, words, "Prefill is slower with so low a limit (nvidia-smi -pl raises it).", **data)
        else:
            yield ok("gpu", name, words, **data)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _maybe(nvml: Any, ask: Callable[[], Any]) -> Any:
    """A figure that some cards and slices of cards do not have; None then."""
    try:
        return ask()
    except nvml.NVMLError:
        return None
