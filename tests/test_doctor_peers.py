"""hydra/doctor/{ask,peers,own}.py: every fault is really there, and each gives a finding of its own."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
import sys
import time

import pytest

from hydra.bench.process import free_port
from hydra.bench.stock import StockServer
from hydra.doctor import ask, own, peers
from hydra.doctor.ask import NoAnswer, Target
from hydra.doctor.finding import Finding
from hydra.peer import sockets
from hydra.rpc import wire
from tests.doctor_support import answer, full_backlog, listener, of, one, server


def target(port: int, host: str = "127.0.0.1") -> Target:
    return Target("mini", host, port)


def trouble(host: str, port: int, timeout_s: float = 1.0) -> NoAnswer:
    with pytest.raises(NoAnswer) as caught:
        ask.get(target(port, host), "/health", timeout_s)
    return caught.value


def look(where: Target, **options: object) -> list[Finding]:
    seen = peers.look(where, **options)  # type: ignore[arg-type]
    try:
        return [*seen.findings, *peers.sockets(seen)]
    finally:
        seen.close()


# ---- a peer that does not answer: a different finding for each reason -----------------------------------------------


def test_refusing_peer():
    found = trouble("127.0.0.1", free_port())
    assert found.trouble == "refused" and "Start `hydra up`" in found.hint


def test_firewalled_peer():
    with full_backlog() as port:
        found = trouble("127.0.0.1", port)
    # Loopback answers a ping where this user may send one; where not, nothing shows that the box is on.
    assert found.trouble == ("dropped" if ask.sign_of_life("127.0.0.1") else "down")
    assert "no answer to the connection attempt within 1 s" in found.message


def test_firewalled_peer_that_answers_arp(monkeypatch):
    monkeypatch.setattr(ask, "sign_of_life", lambda host: "it answers ARP with 00:00:5e:00:53:01 on eth0")
    with full_backlog() as port:
        found = trouble("127.0.0.1", port)
    assert found.trouble == "dropped" and f"allow TCP port {port}" in found.hint


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_peer_that_is_down(monkeypatch, number):
    def unreachable(*_, **__):
        raise OSError(number, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(ask, "ping", lambda *_: None)
    found = trouble("192.0.2.77", 50052)
    assert found.trouble == "down" and "neither ARP nor ping" in found.message and "Is it on" in found.hint


def test_peer_that_is_down_in_a_network_of_its_own():
    """A real unanswered ARP request, in a network namespace where there is one other end and nobody at it."""
    script = (
        "import subprocess as s\n"
        "for c in ('link add v0 type veth peer name v1', 'address add 192.0.2.1/24 dev v0', 'link set v0 up',\n"
        "          'link set v1 up'): s.run(['ip', *c.split()], check=True, capture_output=True)\n"
        "from hydra.doctor import ask\n"
        "try: ask.get(ask.Target('mini', '192.0.2.2', 50052), '/health', 5.0)\n"
        "except ask.NoAnswer as e: print(e.trouble, e.message)\n"
    )
    try:
        done = subprocess.run(["unshare", "-rn", sys.executable, "-c", script], capture_output=True, text=True,
                              timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr[-200:]}")
    # Linux gives up on ARP after about 3 s and says so; a slower kernel runs into our own limit.
    assert done.stdout.startswith("down ") and "neither ARP nor ping" in done.stdout


def test_hung_peer():
    with server(lambda sock: time.sleep(2.5)) as port:
        found = trouble("127.0.0.1", port)
    assert found.trouble == "silent" and "accepted" in found.message and "hangs" in found.hint


def test_unknown_name():
    found = trouble("no-such-box.invalid", 50052)
    assert found.trouble == "unresolved" and "no-such-box.invalid" in found.message


def test_peer_that_does_not_know_us():
    def slam(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with server(slam) as port:
        found = look(target(port))
    assert one(found, "peer").status == "fail" and "does not allow this address" in one(found, "peer").fix


def test_another_program_on_the_port():
    with server(answer({"hello": "world"})) as port:
        found = one(look(target(port)), "peer")
    assert found.status == "fail" and "is no hydra peer" in found.seen


def test_own_peer_that_is_not_started_is_no_failure():
    assert one(look(target(free_port()), own=True), "peer").status == "skip"


# ---- a peer that answers --------------------------------------------------------------------------------------------


def test_a_good_peer():
    with listener(config_digest="00112233aabbccdd") as running:
        found = look(target(running.port), digest="00112233aabbccdd")
    assert {finding.status for finding in found} == {"ok"}, found
    assert one(found, "config").seen.startswith("the same on both boxes")
    assert "this compute connection" in " ".join(f.check for f in of(found, "sockets"))
    assert "ggml-RPC 7.0.0 there, 7.0.0 here (101 ops)" in one(found, "protocol").seen


def test_accepted_sockets_without_options():
    """The fault that hydra comes from, on a running peer: each accepted connection is a failure."""
    with listener(lambda sock: None) as running:
        found = of(look(target(running.port)), "sockets")
    assert [finding.status for finding in found] == ["fail", "fail"]
    assert all("TCP_NODELAY OFF" in finding.seen and "hydra up" in finding.fix for finding in found)


def test_accepted_sockets_without_keepalive():
    def only_nodelay(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    with listener(only_nodelay) as running:
        found = of(look(target(running.port)), "sockets")
    assert [finding.status for finding in found] == ["warn", "warn"]


def test_another_hydra_toml_there():
    with listener(config_digest="ffffffffffffffff") as running:
        found = one(look(target(running.port), digest="00112233aabbccdd"), "config")
    assert found.status == "fail" and "ffffffffffffffff there" in found.seen


def test_stock_server_is_recognised():
    with StockServer() as stock:
        found = look(target(stock.port))
    assert one(found, "peer").data == {"stock": True}
    assert one(found, "protocol").status == "ok" and one(found, "sockets").status == "skip"


def test_all_connections_taken():
    with listener(max_connections=1) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as head:
            head.sendall(wire.HEADER.pack(wire.HELLO_BYTE, wire.CAPS_SIZE) + bytes(wire.CAPS_SIZE))
            assert head.recv(1)
            found = look(target(running.port))
    assert one(found, "protocol").status == "warn" and "taken by heads" in one(found, "protocol").fix
    assert any("head at 127.0.0.1" in finding.check for finding in of(found, "sockets"))


HEALTH = {"state": "ok", "protocol": "7.0.0", "connections": 0, "max_connections": 4}


def test_a_peer_that_cannot_compute():
    body = {**HEALTH, "state": "degraded", "reason": "the device worker ended by SIGABRT"}
    with server(answer(body, "503 Service Unavailable")) as port:
        found = one(look(target(port)), "peer", "peer mini")
    assert found.status == "fail" and "SIGABRT" in found.seen


def test_a_worker_that_died_is_told():
    with server(answer({**HEALTH, "restarts": 3})) as port:
        assert "died 3 times" in one(look(target(port)), "peer").seen


@pytest.mark.parametrize(("skew", "status"), [(0.0, "ok"), (-90.0, "warn"), (3600.0, "warn")])
def test_clock_skew(skew, status):
    with server(lambda sock: answer({**HEALTH, "time": time.time() + skew})(sock)) as port:
        found = one(look(target(port)), "network")
    assert found.status == status
    assert status == "ok" or ("ahead of" if skew > 0 else "behind") in found.seen


def test_clock_skew_from_the_date_header():
    with server(answer(HEALTH, headers="Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n")) as port:
        assert one(look(target(port)), "network").status == "warn"


# ---- our own end ----------------------------------------------------------------------------------------------------


def test_our_accepted_sockets():
    assert own.accepted_socket().status == "ok"
    assert own.accepted_socket(lambda sock: None).status == "fail", "the kernel's own default is the fault"


def test_options_that_are_not_told():
    assert peers.judge("x", {}).status == "skip"
    with socket.socket() as sock:
        sockets.make_ready(sock)
        assert peers.judge("x", sockets.read_options(sock)).status == "ok"
