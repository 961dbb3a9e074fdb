"""hydra/hardware.py: figures of the right card, and an answer however the driver behaves."""

from __future__ import annotations

import threading
import time

import pytest

from hydra import hardware


def card(name: str, used: int) -> dict[str, object]:
    return {"name": name, "memory_used": used, "memory_total": 100, "utilisation": used, "temperature": 50}


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(hardware, "_last", (0.0, []))
    monkeypatch.setattr(hardware, "_asking", None)


def test_a_box_without_cards(monkeypatch):
    monkeypatch.setattr(hardware, "_gpus", list)
    device = hardware.local_devices()[0]
    assert device["name"] == "CPU" and 0 < device["memory_used"] < device["memory_total"]
    assert hardware.figures_of("CPU", "any", "cpu")["memory_total"] == device["memory_total"]
    assert hardware.figures_of("CUDA0", "a card that the driver does not list", "gpu") == {}


def test_the_right_card(monkeypatch):
    monkeypatch.setattr(hardware, "_gpus", lambda: [card("RTX 3060", 1), card("RTX 5060", 2), card("RTX 3060", 3)])
    assert hardware.figures_of("CUDA0", "RTX 5060", "gpu")["memory_used"] == 2, "by name, whatever its number"
    assert hardware.figures_of("CUDA0", "RTX 3060", "gpu")["memory_used"] == 1
    assert hardware.figures_of("CUDA1", "RTX 3060", "gpu")["memory_used"] == 3, "two of one name: by number"
    assert set(hardware.figures_of("CUDA0", "RTX 5060", "gpu")) == set(hardware.FIGURES)


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch):
    go_on, calls = threading.Event(), []

    def hang() -> list[dict[str, object]]:
        calls.append(1)
        go_on.wait(30)
        return [card("RTX 3060", 1)]

    monkeypatch.setattr(hardware, "_gpus", hang)
    monkeypatch.setattr(hardware, "_PATIENCE_S", 0.05)
    assert [hardware.local_devices()[0]["name"] for _ in range(3)] == ["CPU"] * 3
    assert len(calls) == 1, "and not a thread more for each question"
    go_on.set()
    deadline = time.monotonic() + 10
    while hardware.local_devices()[0]["name"] == "CPU" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hardware.local_devices()[0]["name"] == "RTX 3060"
