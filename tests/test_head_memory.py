"""The estimate before a load is what the load then takes; too little memory is said before anything is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hydra.errors import DeviceError
from hydra.head import loading, memory
from hydra.head.engine import Engine
from hydra.head.llama import DEVICE_CPU, DEVICE_GPU, Device
from hydra.head.spec import Endpoint
from hydra.peer.launch import start_peer
from tests.engine_support import toy, toy_spec


@pytest.mark.parametrize(("name", "kind", "slots"), [("toy", "mtp", 1), ("toy", "mtp", 4), ("toy", "none", 1),
                                                    ("toy-llama", "lookup", 2), ("toy-gemma", "none", 1)])
def test_the_estimate_is_what_the_load_takes(name: str, kind: str, slots: int) -> None:
    with start_peer(device="CPU", threads=1) as peer:
        spec = toy_spec(toy(name), kind, parallel=slots, endpoints=(Endpoint("mini", f"127.0.0.1:{peer.port}"),),
                        layers={"mini": 2})
        place = loading.find_devices(spec, loading.read_shape(spec.model_path))
        expected = loading.estimate(spec, place).by_node["mini"].to_dict()
        with Engine(spec) as engine:
            real = engine.info["memory"]
    assert real["mini"] == expected
    assert min(expected["model"], expected["context"], expected["compute"]) > 0
    assert expected["draft_context"] == 0  # the draft block is the head's
    assert (real["head"]["draft_context"] > 0) == (kind == "mtp")
    assert (real["head"]["draft_compute"] > 0) == (kind == "mtp")


def test_the_context_is_accounted_for() -> None:
    """Twice the context is twice the KV, of the target and of the draft."""
    sizes = []
    for ctx_size in (1024, 2048):
        spec = toy_spec(toy(), "mtp", ctx_size=ctx_size)
        sizes.append(loading.estimate(spec, loading.find_devices(spec, loading.read_shape(spec.model_path))))
    small, large = (estimate.by_node["head"] for estimate in sizes)
    assert large.draft_context == 2 * small.draft_context > 0
    kv = 2 * 2 * 64 * 2 * 2 * 1024  # K and V, 2 heads of 64, f16, 2 attention layers, 1024 cells
    assert large.context - small.context == kv


def device(kind: int, free: int, total: int) -> Device:
    return cast(Device, SimpleNamespace(kind=kind, description="Toy card", memory=lambda: (free, total)))


def estimate_of(total: int) -> memory.Estimate:
    estimate = memory.Estimate()
    estimate.add("CUDA0", "big", (total // 2, total // 4, total // 4), draft=False)
    return estimate


def test_too_little_memory_is_said_with_numbers() -> None:
    gib = 1 << 30
    devices: dict[str, Any] = {"CUDA0": device(DEVICE_GPU, 10 * gib, 12 * gib)}
    memory.check(estimate_of(9 * gib), devices, {"CUDA0": "big"})
    said = r"big: Toy card has 10\.00 of 12\.00 GiB free; this needs 11\.00 \(weights 5\.50"
    with pytest.raises(DeviceError, match=said):
        memory.check(estimate_of(11 * gib), devices, {"CUDA0": "big"})
    with pytest.raises(DeviceError):
        memory.check(estimate_of(10 * gib - memory.MARGIN_BYTES // 2), devices, {"CUDA0": "big"})
    # A device that does not report its memory, and main memory, are not judged.
    for other in (device(DEVICE_GPU, 0, 0), device(DEVICE_CPU, gib, gib)):
        memory.check(estimate_of(11 * gib), {"CUDA0": other}, {})


def test_a_load_that_cannot_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []

    def refuse(*_: object) -> None:
        raise DeviceError("too little")

    monkeypatch.setattr(memory, "check", refuse)
    with pytest.raises(DeviceError, match="too little"):
        Engine(toy_spec(toy()), lambda event: stages.append(event["stage"]))
    assert stages == ["peers", "memory"]
