"""`hydra peer`, and what `hydra up` does on a peer box: serve its device in the foreground until told to stop."""

from __future__ import annotations

import logging
from pathlib import Path

from .. import console
from ..errors import ConfigError
from ..peer.settings import PeerSettings
from .ports import ensure_free

log = logging.getLogger("hydra.peer")
UNNAMED = "peer"  # without a hydra.toml there is no other name


def serve(settings: PeerSettings) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises: HydraError where the port is taken or the device cannot be had."""
    from ..peer import listener

    who = "the peer" if settings.name == UNNAMED else f"the peer {settings.name}"
    ensure_free(settings.host, settings.port, who)
    if settings.host in ("0.0.0.0", "::"):
        log.warning("Listening on every address of this box; who may connect: loopback%s.",
                    "".join(f", {address}" for address in settings.allow))

    def ready(server: listener.Listener) -> None:
        where = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("Serving %s on %s:%d; Ctrl-C stops it.", ", ".join(device["name"] for device in server.devices), where,
                 server.port)

    listener.serve(settings, on_ready=ready)
    log.info("Stopped.")


def run(bind: str, device: str, threads: int, cache_dir: str, cache_max_gib: float, model_path: str, allow: list[str],
        max_connections: int, *, log_json: bool, debug: bool) -> None:
    """Serve without a hydra.toml. bind: HOST:PORT, HOST, or :PORT."""
    host, port = split_bind(bind)
    console.log_to_stderr("peer", debug=debug, as_json=log_json)
    serve(PeerSettings(name=UNNAMED, host=host, port=port, devices=(device,), threads=threads, allow=tuple(allow),
                       max_connections=max_connections, cache_dir=_absolute(cache_dir),
                       cache_max_bytes=int(cache_max_gib * (1 << 30)), model_path=_absolute(model_path)))


def split_bind(text: str) -> tuple[str, int]:
    """`192.168.1.11:50052` → address and port; either may be left out. Raises: ConfigError."""
    default_host, default_port = PeerSettings.host, PeerSettings.port
    if text.count(":") > 1 and not text.startswith("["):
        return text, default_port
    host, colon, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    host = host.strip("[]") or default_host
    if not colon:
        return host, default_port
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"command line: --bind {text} has no usable port.",
                          "Write --bind HOST:PORT, port 1 to 65535.")
    return host, int(port)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
