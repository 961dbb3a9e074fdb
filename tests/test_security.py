"""Certificates and both ends of a TLS link: what is refused, and with which words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hydra import security
from hydra.errors import ConfigError, PeerError

WAIT_S = 10.0


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "certs"
    security.init_certs(directory, ["head", "peer"])
    return directory


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext | None, node: str = "peer", allowed: tuple[str, ...] | None = None
) -> tuple[PeerError | str, PeerError | None]:
    """(what the server said of the client, what the client said of the server); the client's name where all is well."""
    listener = socket.create_server(("127.0.0.1", 0))
    said: list[PeerError | None] = [None]

    def ask() -> None:
        sock = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        if client is None:
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"\x0e" + bytes(32))
                sock.recv(1)
            return
        try:
            with security.connect(sock, client, node, WAIT_S) as wrapped:
                # TLS 1.3: the server's verdict on this side's certificate comes after this side's handshake is over
                wrapped.settimeout(WAIT_S)
                wrapped.recv(1)
        except PeerError as error:
            said[0] = error
        except OSError as error:
            said[0] = security._explain(error, "the server", "server")

    thread = threading.Thread(target=ask)
    thread.start()
    sock, _ = listener.accept()
    try:
        wrapped, name = security.accept(sock, server, allowed, WAIT_S)
        with wrapped, contextlib.suppress(OSError):  # the client may have hung up on us already
            wrapped.sendall(b"x")
        verdict: PeerError | str = name
    except PeerError as error:
        verdict = error
    thread.join(WAIT_S)
    listener.close()
    assert not thread.is_alive()
    return verdict, said[0]


def context(certs: Path, node: str, server: bool) -> ssl.SSLContext:
    identity = security.load_identity(certs, node)
    return security.server_context(identity) if server else security.client_context(identity)


def test_init_writes_a_ca_and_a_pair_for_each_node_and_keeps_what_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    first = security.init_certs(directory, ["a"])
    assert sorted(path.name for path in first) == ["a.key", "a.pem", "ca.key", "ca.pem"]
    before = (directory / "a.pem").read_bytes(), (directory / "ca.pem").read_bytes()
    second = security.init_certs(directory, ["a", "b"])
    assert sorted(path.name for path in second) == ["b.key", "b.pem"]
    assert ((directory / "a.pem").read_bytes(), (directory / "ca.pem").read_bytes()) == before
    renewed = security.init_certs(directory, ["a"], renew=True)
    assert sorted(path.name for path in renewed) == ["a.key", "a.pem"]
    assert (directory / "a.pem").read_bytes() != before[0]
    security.load_identity(directory, "a")


def test_keys_are_for_their_owner_only(certs: Path) -> None:
    assert {(certs / name).stat().st_mode & 0o777 for name in ("ca.key", "head.key", "peer.key")} == {0o600}
    assert certs.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "..", "a/b", "ca"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot have certificate files"):
        security.init_certs(tmp_path, [name])


def test_both_ends_know_each_other_by_name(certs: Path) -> None:
    verdict, said = handshake(context(certs, "peer", True), context(certs, "head", False))
    assert (verdict, said) == ("head", None)


def test_a_certificate_of_another_ca_is_refused_on_both_sides(certs: Path, tmp_path: Path) -> None:
    security.init_certs(tmp_path, ["head", "peer"])
    verdict, _ = handshake(context(certs, "peer", True), context(tmp_path, "head", False))
    assert isinstance(verdict, PeerError)
    _, said = handshake(context(tmp_path, "peer", True), context(certs, "head", False))
    assert said is not None and "issued by another CA" in said.message


def test_a_stranger_of_the_same_ca_is_refused_by_name(certs: Path) -> None:
    verdict, _ = handshake(context(certs, "peer", True), context(certs, "head", False), allowed=("office",))
    assert isinstance(verdict, PeerError) and "'head'; expected office" in verdict.message
    _, said = handshake(context(certs, "peer", True), context(certs, "head", False), node="other")
    assert said is not None and "'peer'; expected other" in said.message


def test_a_client_without_a_certificate_is_refused_and_told(certs: Path) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(certs / "ca.pem")
    verdict, said = handshake(context(certs, "peer", True), bare)
    assert isinstance(verdict, PeerError) and "sent no certificate" in verdict.message
    assert said is not None and "certificate" in said.message


def test_an_expired_certificate_is_named(tmp_path: Path, certs: Path) -> None:
    security.init_certs(tmp_path, ["head", "peer"], days=-1)
    with pytest.raises(ConfigError, match=r"peer\.pem expired on"):
        security.load_identity(tmp_path, "peer")
    valid = security.Identity("head", tmp_path / "ca.pem", tmp_path / "head.pem", tmp_path / "head.key", None)  # type: ignore[arg-type]
    security.init_certs(tmp_path, ["peer"], renew=True)
    verdict, _ = handshake(context(tmp_path, "peer", True), security.client_context(valid))
    assert isinstance(verdict, PeerError) and "its certificate has expired" in verdict.message


def test_a_plain_connection_is_refused_with_its_first_byte(certs: Path) -> None:
    verdict, _ = handshake(context(certs, "peer", True), None)
    assert isinstance(verdict, PeerError) and "does not speak TLS" in verdict.message and "0x0e" in verdict.message


def test_older_tls_is_refused(certs: Path) -> None:
    old = context(certs, "head", False)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    verdict, said = handshake(context(certs, "peer", True), old)
    assert isinstance(verdict, PeerError) and "TLS 1.3" in verdict.message
    assert said is not None and "TLS 1.3" in said.message


def test_a_silent_client_is_given_up(certs: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()):
        sock, _ = listener.accept()
        with pytest.raises(PeerError, match="took too long"):
            security.accept(sock, context(certs, "peer", True), timeout_s=0.1)
        assert sock.fileno() == -1
    listener.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "ca.pem").unlink(), r"ca\.pem is missing"),
        (lambda d: (d / "a.pem").unlink(), r"a\.pem is missing"),
        (lambda d: (d / "a.key").unlink(), r"a\.key is missing"),
        (lambda d: (d / "a.key").chmod(0o644), "can be read by other users"),
        (lambda d: (d / "a.pem").write_bytes((d / "b.pem").read_bytes()), "certificate of 'b', not of node 'a'"),
        (lambda d: (d / "a.key").write_bytes((d / "b.key").read_bytes()), r"a\.key is not the key of"),
        (lambda d: (d / "a.pem").write_text("nonsense"), "is not a certificate"),
        (lambda d: (d / "a.key").write_text("nonsense"), "is not a private key"),
    ],
)
def test_files_that_cannot_work_are_named(tmp_path: Path, spoil: object, words: str) -> None:
    security.init_certs(tmp_path, ["a", "b"])
    spoil(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=words):
        security.load_identity(tmp_path, "a")


def test_a_certificate_of_another_ca_is_found_before_any_connection(tmp_path: Path, certs: Path) -> None:
    security.init_certs(tmp_path, ["peer"])
    (tmp_path / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="was not issued by"):
        security.load_identity(tmp_path, "peer")


def test_a_ca_without_its_key_makes_nothing(tmp_path: Path) -> None:
    security.init_certs(tmp_path, ["a"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match="made on the box that has both"):
        security.init_certs(tmp_path, ["b"])


def test_the_tunnel_carries_both_ways_and_ends_with_either_side(certs: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sent = os.urandom(9_000_000)  # more than both backlogs: it must flow, not be held
    received: list[bytes] = []
    client_context = context(certs, "head", False)

    def ask() -> None:
        with security.connect(socket.create_connection(listener.getsockname()), client_context, "peer") as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(sent)
            answer = bytearray()
            while len(answer) < len(sent):
                answer += sock.recv(1 << 20)
            received.append(bytes(answer))

    thread = threading.Thread(target=ask)
    thread.start()
    sock, _ = listener.accept()
    plain, name, tunnel = security.terminate(sock, context(certs, "peer", True), timeout_s=WAIT_S)
    assert name == "head"
    plain.settimeout(WAIT_S)
    data = bytearray()
    while len(data) < len(sent):
        data += plain.recv(1 << 20)
    assert hashlib.sha256(data).digest() == hashlib.sha256(sent).digest()
    plain.sendall(data)
    thread.join(WAIT_S)
    assert received and received[0] == sent
    assert plain.recv(1) == b""  # the client has gone, so this side ends too
    tunnel.thread.join(WAIT_S)
    assert not tunnel.thread.is_alive()
    plain.close()
    listener.close()


def test_closing_the_tunnel_frees_both_sockets(certs: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[ssl.SSLSocket] = []
    client_context = context(certs, "head", False)

    def ask() -> None:
        clients.append(security.connect(socket.create_connection(listener.getsockname()), client_context, "peer"))

    thread = threading.Thread(target=ask)
    thread.start()
    sock, _ = listener.accept()
    plain, _, tunnel = security.terminate(sock, context(certs, "peer", True), timeout_s=WAIT_S)
    thread.join(WAIT_S)
    tunnel.close()
    assert not tunnel.thread.is_alive()
    clients[0].settimeout(WAIT_S)
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        assert clients[0].recv(1) == b""
    clients[0].close()
    plain.close()
    listener.close()


def test_importing_it_does_not_load_cryptography() -> None:
    script = "import sys, hydra.security; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
