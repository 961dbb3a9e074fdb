"""hydra/doctor/link.py: a peer whose replies wait for Nagle's algorithm is found by its signature."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from hydra.bench.nagle import without_nodelay
from hydra.bench.stock import StockServer
from hydra.doctor import kernels, link
from hydra.doctor.finding import Finding
from hydra.errors import HydraError
from hydra.rpc.client import Client
from tests.doctor_support import listener, one


def check(port: int, **options: object) -> list[Finding]:
    with Client("127.0.0.1", port, timeout_s=30) as client:
        return list(link.check(client, "peer mini", 0.0, **options))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(link, "BANDWIDTH_S", 0.02)
    monkeypatch.setattr(link, "STEPS", 30)


def test_a_good_peer():
    with listener() as running:
        found = check(running.port)
    assert one(found, "compute").status == "ok"
    assert found[1].status in ("ok", "warn"), "a busy machine may be slow; stalled it is not"
    assert found[2].data["up_bytes_s"] > 0 and found[2].data["down_bytes_s"] > 0


def test_a_server_without_nodelay_is_found():
    """llama.cpp's own server with the option taken away from its accepted sockets: the bug that hydra comes from."""
    with StockServer() as stock:
        try:
            # The connection first: the option is then taken from it before the first step.
            with Client(stock.host, stock.port, timeout_s=30) as client, without_nodelay(stock.pid):
                found = list(link.check(client, "peer mini", 0.0))
        except HydraError as error:
            pytest.skip(str(error))
    assert found[1].status == "fail" and "Nagle" in found[1].seen and "TCP_NODELAY" in found[1].fix
    assert found[1].data["stalled"] >= 6


def trips(*ms: float, floor: float = 0.1) -> link.Trips:
    return link.Trips(ms, floor)


@pytest.mark.parametrize(("measured", "status"), [
    (trips(*[0.2] * 40), "ok"),
    (trips(*[43.0] * 40), "fail"),
    (trips(*[0.4] * 25, *[41.0] * 15), "fail"),
    (trips(*[203.0] * 10, *[1.0] * 10), "fail"),
    (trips(*[43.0] * 40, floor=42.5), "warn"),  # a far peer: 43 ms are its distance
    (trips(*[0.3] * 38, 55.0, 41.0), "warn"),  # two late steps are Wi-Fi, no Nagle
    (trips(*[14.0] * 40, floor=2.0), "warn"),
])
def test_signature(measured, status):
    assert link.judge_trips("x", measured).status == status


@pytest.mark.parametrize(("up", "down", "speed", "status"), [
    (117e6, 117e6, 1000, "ok"), (11.5e6, 11.5e6, 1000, "warn"), (11.5e6, 11.5e6, 0, "warn"), (300e6, 290e6, 0, "ok"),
    (110e6, 40e6, 1000, "warn"), (900e6, 900e6, 10_000, "ok"),
])
def test_bandwidth_against_the_interface(up, down, speed, status):
    assert link.judge_bandwidth("x", up, down, speed).status == status


def test_a_peer_that_computes_wrongly():
    with listener() as running, Client("127.0.0.1", running.port) as client:
        graph = kernels.RemoteGraph(client, 64, 128, 16)
        right = [kernels.whole_numbers(16, 128, 50 + s) @ kernels.whole_numbers(64, 128, s).T for s in range(3)]
        assert link.check_compute(graph, "mini", expected=right).status == "ok"
        right[2][3, 5] += 1  # one bit of one number, as a sick memory cell makes it
        found = link.check_compute(graph, "mini", expected=right)
    assert found.status == "fail" and found.data["wrong"] == 1


def test_the_floor_is_the_kernels():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert 0 < link.kernel_rtt_ms(sock) < 1000


def test_nan_counts_as_different():
    values = np.ones((4, 4), np.float32)
    spoilt = values.copy()
    spoilt[0, 0] = np.nan
    assert kernels.differing(values, values) == 0 and kernels.differing(spoilt, values) == 1
