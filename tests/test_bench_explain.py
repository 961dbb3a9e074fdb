"""hydra/bench/{device,explain}.py: a device is measured, and a token's time is split into parts that add up."""

from __future__ import annotations

import json

import pytest

from hydra import cli
from hydra.bench import device, explain, synthetic
from hydra.doctor import link


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return synthetic.model("toy", directory=tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(device, "MEASURE_S", 0.02)
    monkeypatch.setattr(device, "ROUNDS", 2)


def test_device_is_measured():
    found = device.measure("CPU", mib=32, threads=1)
    assert found.kind == "cpu" and found.matrix_bytes > 30 << 20
    assert 1e7 < found.bandwidth_bytes_s < 1e13 and 0 <= found.op_s < 0.1
    assert found.toml.startswith("bandwidth_gbs = ")


def test_device_command(capsys):
    assert cli.run(["bench", "device", "--device", "CPU", "--mib", "16", "-t", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["device"] == "CPU" and found["bandwidth_bytes_s"] > 0
    assert cli.run(["bench", "device", "--device", "CUDA9"]) == 4
    assert cli.run(["bench", "device", "--type", "q9"]) == 2


def work(model, **fields: object) -> explain.Work:
    return explain.Work(str(model), "192.0.2.1:50052", 2, **fields)  # type: ignore[arg-type]


INNER = {"step_s": 0.050, "python_s": 0.001, "peer_s": 0.020, "depth": 100, "layers": {"peer": 2, "head": 2}}


def test_parts_add_up(model):
    found = explain.split(work(model), INNER, 0.002, 0.0004, 1e9, 1e9, {"head": 0.0, "peer": 0.0})
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_s)
    parts = {part.name: part for part in found.parts}
    assert parts["head"].seconds == pytest.approx(0.027) and parts["wire"].limit_s == 0.0004
    assert parts["peer"].limit_s > 0 and "MB at 1.0 GB/s" in parts["peer"].limit


@pytest.mark.parametrize(("changes", "wire_s", "name"), [
    ({"peer_s": 0.040, "step_s": 0.060}, 0.0, "peer"), ({"peer_s": 0.001, "step_s": 0.060}, 0.0, "head"),
    ({"peer_s": 0.001, "step_s": 0.050}, 0.043, "wire"), ({"python_s": 0.030, "peer_s": 0.005}, 0.0, "python"),
])
def test_the_verdict_names_the_worst_part(model, changes, wire_s, name):
    found = explain.split(work(model), {**INNER, **changes}, wire_s, 0.0001, 1e9, 1e9, {"head": 0.0, "peer": 0.0})
    assert f"lost in {name}:" in found.verdict


def test_nothing_to_win(model):
    probe = explain.split(work(model), INNER, 0.0, 0.0, 1e9, 1e9, {"head": 0.0, "peer": 0.0})
    limits = {part.name: part.limit_s for part in probe.parts}
    inner = {**INNER, "peer_s": limits["peer"], "python_s": 0.0, "step_s": limits["peer"] + limits["head"]}
    found = explain.split(work(model), inner, 0.0, 0.0, 1e9, 1e9, {"head": 0.0, "peer": 0.0})
    assert found.verdict.startswith("Every part is near its limit")


def test_a_peer_without_clocks_has_the_rest(model):
    found = explain.split(work(model), {**INNER, "peer_s": 0.0}, 0.002, 0.0004, 1e9, 0.0, {"head": 0.0, "peer": 0.0})
    parts = {part.name: part for part in found.parts}
    assert not found.peer_clocks and parts["peer"].seconds > 0.03
    assert parts["peer"].limit == "its bandwidth is not known"
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_s)


def test_for_real(model, monkeypatch):
    monkeypatch.setattr(link, "STEPS", 10)
    measured = explain.run(explain.Work(str(model), peer_layers=2, threads=1, tokens=8), head_bandwidth=5e9,
                           peer_bandwidth=5e9)
    assert measured.peer_clocks and measured.layers == {"peer": 2, "head": 2}
    assert all(part.seconds >= 0 for part in measured.parts)
    assert {part.name for part in measured.parts} == {"head", "peer", "wire", "python"}
    assert 0 < measured.step_s < 60


def test_a_failure_has_its_words():
    with pytest.raises(Exception, match="cannot be loaded|cannot be read|does not exist"):
        explain._inner(explain.Work("/nonexistent/model.gguf"))
