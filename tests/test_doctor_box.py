"""hydra/doctor/{system,network,listening,own}.py: this box and the way to the other, with each fault made."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hydra.config import NodeConfig
from hydra.doctor import listening, network, own, system
from tests.doctor_support import full_backlog

GIB = 1 << 30


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---- the box --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "available", "swapped", "status"), [
    (32 * GIB, 24 * GIB, 0, "ok"), (32 * GIB, GIB, 0, "warn"), (32 * GIB, 20 * GIB, 8 * GIB, "warn"),
    (4 * GIB, 900 << 20, 0, "warn"), (32 * GIB, 20 * GIB, 200 << 20, "ok"),
])
def test_memory(total, available, swapped, status):
    assert system.judge_memory(total, available, 16 * GIB, swapped).status == status


def test_limits_of_a_process_that_has_little():
    """The real limits, lowered in a child."""
    code = ("import resource as r\nfrom hydra.doctor import system\n"
            "r.setrlimit(r.RLIMIT_NOFILE, (128, 128)); r.setrlimit(r.RLIMIT_MEMLOCK, (4096, 4096))\n"
            "print([f.status for f in system.limits()])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['warn', 'warn']", done.stderr


def test_unlimited_is_no_fault():
    assert system.judge_files(resource.RLIM_INFINITY).status == "ok"
    assert system.judge_locked(resource.RLIM_INFINITY).seen == "no limit"


def test_disk_of_the_weight_cache(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "kept").write_bytes(bytes(1000))
    good = system.disk(tmp_path / "w", 1)
    assert good.status == "ok" and good.data["kept_bytes"] == 1000
    assert system.disk(tmp_path / "not" / "yet", 1).status == "ok", "it is made when it is needed"
    assert system.disk(tmp_path / "w", 1 << 60).status == "warn"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_disk_that_cannot_be_written():
    assert system.disk(Path("/proc/nowhere"), 1).status == "warn"


def processor(root: Path, governor: str, driver: str, load: str = "0.10") -> dict[str, str]:
    write(root, proc__loadavg=f"{load} 0.1 0.1 1/100 1",
          sys__devices__system__cpu__cpu0__cpufreq__scaling_governor=governor + "\n",
          sys__devices__system__cpu__cpu0__cpufreq__scaling_driver=driver + "\n")
    return {finding.check: finding.status for finding in system.processor(root)}


@pytest.mark.parametrize(("governor", "driver", "status"), [
    ("performance", "acpi-cpufreq", "ok"), ("powersave", "acpi-cpufreq", "warn"), ("powersave", "intel_pstate", "ok"),
    ("schedutil", "acpi-cpufreq", "ok"), ("powersave", "amd-pstate-epp", "ok"),
])
def test_governor(tmp_path, governor, driver, status):
    assert processor(tmp_path, governor, driver)["CPU governor"] == status


def test_no_governor_and_a_busy_box(tmp_path):
    write(tmp_path, proc__loadavg="999.00 1 1 1/1 1")
    found = {finding.check: finding.status for finding in system.processor(tmp_path)}
    assert found == {"processor": "warn", "CPU governor": "skip"}


# ---- the way --------------------------------------------------------------------------------------------------------


def nic(root: Path, **files: str) -> network.Interface:
    values = {"speed": "1000", "duplex": "full", "mtu": "1500", "operstate": "up", "statistics__rx_errors": "0",
              "statistics__tx_errors": "0", "statistics__rx_packets": "100000", "statistics__tx_packets": "100000"}
    write(root, **{f"eth7__{name}": text for name, text in {**values, **files}.items()})
    return network.interface("eth7", root)


@pytest.mark.parametrize(("files", "status", "words"), [
    ({}, "ok", "1000 Mbit/s, full duplex, MTU 1500"), ({"speed": "100"}, "warn", "100 Mbit/s"),
    ({"duplex": "half"}, "warn", "half duplex"), ({"wireless__status": "0"}, "warn", "Wi-Fi"),
    ({"operstate": "down", "speed": "-1"}, "fail", "it is down"),
    ({"statistics__rx_errors": "5000"}, "warn", "5000 errors"),
    ({"mtu": "576"}, "warn", "MTU 576"), ({"speed": "-1"}, "ok", "speed not told"), ({"speed": "2500"}, "ok", "2500"),
])
def test_interface(tmp_path, files, status, words):
    found = network.judge_interface("x", nic(tmp_path, **files))
    assert found.status == status and words in found.seen


def test_an_interface_of_which_nothing_is_told_is_not_called_down(tmp_path):
    found = network.judge_interface("x", network.interface("eth7", tmp_path))
    assert found.status == "ok" and "speed not told, MTU not told" in found.seen


def test_the_way_to_loopback():
    assert network.interface_to("127.0.0.1") == "lo"
    assert network.interface_to("no-such-box.invalid") == ""


def test_path_mtu():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        here = network.path_mtu("x", sock, 0)
        assert here.status == "ok" and here.data["path_mtu"] > 1000
        assert network.path_mtu("x", sock, 1 << 20).status == "warn", "the way takes less than this box's interface"


@pytest.fixture
def resolves(monkeypatch):
    table = {"tower.lan": frozenset({"192.0.2.10"}), "mini.lan": frozenset({"192.0.2.11"}),
             "loop": frozenset({"127.0.1.1"})}
    monkeypatch.setattr(network, "resolve", lambda host: table.get(host, frozenset()))


def test_names(resolves):
    hosts = {"tower": "tower.lan", "mini": "mini.lan", "plain": "192.0.2.12"}
    assert [f.status for f in network.names(hosts, {"mini": ["192.0.2.10", "192.0.2.11"]})] == ["ok", "ok"]
    (first, second) = network.names(hosts, {"mini": ["192.0.2.99", "192.0.2.11"]})
    assert first.status == "fail" and "another address on mini" in first.seen and second.status == "ok"


def test_names_that_mean_nothing(resolves):
    assert [f.status for f in network.names({"a": "nobody.lan"})] == ["fail"]
    (found,) = network.names({"a": "loop", "b": "192.0.2.1"})
    assert found.status == "warn" and "this box alone" in found.seen


# ---- our own port ---------------------------------------------------------------------------------------------------


def node(port: int, **fields: object) -> NodeConfig:
    return NodeConfig(name="mini", role="peer", host="127.0.0.1", port=port, **fields)  # type: ignore[arg-type]


def test_port_taken_by_whom():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = [f for f in own.port(node(port)) if f.check == f"port {port}"]
        assert f"process {os.getpid()}" in found.seen and "127.0.0.1" in found.seen
    assert list(own.port(node(port))) == [], "nobody listens: nothing to say"


def test_port_open_on_every_address():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        (entry,) = listening.listeners(port)
        assert entry.address == "0.0.0.0"


def test_backlog_of_a_process_that_hangs():
    with full_backlog() as port:
        found = [f for f in own.port(node(port)) if "backlog" in f.check and f.check.startswith("port")]
    assert found and found[0].status == "warn" and found[0].data["waiting"] >= 1


def test_overflows_are_read(tmp_path):
    table = tmp_path / "netstat"
    table.write_text("TcpExt: SyncookiesSent ListenOverflows ListenDrops\nTcpExt: 0 7 9\nIpExt: A\nIpExt: 1\n")
    assert listening.overflows(table) == (7, 9)
    assert listening.overflows(tmp_path / "none") == (0, 0)


def test_an_ipv6_listener_is_read():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            (entry,) = listening.listeners(server.getsockname()[1])
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert entry.address == "::1"


def test_api_port_taken_by_another_program(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        entry = listening.Listening("127.0.0.1", port, 0, 4711, "nginx: master process")
        monkeypatch.setattr(own, "listeners", lambda _port: [entry])
        assert [f.status for f in own.api_port(port)] == ["fail"]
        assert next(f.status for f in own.port(node(port))) == "fail"
    monkeypatch.setattr(own, "listeners", lambda _port: [])
    assert list(own.api_port(port)) == []


def test_a_peer_that_listens_everywhere_without_being_told(monkeypatch):
    entry = listening.Listening("0.0.0.0", 50052, 0, 4711, "python -m hydra up")
    monkeypatch.setattr(own, "listeners", lambda _port: [entry])
    monkeypatch.setattr(own, "overflows", lambda: (3, 4))
    assert [f.status for f in own.port(node(50052))] == ["warn", "warn"]
    assert [f.status for f in own.port(node(50052, bind="0.0.0.0"))] == ["ok", "warn"]
