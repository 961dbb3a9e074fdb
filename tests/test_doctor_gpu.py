"""hydra/doctor/gpu.py against a made-up NVML: every surprise that a card can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hydra.config import NodeConfig
from hydra.doctor import fit, gpu
from hydra.doctor.finding import Finding, ok
from tests.doctor_support import of, one

GIB = 1 << 30


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of pynvml as is asked; `cards` are dicts, a figure that is missing raises as NVML does."""

    NVMLError = NVMLError

    def __init__(self, *cards: dict[str, Any], dead: bool = False) -> None:
        self.cards, self.dead, self.open = cards, dead, 0

    def nvmlInit(self) -> None:
        if self.dead:
            raise NVMLError("Driver/library version mismatch")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.cards[index]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def ask(handle: dict[str, Any], *_: Any) -> Any:
            key = name.removeprefix("nvmlDeviceGet")
            if key not in handle:
                raise NVMLError("Not Supported")
            return handle[key]

        return ask


def card(**changes: Any) -> dict[str, Any]:
    values = {"Name": "NVIDIA GeForce RTX 3060", "MemoryInfo": SimpleNamespace(total=12 * GIB, free=11 * GIB),
              "CudaComputeCapability": (8, 6), "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16,
              "CurrPcieLinkGeneration": 1, "MaxPcieLinkGeneration": 4, "Temperature": 45,
              "PowerManagementLimit": 170_000, "PowerManagementDefaultLimit": 170_000,
              "CurrentClocksEventReasons": 1, "ComputeRunningProcesses": [], "GraphicsRunningProcesses": []}
    return {**values, **changes}


def seen(name: str = "CUDA0", description: str = "NVIDIA GeForce RTX 3060",
         archs: tuple[int, ...] = (86, 120)) -> gpu.Seen:
    return gpu.Seen(name, description, archs, 12 * GIB)


def check(*cards: dict[str, Any], ggml: list[gpu.Seen] | None = None,
          env: dict[str, str] | None = None) -> list[Finding]:
    nvml = FakeNvml(*cards)
    found = list(gpu.check([seen()] if ggml is None else ggml, wants_gpu=True, nvml=nvml, env=env or {}))
    assert nvml.open == 0, "NVML is closed again"
    return found


def test_a_good_card():
    found = check(card())
    assert {finding.status for finding in found} == {"ok"}
    assert one(found, "gpu", "driver").seen == "NVIDIA 580.95.05, CUDA up to 13.0"
    assert "idle cards lower it" in one(found, "gpu", "slot").seen


def test_both_cards_of_the_reference_rig_are_in_the_build():
    found = check(card(), card(Name="NVIDIA GeForce RTX 5060 Ti", CudaComputeCapability=(12, 0)),
                  ggml=[seen(), seen("CUDA1", "NVIDIA GeForce RTX 5060 Ti")])
    assert [finding.status for finding in of(found, "gpu", "kernels")] == ["ok", "ok"]


@pytest.mark.parametrize(("capability", "archs", "status"), [
    ((8, 9), (86,), "ok"),  # code for 8.6 runs on 8.9
    ((12, 0), (86,), "warn"),  # needs PTX, compiled at the first start
    ((8, 6), (89, 120), "fail"),  # nothing older in the build
    ((7, 5), (86, 120), "fail"),
])
def test_compute_capability_against_the_build(capability, archs, status):
    found = one(check(card(CudaComputeCapability=capability), ggml=[seen(archs=archs)]), "gpu", "kernels")
    assert found.status == status
    assert status == "ok" or f"CMAKE_CUDA_ARCHITECTURES={capability[0]}{capability[1]}" in found.fix


def test_driver_that_does_not_answer():
    found = list(gpu.check([], wants_gpu=True, nvml=FakeNvml(dead=True), env={}))
    assert one(found, "gpu", "driver").status == "fail" and "version mismatch" in found[0].seen
    found = list(gpu.check([], wants_gpu=False, nvml=FakeNvml(dead=True), env={}))
    assert found[0].status == "skip", "a box without a card that needs none"


def test_bindings_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(gpu, "load_nvml", lambda: None)
    (found,) = gpu.check([], wants_gpu=True, env={})
    assert found.status == "skip" and "hydra-llm[gpu]" in found.seen


def test_ggml_sees_no_card():
    assert one(check(card(), ggml=[]), "gpu", "cards").status == "fail"


def test_ggml_sees_fewer_cards():
    assert "ggml sees 1" in one(check(card(), card()), "gpu", "cards").seen


def test_ggml_numbers_them_otherwise():
    found = check(card(), card(Name="NVIDIA H200"), ggml=[seen("CUDA0", "NVIDIA H200"), seen("CUDA1")])
    assert one(found, "gpu", "cards").status == "warn" and "PCI_BUS_ID" in one(found, "gpu", "cards").fix


@pytest.mark.parametrize(("value", "status"), [("", "fail"), ("-1", "fail"), ("1", "warn")])
def test_cuda_visible_devices(value, status):
    found = check(card(), env={"CUDA_VISIBLE_DEVICES": value})
    assert one(found, "gpu", "CUDA_VISIBLE_DEVICES").status == status


def test_narrow_slot():
    found = one(check(card(CurrPcieLinkWidth=4)), "gpu", "slot")
    assert found.status == "warn" and "x4 now, 4 x16 at most" in found.seen


@pytest.mark.parametrize("changes", [
    {"CurrentClocksEventReasons": 0x40}, {"Temperature": 93}, {"CurrentClocksEventReasons": 0x80},
    {"PowerManagementLimit": 100_000},
])
def test_slowed_down(changes):
    assert one(check(card(**changes)), "gpu", "clocks").status == "warn"


def test_power_cap_alone_is_normal():
    found = one(check(card(CurrentClocksEventReasons=0x04)), "gpu", "clocks")
    assert found.status == "ok" and "power limit" in found.seen


def test_older_nvml_has_another_name_for_the_reasons():
    old = card(CurrentClocksThrottleReasons=0x40)
    del old["CurrentClocksEventReasons"]
    assert one(check(old), "gpu", "clocks").status == "warn"


def test_memory_that_someone_else_uses():
    user = SimpleNamespace(pid=2**22 + 5, usedGpuMemory=9 * GIB)
    full = SimpleNamespace(total=12 * GIB, free=2 * GIB)
    found = one(check(card(MemoryInfo=full, ComputeRunningProcesses=[user])), "gpu", "memory")
    assert found.status == "warn" and "9.0 GiB" in found.seen and "hydra plan" in found.fix


def test_a_slice_of_a_card_tells_little():
    """MIG: most figures are refused; what is told is still shown."""
    found = check({"Name": "NVIDIA H200 MIG 1g.18gb", "MemoryInfo": SimpleNamespace(total=18 * GIB, free=17 * GIB)},
                  ggml=[seen(description="NVIDIA H200 MIG 1g.18gb")])
    assert {finding.status for finding in found} == {"ok"}
    assert one(found, "gpu", "clocks").seen == "no thermometer"


def test_what_ggml_saw_comes_from_its_findings():
    found = gpu.seen_by_ggml([
        ok("gpu", "device CUDA0", "NVIDIA RTX 3060, 11.0 of 12.0 GiB free", name="CUDA0",
           features={"ARCHS": "860,1200"}, total_bytes=12 * GIB),
        ok("system", "device CPU", "some CPU", name="CPU")])
    assert found == [gpu.Seen("CUDA0", "NVIDIA RTX 3060", (86, 120), 12 * GIB)]


def test_cards_for_the_plan(monkeypatch):
    one, other = card(), card(Name="NVIDIA H200", MemoryInfo=SimpleNamespace(total=140 * GIB, free=139 * GIB))
    assert gpu.visible_cards(FakeNvml(one), {}) == [("NVIDIA GeForce RTX 3060", 11 * GIB, 12 * GIB)]
    assert [c[0] for c in gpu.visible_cards(FakeNvml(one, other), {"CUDA_VISIBLE_DEVICES": "1,7"})] == ["NVIDIA H200"]
    assert gpu.visible_cards(FakeNvml(), {}) == [] == gpu.visible_cards(FakeNvml(dead=True), {})
    assert gpu.visible_cards(FakeNvml({"Name": "a slice"}), {}) == [], "one that does not tell its memory"

    monkeypatch.setattr(gpu, "load_nvml", lambda: FakeNvml(one, other))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def place(role: str, device: str, **fields: Any) -> Any:
        node = NodeConfig(name="n", role=role, host="192.0.2.1", device=device, **fields)
        return fit.place_of(node, "n", offline=True)

    assert place("head", "auto").memory_bytes == 150 * GIB, "a head uses all its cards"
    assert place("peer", "auto").memory_bytes == 11 * GIB and place("peer", "CUDA1").memory_bytes == 139 * GIB
    assert place("peer", "CUDA0", memory_gib=8.0).memory_bytes == 8 * GIB
    assert not place("peer", "CPU").gpu
