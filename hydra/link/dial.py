"""Opens the head's connection to a peer: TCP, TLS where configured, and the question whether it speaks the link.

Knows nothing of what is sent afterwards. A stock peer (or an older hydra) closes the connection at our first byte, and
the caller is told so by the absence of terms: it connects again and speaks plain ggml-RPC.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraError, PeerError, PeerUnreachable, ProtocolError, VersionMismatch
from hydra.link import frames
from hydra.link.frames import Flag, Hello
from hydra.link.settings import LinkSettings
from hydra.security import Tunnel, client_context, connect, load_identity


@dataclass
class Upstream:
    """A connection to the peer. terms: None where it speaks plain ggml-RPC only."""

    sock: socket.socket
    terms: Hello | None
    tunnel: Tunnel | None = None

    def shutdown(self) -> None:
        """Wakes whoever waits in it; safe from any thread, more than once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self.sock.close()
        if self.tunnel is not None:
            self.tunnel.close()


def offer(settings: LinkSettings) -> Hello:
    """What this head would like."""
    flags = Flag.DELTAS | (Flag.HALF if settings.activations == "f16" else Flag(0))
    return Hello(flags=int(flags), silence_ms=int(settings.silence_s * 1000))


def dial(settings: LinkSettings, plain: bool = False) -> Upstream:
    """A connection to the peer, negotiated unless ``plain``.

    Raises: PeerUnreachable when nobody answers, PeerError for a failed TLS handshake, VersionMismatch when both speak
    the link and have no version in common.
    """
    if not plain:
        upstream = _open(settings)
        try:
            upstream.terms = _negotiate(upstream.sock, settings)
        except HydraError:
            upstream.close()
            raise
        if upstream.terms is not None:
            return _ready(upstream, settings)
        upstream.close()
    return _ready(_open(settings), settings)


def _ready(upstream: Upstream, settings: LinkSettings) -> Upstream:
    sock = upstream.sock
    # The kernel waits, not a poll before each call; the tick is for looking at the clock.
    sock.settimeout(None)
    tick = min(0.5, settings.silence_s / 4)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(tick))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(settings.silence_s))
    return upstream


def timeval(seconds: float) -> bytes:
    """What SO_RCVTIMEO and SO_SNDTIMEO take."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))


def _open(settings: LinkSettings) -> Upstream:
    where = f"Peer {settings.name} ({settings.address})"
    try:
        sock = socket.create_connection((settings.host, settings.port), timeout=settings.connect_s)
    except TimeoutError as exc:
        raise PeerUnreachable(
            f"{where} does not answer within {settings.connect_s:g} s.",
            "Check that the box is on and that its firewall lets this port through.",
        ) from exc
    except ConnectionRefusedError as exc:
        raise PeerUnreachable(f"{where} refuses the connection: nothing listens.", "Start `hydra up` there.") from exc
    except OSError as exc:
        raise PeerUnreachable(f"{where} cannot be reached: {exc.strerror or exc}.") from exc
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.silence_s * 1000))
    if not settings.tls_dir:
        return Upstream(sock, None)
    identity = load_identity(Path(settings.tls_dir), settings.node)
    encrypted = connect(sock, client_context(identity), settings.name, settings.connect_s)
    # Two threads use the connection at once, which OpenSSL's objects do not allow: the tunnel's one thread is between.
    ours, theirs = socket.socketpair()
    return Upstream(ours, None, Tunnel(encrypted, theirs, f"tls-{settings.name}"))


def _negotiate(sock: socket.socket, settings: LinkSettings) -> Hello | None:
    """The terms; None where the other end is no link."""
    sock.settimeout(settings.connect_s)
    data = b""
    try:
        sock.sendall(offer(settings).pack())
        while len(data) < frames.HELLO.size:
            piece = sock.recv(frames.HELLO.size - len(data))
            if not piece:
                break
            data += piece
    except TimeoutError as exc:
        raise PeerError(
            f"Peer {settings.name} ({settings.address}) accepted the connection but does not answer.",
            "It hangs, or serves another head (a stock server serves one at a time).",
        ) from exc
    except OSError:
        return None  # closed with a reset: bytes of ours were still unread
    if not data:
        return None
    try:
        terms = Hello.unpack(data)
    except ProtocolError:
        return None
    if not terms.version:
        raise VersionMismatch(
            f"Peer {settings.name} ({settings.address}) speaks no version of the link that this head does "
            f"({frames.VERSION}).",
            "Install the same hydra release on both, or set link.enabled = false.",
        )
    return terms
