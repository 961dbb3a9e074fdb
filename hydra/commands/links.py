"""The links of a running head: one process for each peer that is reached through one, kept alive on its own port.

A link is used where link.enabled or security.tls says so (TLS ends in it). Knows how to start and restart them; what
they do is hydra/link.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from ssl import SSLContext
from typing import Any

from ..config import Config
from ..errors import HydraError
from ..link.process import LinkProcess, start_link
from ..link.settings import LinkSettings

log = logging.getLogger("hydra.link")


def link_settings(cfg: Config) -> list[LinkSettings]:
    """One for each peer, or none at all."""
    if not (cfg.link.enabled or cfg.security.tls):
        return []
    tls_dir = cfg.security.cert_dir if cfg.security.tls else ""
    return [LinkSettings(node.name, node.host, node.port, node=cfg.head_node.name, tls_dir=tls_dir,
                         deltas=cfg.link.enabled, activations=cfg.link.activations, silence_s=cfg.link.silence_s,
                         deadline_s=cfg.head.step_deadline_s) for node in cfg.peers]


def probe_context(cfg: Config) -> SSLContext | None:
    """What the head's probes use to talk to its peers. Raises: ConfigError for a certificate that cannot be used."""
    if not cfg.security.tls:
        return None
    from ..security import client_context, load_identity

    return client_context(load_identity(Path(cfg.security.cert_dir), cfg.head_node.name))


class Links:
    """All links of one configuration. `endpoints`: where the engine finds each peer instead, by node name.

    on_fault: told (node, kind, message, hint) of a peer that a link gives up, before the engine loses its connection.
    """

    def __init__(self, cfg: Config) -> None:
        self.settings = link_settings(cfg)
        self.on_fault: Callable[[str, str, str, str], None] = lambda *_fault: None
        self._running: dict[str, LinkProcess] = {}
        self._stopping = threading.Event()
        # A link asks the kernel to end it with the thread that started it, so that thread has to live as long as we do.
        self._keeper = ThreadPoolExecutor(1, "links")

    @property
    def endpoints(self) -> dict[str, str]:
        return {name: link.endpoint for name, link in self._running.items()}

    def start(self) -> Links:
        """Raises: PeerError when one does not come up; none is left running then."""
        try:
            for settings in self.settings:
                self._running[settings.name] = self._keeper.submit(self._start_one, settings).result()
        except HydraError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End them; safe to call twice."""
        self._stopping.set()
        self._keeper.shutdown(wait=False, cancel_futures=True)
        for link in self._running.values():
            link.stop()
        self._running.clear()

    def _start_one(self, settings: LinkSettings) -> LinkProcess:
        # What it has to say comes as events; its own log is for those who look for more.
        return start_link(settings, self._on_event, quiet=not log.isEnabledFor(logging.DEBUG))

    def _on_event(self, event: dict[str, Any]) -> None:
        """Called on the link's own thread."""
        node = {"node": event.get("peer")}
        if event.get("event") == "connected":
            log.debug("Connected, mode %s.", event.get("mode"), extra=node)
        elif event.get("kind") == "ended" and not self._stopping.is_set():
            log.error("%s It is started again.", event.get("message"), extra=node)
            self._keeper.submit(self._restart, str(event.get("peer")))
        elif event.get("event") == "fault" and not self._stopping.is_set():
            log.error("%s %s", event.get("message"), event.get("hint") or "", extra=node)
            self.on_fault(*(str(event.get(key, "")) for key in ("peer", "kind", "message", "hint")))

    def _restart(self, name: str) -> None:
        """The same port as before: the engine and its successors know no other."""
        old = self._running[name]
        settings = replace(old.settings, port_here=int(old.endpoint.rpartition(":")[2]))
        delay_s = 1.0
        while not self._stopping.is_set():
            try:
                link = self._start_one(settings)
            except HydraError as error:
                log.error("%s Next try in %g s.", error, delay_s, extra={"node": name})
                self._stopping.wait(delay_s)
                delay_s = min(30.0, 2 * delay_s)
                continue
            self._running[name] = link
            if self._stopping.is_set():
                link.stop()
            return
