"""What `hydra up` shows of a head: the wait for its peers as a countdown, the load as it advances, then that it serves.

Told by the supervisor's events (head/supervisor.py); knows nothing of how they come about. On a terminal one line is
redrawn; elsewhere log lines, now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .. import console
from ..config import Config

log = logging.getLogger("hydra.head")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
SAID_ELSEWHERE = ("ready", "stopping", "stopped", "failed")
PROGRESS = ("layers_done", "layers_total", "bytes_done", "bytes_total", "eta_s")


class HeadView:
    """Takes `Event`s in `on_event`; `tick` is to be called about twice a second while something is waited for.

    size_bytes: of the model file.
    """

    def __init__(self, cfg: Config, size_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cfg = cfg
        self._size_bytes = size_bytes
        self._clock = clock
        self._loading = console.Loading(log.info)
        self._begin_s = clock()
        self._waiting_for = ""
        self._retry_at_s = 0.0
        self.served = False

    def on_event(self, event: Any) -> None:
        """One `hydra.head.supervisor.Event`."""
        if event.kind == "progress":
            self._waiting_for = ""
            data = dict(event.data)
            # llama.cpp tells its loader's callback one fraction of all bytes.
            if data.get("fraction") is not None and not data.get("bytes_total"):
                data |= {"bytes_done": round(data["fraction"] * self._size_bytes), "bytes_total": self._size_bytes}
            self._loading.update(str(data.get("stage") or "loading"), node=str(event.node or ""),
                                 **{key: data[key] for key in PROGRESS if data.get(key) is not None})
            return
        if event.kind == "peer":
            self._waiting_for = event.message.split(";")[0]
            self._retry_at_s = self._clock() + float(event.data.get("retry_s") or 0.0)
            if console.err().is_terminal and event.level != "error":
                self.tick()
                return
        elif event.kind == "state":
            state = event.data.get("state")
            if state == "waiting":
                return  # the event about the peer says it better, and follows at once
            self._waiting_for = ""
            self._loading.close()
            if state in SAID_ELSEWHERE:
                return
            if state == "loading":
                log.info("Loading the model.")
                return
        log.log(LEVELS.get(event.level, logging.INFO), "%s", event.message)

    def tick(self) -> None:
        """Redraw the countdown, where there is one."""
        if not self._waiting_for or not console.err().is_terminal:
            return
        now = self._clock()
        # The countdown comes first: a narrow terminal cuts the end off.
        said = f"next look {max(0.0, self._retry_at_s - now):.0f} s"
        limit = self._cfg.head.peer_wait_s
        if limit and not self.served:
            said += f" · giving up {console.seconds_text(self._begin_s + limit - now)}"
        self._loading.update(f"{said} · {self._waiting_for}")

    def ready(self, info: dict[str, Any]) -> None:
        """Say where it serves and what is loaded where."""
        self._loading.close()
        head = self._cfg.head
        layers = ", ".join(f"{count} on {node}" for node, count in (info.get("layers") or {}).items())
        mtp = info.get("mtp") or {}
        drafting = f"MTP up to {mtp.get('n_max')}" if mtp.get("enabled") else "no MTP"
        host = f"[{head.api_host}]" if ":" in head.api_host else head.api_host
        url = f"http://{host}:{head.api_port}/v1"
        block = not self.served and console.err().is_terminal
        if not block:
            log.info("%s: %s layers (%s), context %s, %s.", info.get("model"), info.get("n_layer"), layers,
                     info.get("n_ctx"), drafting)
        for line in info.get("notes") or ():
            log.info("%s", line)
        log.info("Serving %s; talk to it with `hydra chat`. Ctrl-C stops it.", url)
        if block:
            key = ' -H "Authorization: Bearer $HYDRA_API_KEY"' if head.api_key else ""
            console.block([("model", f"{info.get('model')}, {info.get('n_layer')} layers"), ("layers", layers),
                           ("context", f"{info.get('n_ctx')} tokens"), ("drafts", drafting), ("API", url)],
                          f"  curl {url}/chat/completions{key} "
                          """-d '{"messages":[{"role":"user","content":"Hello"}]}'""")
        self.served = True

    def close(self) -> None:
        self._loading.close()
