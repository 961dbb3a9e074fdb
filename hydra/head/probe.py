"""Asks a peer how it is, without blocking the loop: up, refusing, silent, unreachable, or of another version.

A hydra peer answers GET /health on its compute port. A stock ggml-rpc-server closes such a connection; it is then asked
with HELLO, and only while our own engine holds no connection to it, because it serves one client at a time. Knows
nothing of engines or requests.
Source for the kinds of failure: ../shared/docs/reports.md, kept in words by docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra import __version__
from hydra.errors import HydraError, PeerError, VersionMismatch
from hydra.rpc import wire
from hydra.rpc.client import Client

State = Literal["up", "degraded", "refused", "silent", "unreachable", "mismatch"]

MAX_REPLY_BYTES = 1 << 20


@dataclass(frozen=True)
class PeerTarget:
    """Where a peer is. `tls` is the context of a client that may talk to it, None for plain TCP."""

    name: str
    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class PeerReport:
    """What one probe saw. `instance` changes when the peer's program was started anew, None where it does not say."""

    target: PeerTarget
    state: State
    detail: str = ""
    hint: str = ""
    rtt_ms: float | None = None
    instance: str | None = None
    stock: bool = False
    health: dict[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return self.state == "up"

    @property
    def words(self) -> str:
        return f"peer {self.target.name} ({self.target.endpoint}) {self.detail}"


async def probe(target: PeerTarget, timeout_s: float = 2.0, *, engine_connected: bool = False) -> PeerReport:
    """One look at a peer; never raises for what the network does.

    engine_connected: our engine may hold the peer's connection, so a stock server is not asked beyond a TCP connect.
    """
    start = time.monotonic()
    try:
        status, body = await asyncio.wait_for(get_json(target, "/health"), timeout_s)
    except _NotHttp:
        return await _probe_stock(target, timeout_s, engine_connected)
    except asyncio.TimeoutError:
        return PeerReport(
            target,
            "silent",
            f"does not answer within {timeout_s:g} s",
            "It hangs, is stopped, or a firewall drops its packets.",
        )
    except ConnectionRefusedError:
        return PeerReport(
            target, "refused", "refuses the connection: nothing listens there", "Start `hydra up` on that box."
        )
    except ssl.SSLError as error:
        return PeerReport(
            target,
            "mismatch",
            f"fails the TLS handshake ({error.reason or error})",
            "Check security.tls and the certificates on both boxes.",
        )
    except socket.gaierror:
        return PeerReport(
            target,
            "unreachable",
            f"has a name that cannot be resolved ({target.host})",
            "Use its IP address in hydra.toml.",
        )
    except OSError as error:
        return PeerReport(
            target, "unreachable", f"cannot be reached ({error.strerror or error})", "Check the cable and the address."
        )
    return _judge(target, status, body, (time.monotonic() - start) * 1e3)


def _judge(target: PeerTarget, status: int, body: dict[str, Any], rtt_ms: float) -> PeerReport:
    instance = next((str(body[key]) for key in ("instance", "worker_pid") if key in body), None)
    version = body.get("version")
    if isinstance(version, str) and version != __version__:
        return PeerReport(
            target,
            "mismatch",
            f"runs hydra {version}, this head {__version__}",
            "Install the same hydra release on both boxes.",
            rtt_ms,
            instance,
            health=body,
        )
    protocol = str(body.get("protocol", "")).split(".")
    needed = [str(number) for number in wire.PROTOCOL_VERSION]
    if protocol != [""] and protocol[:2] != needed[:2]:
        return PeerReport(
            target,
            "mismatch",
            f"speaks ggml-RPC {'.'.join(protocol)}, this head {'.'.join(needed)}",
            "Install the same hydra release on both boxes.",
            rtt_ms,
            instance,
            health=body,
        )
    if status != 200:
        why = body.get("reason") or body.get("state") or f"HTTP {status}"
        return PeerReport(
            target, "degraded", f"is up but cannot compute ({why})", "Its log says why.", rtt_ms, instance, health=body
        )
    return PeerReport(target, "up", "is up", "", rtt_ms, instance, health=body)


async def _probe_stock(target: PeerTarget, timeout_s: float, engine_connected: bool) -> PeerReport:
    if engine_connected:
        return PeerReport(target, "up", "accepts connections (no hydra peer: nothing more can be asked)", stock=True)
    loop = asyncio.get_running_loop()
    start = time.monotonic()
    try:
        await loop.run_in_executor(None, _hello, target, timeout_s)
    except VersionMismatch as error:
        return PeerReport(target, "mismatch", error.message, error.hint, stock=True)
    except PeerError as error:
        return PeerReport(target, "silent", error.message, error.hint, stock=True)
    except HydraError as error:
        return PeerReport(target, "degraded", error.message, error.hint, stock=True)
    return PeerReport(target, "up", "is up (a stock server)", "", (time.monotonic() - start) * 1e3, stock=True)


def _hello(target: PeerTarget, timeout_s: float) -> None:
    Client(target.host, target.port, timeout_s=timeout_s).close()


class _NotHttp(Exception):
    """It accepted, and then did not speak HTTP."""


async def get_json(target: PeerTarget, path: str) -> tuple[int, dict[str, Any]]:
    """GET `path` from a peer: (status, JSON object). No timeout of its own. Raises OSError, _NotHttp."""
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    try:
        host = target.endpoint
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\nConnection: close\r\n\r\n".encode()
        )
        try:
            data = await reader.read(MAX_REPLY_BYTES)
            while data and len(data) < MAX_REPLY_BYTES:
                more = await reader.read(MAX_REPLY_BYTES - len(data))
                if not more:
                    break
                data += more
        except ConnectionResetError as error:
            raise _NotHttp from error
    finally:
        writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not head.startswith(b"HTTP/") or len(parts) < 2 or not parts[1].isdigit():
        raise _NotHttp
    try:
        value = json.loads(body) if body.strip() else {}
    except ValueError:
        value = {}
    return int(parts[1]), value if isinstance(value, dict) else {"value": value}


async def stats(target: PeerTarget, timeout_s: float) -> dict[str, Any]:
    """A hydra peer's counters (GET /stats); empty where it has none or does not answer."""
    try:
        status, body = await asyncio.wait_for(get_json(target, "/stats"), timeout_s)
    except (_NotHttp, asyncio.TimeoutError, OSError):
        return {}
    return body if status == 200 else {}
