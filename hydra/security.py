"""Mutual TLS between the boxes: a private certificate authority, a certificate for each node, both ends of a link.

    ca.pem  ca.key        made once, on the box where `hydra certs init` runs; ca.key need not leave it
    NODE.pem  NODE.key    one pair for each node; a box needs ca.pem and its own pair, nothing else

Who a connection is with is the certificate's common name: the node's name in hydra.toml. Host names and addresses are
not looked at, because on a home network they change. TLS 1.3 only; a certificate that is wrong, expired or missing is
refused with a line that says which. Knows nothing of the protocol inside, and opens no connection of its own.

Source: RFC 8446; RFC 5280 for the extensions. What is promised: docs/security.md.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS = 3650
NODE_DAYS = 825  # what common TLS stacks accept of a leaf certificate
HANDSHAKE_S = 10.0
_PIECE_BYTES = 256 * 1024
_BACKLOG_BYTES = 4 * 1024 * 1024  # of either direction of a tunnel; the sender then waits
_HANDSHAKE_BYTE = 0x16  # the first byte of a TLS connection
_CLOCK_SLACK = dt.timedelta(hours=1)  # two boxes' clocks may differ by this much on the day that certificates are made


@dataclass(frozen=True)
class Identity:
    """One box's certificate files, found to be whole and valid today."""

    node: str
    ca: Path
    cert: Path
    key: Path
    expires: dt.datetime


def init_certs(directory: Path, nodes: Sequence[str], days: int = NODE_DAYS, renew: bool = False) -> list[Path]:
    """The private CA, if there is none yet, and a pair of files for each node that has none; what was written.

    days: how long the nodes' certificates are valid. renew: make the nodes' pairs anew (the CA stays).
    Raises: ConfigError where a name cannot be a file or the directory cannot be written.
    """
    for name in nodes:
        if not name or name in (".", "..", "ca") or os.sep in name or "\0" in name:
            raise ConfigError(f"A node named {name!r} cannot have certificate files.", "Rename it in hydra.toml.")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        written, ca, ca_key = _authority(directory)
        for name in nodes:
            cert, key = directory / f"{name}.pem", directory / f"{name}.key"
            if cert.exists() and key.exists() and not renew:
                continue
            _write_pair(cert, key, *_issue(name, days, ca, ca_key))
            written += [cert, key]
    except OSError as error:
        raise ConfigError(
            f"Cannot write certificates in {directory}: {error.strerror or error}.",
            "Set security.cert_dir to a directory that this user may write.",
        ) from error
    return written


def load_identity(directory: Path, node: str) -> Identity:
    """The files of this node, checked as far as they can be without a connection.

    Raises: ConfigError naming the file that is missing, unreadable, expired, not this node's or not of this CA.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca_path, cert_path, key_path = directory / "ca.pem", directory / f"{node}.pem", directory / f"{node}.key"
    fix = f"Run `hydra certs init` on one box and copy ca.pem, {node}.pem and {node}.key to {directory} on this one."
    texts = {}
    for path in (ca_path, cert_path, key_path):
        try:
            texts[path] = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"security.tls is on, but {path} is missing.", fix) from None
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror or error}.", fix) from error
    if key_path.stat().st_mode & 0o077:
        raise ConfigError(f"{key_path} can be read by other users.", f"Run `chmod 600 {key_path}`.")
    try:
        ca = x509.load_pem_x509_certificate(texts[ca_path])
        cert = x509.load_pem_x509_certificate(texts[cert_path])
    except ValueError as error:
        raise ConfigError(f"{ca_path} or {cert_path} is not a certificate ({error}).", fix) from error
    try:
        key = load_pem_private_key(texts[key_path], None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key_path} is not a private key ({error}).", fix) from error
    if common_name(cert) != node:
        raise ConfigError(f"{cert_path} is the certificate of {common_name(cert)!r}, not of node {node!r}.", fix)
    if key.public_key() != cert.public_key():
        raise ConfigError(f"{key_path} is not the key of {cert_path}.", fix)
    try:
        cert.verify_directly_issued_by(ca)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ConfigError(f"{cert_path} was not issued by {ca_path}.", fix) from error
    now = dt.datetime.now(dt.timezone.utc)
    for path, certificate in ((ca_path, ca), (cert_path, cert)):
        until, since = certificate.not_valid_after_utc, certificate.not_valid_before_utc
        if until < now:
            raise ConfigError(
                f"{path} expired on {until:%Y-%m-%d}.",
                "Run `hydra certs init --renew` on the box that has ca.key, and copy the node's files again.",
            )
        if since > now:
            raise ConfigError(f"{path} is valid only from {since:%Y-%m-%d %H:%M} UTC.", "Check this box's clock.")
    return Identity(node, ca_path, cert_path, key_path, cert.not_valid_after_utc)


def common_name(cert: x509.Certificate) -> str:
    """The node that a certificate is for, or "" where it names none."""
    from cryptography.x509.oid import NameOID

    names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def server_context(identity: Identity) -> ssl.SSLContext:
    """For a peer: TLS 1.3, its own certificate, and one of the same CA required of whoever connects."""
    return _context(ssl.PROTOCOL_TLS_SERVER, identity)


def client_context(identity: Identity) -> ssl.SSLContext:
    """For a head: the same, seen from the other side; the node's name is checked by ``connect``."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity)


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(identity.ca)
        context.load_cert_chain(identity.cert, identity.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS cannot use {identity.cert} ({error}).", "Run `hydra certs init` again.") from error
    return context


def accept(
    sock: socket.socket, context: ssl.SSLContext, nodes: Iterable[str] | None = None, timeout_s: float = HANDSHAKE_S
) -> tuple[ssl.SSLSocket, str]:
    """The server's handshake on an accepted connection: the encrypted socket and the name of the node at its other end.

    nodes: the names that may connect; None for any that the CA has signed. The socket is closed on failure.
    Raises: PeerError that says what was wrong with the other side.
    """
    peer = _address(sock)
    try:
        sock.settimeout(timeout_s)
        first = sock.recv(1, socket.MSG_PEEK)
        if first and first[0] != _HANDSHAKE_BYTE:
            raise PeerError(
                f"{peer} does not speak TLS (its first byte is 0x{first[0]:02x}), and security.tls is on here.",
                "Set security.tls = true in its hydra.toml too; a stock llama.cpp client needs it off.",
            )
        wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True)
    except (PeerError, OSError) as error:
        sock.close()
        if isinstance(error, PeerError):
            raise
        raise _explain(error, peer, "client") from error
    return wrapped, _handshake(wrapped, peer, "client", nodes)


def connect(sock: socket.socket, context: ssl.SSLContext, node: str, timeout_s: float = HANDSHAKE_S) -> ssl.SSLSocket:
    """The client's handshake on a connected socket, which must be with ``node``. The socket is closed on failure.

    Raises: PeerError that says what was wrong, on which side.
    """
    peer = f"node {node} ({_address(sock)})"
    try:
        sock.settimeout(timeout_s)
        wrapped = context.wrap_socket(sock, do_handshake_on_connect=False, suppress_ragged_eofs=True)
    except OSError as error:
        sock.close()
        raise _explain(error, peer, "server") from error
    _handshake(wrapped, peer, "server", (node,))
    return wrapped


def _handshake(wrapped: ssl.SSLSocket, peer: str, role: str, nodes: Iterable[str] | None) -> str:
    try:
        wrapped.do_handshake()
        name = _peer_name(wrapped)
        if nodes is not None and name not in set(nodes):
            wanted = ", ".join(sorted(nodes))
            raise PeerError(
                f"{peer} has a certificate of this CA for {name!r}; expected {wanted}.",
                "Check which box has which files, and the names in hydra.toml.",
            )
    except PeerError:
        wrapped.close()
        raise
    except OSError as error:  # ssl.SSLError is one
        wrapped.close()
        raise _explain(error, peer, role) from error
    wrapped.settimeout(None)
    return name


def _peer_name(wrapped: ssl.SSLSocket) -> str:
    from cryptography import x509

    der = wrapped.getpeercert(binary_form=True)
    return common_name(x509.load_der_x509_certificate(der)) if der else ""


# What OpenSSL calls it -> (what happened, what to do). Alerts are what the other side thought of us.
_REASONS: tuple[tuple[str, str, str], ...] = (
    ("certificate has expired", "its certificate has expired", "Run `hydra certs init --renew` for that node."),
    ("certificate is not yet valid", "its certificate is not valid yet", "Compare the clocks of the two boxes."),
    (
        "self-signed certificate",
        "its certificate was issued by another CA",
        "Both boxes need files of one `hydra certs init`; compare their ca.pem.",
    ),
    (
        "unable to get local issuer",
        "its certificate was issued by another CA",
        "Both boxes need files of one `hydra certs init`; compare their ca.pem.",
    ),
    (
        "signature failure",
        "its certificate was issued by another CA",
        "Both boxes need files of one `hydra certs init`; compare their ca.pem.",
    ),
    ("peer did not return a certificate", "it sent no certificate", "Set security.tls = true in its hydra.toml too."),
    ("alert unknown ca", "it does not know this box's CA", "Compare ca.pem on the two boxes."),
    ("alert certificate expired", "it says that this box's certificate has expired", "Run `hydra certs init --renew`."),
    ("alert certificate required", "it wants a certificate and this box sent none", "Run `hydra certs init`."),
    ("alert bad certificate", "it refuses this box's certificate", "Run `hydra certs init` for this node again."),
    ("wrong version number", "it does not speak TLS", "Set security.tls = true in its hydra.toml too."),
    ("unsupported protocol", "it does not speak TLS 1.3", "Use the same hydra release on both boxes."),
    ("alert protocol version", "it does not speak TLS 1.3", "Use the same hydra release on both boxes."),
    ("http request", "it speaks HTTP without TLS", "Ask for /health with TLS and a client certificate, or on the box."),
)


def _explain(error: OSError, peer: str, role: str) -> PeerError:
    if isinstance(error, TimeoutError):
        return PeerError(f"The TLS handshake with {peer} took too long.", "Is security.tls on at both ends?")
    text = f"{getattr(error, 'verify_message', '')} {getattr(error, 'reason', '')} {error}".lower().replace("_", " ")
    for sign, what, hint in _REASONS:
        if sign in text:
            return PeerError(f"TLS with {peer} failed: {what}.", hint)
    if isinstance(error, (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return PeerError(
            f"The {role} {peer} closed the connection during the TLS handshake.",
            "Its log says why; most often security.tls is off there, or it refuses this box's certificate.",
        )
    return PeerError(f"TLS with {peer} failed: {error.strerror or error}.", "Is security.tls on at both ends?")


def _address(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "a client that has gone"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) and len(address) >= 2 else "a local client"


class Tunnel:
    """Carries bytes between an encrypted socket and a plain one, on one thread, until either side ends.

    One thread for both directions, because OpenSSL's connections are not to be read and written at the same time. It
    owns both sockets. Each direction holds at most a few MiB and then stops reading: a slow reader slows its sender.
    """

    def __init__(self, encrypted: ssl.SSLSocket, plain: socket.socket, name: str = "tls") -> None:
        self._encrypted, self._plain = encrypted, plain
        self._inward = bytearray()  # from the encrypted side to the plain one
        self._outward = bytearray()
        self._encrypted_ended = self._plain_ended = False
        self._wants_write = False
        for sock in (encrypted, plain):
            sock.setblocking(False)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends both sides; the thread notices at once."""
        for sock in (self._encrypted, self._plain):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        if self.thread is not threading.current_thread():
            self.thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._encrypted, selectors.EVENT_READ)
                selector.register(self._plain, selectors.EVENT_READ)
                while not self._finished():
                    moved = self._read_encrypted() | self._write_plain() | self._read_plain() | self._write_encrypted()
                    if not moved:
                        self._wait(selector)
        except OSError:
            pass  # a reset on either side ends both: what reads the plain side sees its end, as without TLS
        finally:
            with contextlib.suppress(OSError):
                self._encrypted.close()
            with contextlib.suppress(OSError):
                self._plain.close()

    def _finished(self) -> bool:
        return (self._encrypted_ended and not self._inward) or (self._plain_ended and not self._outward)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        reading = selectors.EVENT_READ
        encrypted = 0 if self._encrypted_ended or len(self._inward) >= _BACKLOG_BYTES else reading
        encrypted |= selectors.EVENT_WRITE if self._outward and self._wants_write else 0
        plain = 0 if self._plain_ended or len(self._outward) >= _BACKLOG_BYTES else reading
        plain |= selectors.EVENT_WRITE if self._inward else 0
        registered = selector.get_map()
        for sock, events in ((self._encrypted, encrypted), (self._plain, plain)):
            if sock in registered:
                if events:
                    selector.modify(sock, events)
                else:
                    selector.unregister(sock)
            elif events:
                selector.register(sock, events)
        selector.select(30.0)

    def _read_encrypted(self) -> bool:
        if self._encrypted_ended or len(self._inward) >= _BACKLOG_BYTES:
            return False
        try:
            data = self._encrypted.recv(_PIECE_BYTES)
        except (ssl.SSLWantReadError, BlockingIOError):
            return False
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return False
        if not data:
            self._encrypted_ended = True
        self._inward += data
        return True

    def _write_plain(self) -> bool:
        if not self._inward:
            return False
        try:
            sent = self._plain.send(self._inward)
        except BlockingIOError:
            return False
        del self._inward[:sent]
        return sent > 0

    def _read_plain(self) -> bool:
        if self._plain_ended or len(self._outward) >= _BACKLOG_BYTES:
            return False
        try:
            data = self._plain.recv(_PIECE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._plain_ended = True
        self._outward += data
        return True

    def _write_encrypted(self) -> bool:
        if not self._outward:
            return False
        try:
            # An unfinished write must be repeated with the same bytes: they are still the first ones here.
            sent = self._encrypted.send(memoryview(bytes(self._outward[:_PIECE_BYTES])))
        except (ssl.SSLWantWriteError, BlockingIOError):
            self._wants_write = True
            return False
        except ssl.SSLWantReadError:
            self._wants_write = False
            return False
        self._wants_write = False
        del self._outward[:sent]
        return sent > 0


def terminate(
    sock: socket.socket, context: ssl.SSLContext, nodes: Iterable[str] | None = None, timeout_s: float = HANDSHAKE_S
) -> tuple[socket.socket, str, Tunnel]:
    """The server's handshake, and a plain socket that speaks for the encrypted one: what a listener hands on.

    Returns the plain end, the node's name and the tunnel behind it (close it to end the connection). Blocks for as long
    as the handshake takes: call it on a thread of its own. Raises: PeerError, with ``sock`` closed.
    """
    encrypted, name = accept(sock, context, nodes, timeout_s)
    ours, theirs = socket.socketpair()
    return theirs, name, Tunnel(encrypted, ours, f"tls-{name}")


# ---- making certificates


def _authority(directory: Path) -> tuple[list[Path], x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert_path, key_path = directory / "ca.pem", directory / "ca.key"
    if cert_path.exists() and key_path.exists():
        try:
            cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
            key = load_pem_private_key(key_path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{cert_path} or {key_path} is damaged ({error}).", "Move both away to start over."
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise ConfigError(f"{key_path} is not the key of {cert_path}.", "Move both away to start over.")
        return [], cert, key
    if cert_path.exists():
        raise ConfigError(
            f"{cert_path} is here but ca.key is not: certificates are made on the box that has both.",
            "Run `hydra certs init` there, or move ca.pem away to start over with a new CA on every box.",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _certificate("hydra CA", CA_DAYS, key, None, key)
    _write_pair(cert_path, key_path, cert, key)
    return [cert_path, key_path], cert, key


def _issue(
    name: str, days: int, ca: x509.Certificate, ca_key: EllipticCurvePrivateKey
) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return _certificate(name, days, key, ca, ca_key), key


def _certificate(
    name: str,
    days: int,
    key: EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: EllipticCurvePrivateKey,
) -> x509.Certificate:
    """A CA certificate where ``issuer`` is None, else a node's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    is_ca = issuer is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.timezone.utc)
    until = now + dt.timedelta(days=days)
    usage = x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _CLOCK_SLACK)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_ca:
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _write_pair(cert_path: Path, key_path: Path, cert: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # The key first, and never readable by others, not even for a moment.
    for path, data, mode in ((key_path, secret, 0o600), (cert_path, cert.public_bytes(Encoding.PEM), 0o644)):
        fresh = path.with_name(path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        fresh.replace(path)
