"""Ask a peer over its own port, and tell apart the ways in which it does not answer.

    refused      the box is there and nothing listens on the port (a reset came back)
    dropped      the box is there (it answers ARP or ping) and packets to the port vanish or are rejected: a firewall
    down         nothing answers for that address at all
    silent       the connection is accepted and no byte comes back: hung, stopped, or a stock server that is busy
    closed       the connection is accepted and closed without a byte: a stock server, or one that does not know us
    unresolved   the name has no address

Blocking, each wait bounded. Knows HTTP and TLS as far as a hydra peer speaks them on its compute port; nothing of
findings. Source for what reaches connect(2): tcp(7), ip(7); net/ipv4/icmp.c of Linux for the errno of each ICMP code.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hydra.errors import HydraError, PeerError, PeerUnreachable
from hydra.head.probe import PeerTarget
from hydra.rpc.client import Client

Trouble = Literal["refused", "dropped", "down", "silent", "closed", "unresolved", "tls", "other"]
CONNECT_S = 5.0  # more than the 3 s after which Linux gives up on ARP and says "no route to host"


Target = PeerTarget  # the head's probe and the doctor ask the same peers


class NoAnswer(HydraError):
    """A peer that could not be asked: `trouble` is the kind, the message what was seen."""

    def __init__(self, trouble: Trouble, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.trouble: Trouble = trouble


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. connect_s: the TCP handshake alone; took_s: request to last byte; at: our clock, midway."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    connect_s: float
    took_s: float
    at: float
    local: tuple[str, int] = ("", 0)
    data: dict[str, Any] = field(default_factory=dict)


def connect(target: Target, timeout_s: float = CONNECT_S) -> socket.socket:
    """A connected TCP socket, TLS on it where the target has it. Raises: NoAnswer."""
    try:
        sock = socket.create_connection((target.host, target.port), timeout=timeout_s)
    except socket.gaierror as exc:
        raise NoAnswer("unresolved", f"the name {target.host} has no address here ({exc.strerror})",
                       "Write the box's IP address in hydra.toml, or mend the name service.") from exc
    except TimeoutError as exc:
        raise _unanswered(target, f"no answer to the connection attempt within {timeout_s:g} s") from exc
    except ConnectionRefusedError as exc:
        raise NoAnswer("refused", f"{target.endpoint} refuses the connection: the box is up, nothing listens there",
                       "Start `hydra up` on that box (or correct its port).") from exc
    except ConnectionResetError as exc:  # between our SYN and the end of the handshake: it was accepted and thrown out
        raise _closed() from exc
    except OSError as exc:
        if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
            raise _unanswered(target, f"connecting fails with “{exc.strerror}”") from exc
        raise NoAnswer("other", f"connecting fails with “{exc.strerror or exc}”",
                       "Check the address and the network of this box.") from exc
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target.tls is None:
        return sock
    from hydra import security

    try:
        return security.connect(sock, target.tls, target.name, timeout_s)
    except PeerError as exc:
        raise NoAnswer("tls", exc.message.rstrip("."), exc.hint) from exc


def _closed() -> NoAnswer:
    return NoAnswer("closed", "the connection is accepted and closed without an HTTP answer",
                    "Not a hydra peer, or one that does not allow this address (nodes of hydra.toml, peer.allow): its "
                    "log says so.")


def _unanswered(target: Target, what: str) -> NoAnswer:
    """Down, or there and dropping our packets? Whoever answers ARP or a ping is there."""
    sign = sign_of_life(target.host)
    if sign:
        return NoAnswer("dropped", f"{what}, but the box is there ({sign})",
                        f"A firewall drops it: allow TCP port {target.port} on that box "
                        f"(ufw allow {target.port}/tcp; firewall-cmd --add-port={target.port}/tcp).")
    return NoAnswer("down", f"{what}, and the box answers neither ARP nor ping",
                    "Is it on, on the same network, and is this its address? Cable, switch, Wi-Fi.")


def sign_of_life(host: str, arp: Path = Path("/proc/net/arp")) -> str:
    """How the box at `host` shows that it is on, in words; empty where it shows nothing."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    family, address = infos[0][0], str(infos[0][4][0])
    with contextlib.suppress(OSError):
        for line in arp.read_text().splitlines()[1:]:
            fields = line.split()
            # IP address, HW type, Flags (0x2 = complete), HW address, Mask, Device
            if len(fields) >= 6 and fields[0] == address and int(fields[2], 16) & 2:
                return f"it answers ARP with {fields[3]} on {fields[5]}"
    return f"it answers ping in {seconds * 1e3:.2f} ms" if (seconds := ping(family, address)) is not None else ""


def ping(family: int, address: str, timeout_s: float = 1.0) -> float | None:
    """Seconds to an ICMP echo; None without an answer, or where this user may not send one (ping_group_range)."""
    six = family == socket.AF_INET6
    proto = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
    packet = struct.pack("!BBHHH", 128 if six else 8, 0, 0, os.getpid() & 0xFFFF, 1) + b"hydra doctor ..."
    if not six:
        packet = packet[:2] + struct.pack("!H", _checksum(packet)) + packet[4:]
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            with socket.socket(family, kind, proto) as sock:
                sock.settimeout(timeout_s)
                began = time.perf_counter()
                sock.sendto(packet, (address, 0))
                while (left := timeout_s - (time.perf_counter() - began)) > 0:
                    sock.settimeout(left)
                    data = sock.recv(1024)
                    data = data[20:] if kind == socket.SOCK_RAW and not six else data
                    if data and data[0] == (129 if six else 0):
                        return time.perf_counter() - began
                return None
        except PermissionError:
            continue
        except OSError:
            return None
    return None


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def get(target: Target, path: str, timeout_s: float = CONNECT_S) -> Answer:
    """GET `path` from a hydra peer's port. Raises: NoAnswer."""
    began = time.perf_counter()
    sock = connect(target, timeout_s)
    connected = time.perf_counter()
    try:
        sock.settimeout(timeout_s)
        local = sock.getsockname()
        sent_at = time.time()
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {target.endpoint}\r\nConnection: close\r\n\r\n".encode())
        reply = http.client.HTTPResponse(sock)
        reply.begin()
        body = reply.read(1 << 20)
        now = time.time()
    except TimeoutError as exc:
        raise NoAnswer("silent", f"the connection is accepted, and then no byte comes within {timeout_s:g} s",
                       "It hangs or is stopped (see its log, restart `hydra up` there); a stock server is silent while "
                       "another head uses it.") from exc
    except (http.client.HTTPException, OSError) as exc:
        raise _closed() from exc
    finally:
        sock.close()
    try:
        value = json.loads(body) if body.strip() else {}
    except ValueError:
        value = {}
    return Answer(reply.status, value if isinstance(value, dict) else {}, {k.lower(): v for k, v in reply.getheaders()},
                  connected - began, time.perf_counter() - connected, (sent_at + now) / 2, (local[0], local[1]))


class PeerClient(Client):
    """The small ggml-RPC client over a socket of ours: TLS and the kinds of trouble are then the same as for HTTP."""

    def __init__(self, target: Target, timeout_s: float = CONNECT_S) -> None:
        self.address = target.endpoint
        self.version = None
        self.socket = connect(target, timeout_s)
        self.socket.settimeout(timeout_s)
        try:
            self.hello()
        except BaseException:
            self.close()
            raise


def open_client(target: Target, timeout_s: float = CONNECT_S) -> PeerClient:
    """A connection after HELLO. Raises: NoAnswer where nothing comes back; VersionMismatch, ProtocolError."""
    try:
        return PeerClient(target, timeout_s)
    except PeerUnreachable as exc:
        raise NoAnswer("silent", f"the connection is accepted, and HELLO is not answered within {timeout_s:g} s",
                       "It hangs, or it is a stock server that another head uses (it serves one at a time).") from exc
