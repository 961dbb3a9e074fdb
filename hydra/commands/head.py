"""What `hydra up` does on the head box: supervisor, API and signals on one event loop, until told to stop.

    start-up    take the API's port, start the supervisor (it waits for the peers, then loads) and the API (/health
                says how far it is)
    run         SIGHUP reads hydra.toml again; a failure that nothing can mend ends it with that error
    shutdown    the first Ctrl-C or SIGTERM lets open answers finish for head.grace_s, the second ends at once

Knows nothing of engines or HTTP routes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from ..api.app import create_app
from ..api.settings import ApiSettings
from ..config import Config
from ..errors import HydraError
from ..head.probe import PeerTarget
from ..head.spec import EngineSpec
from ..head.supervisor import Supervisor
from ..model_file import read_model_file
from ..nodes import is_loopback
from .head_view import HeadView
from .links import Links, link_settings, probe_context
from .ports import ensure_free
from .translate import engine_spec, peer_targets, supervisor_settings

log = logging.getLogger("hydra.head")
TICK_S = 0.5
BACKLOG = 128


def serve_head(cfg: Config, read_again: Callable[[], Config]) -> None:
    """Serve until stopped. read_again: hydra.toml anew, for SIGHUP. Raises: HydraError."""
    asyncio.run(_Head(cfg, read_again).run())


class _Head:
    def __init__(self, cfg: Config, read_again: Callable[[], Config]) -> None:
        self.cfg = cfg
        self.read_again = read_again
        self.stops = 0
        self.stop_asked = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        cfg = self.cfg
        model = read_model_file(cfg.model.path)
        engine_spec(cfg, model)  # a split that does not add up is told before anything is started
        self.view = HeadView(cfg, model.size_bytes)
        ensure_free(cfg.head.api_host, cfg.head.api_port, "the API")
        if not cfg.head.api_key and not is_loopback(cfg.head.api_host):
            log.warning("The API is open to everyone who reaches %s: no [head] api_key is set.", cfg.head.api_host)
        peers = peer_targets(cfg, probe_context(cfg))
        self.links = [Links(cfg).start()]
        try:
            await self._serve(engine_spec(cfg, model, self.links[-1].endpoints), peers)
        finally:
            for links in self.links:
                links.stop()

    async def _serve(self, spec: EngineSpec, peers: tuple[PeerTarget, ...]) -> None:
        cfg = self.cfg
        self.supervisor = Supervisor(spec, peers, supervisor_settings(cfg), on_event=self.view.on_event)
        self.links[-1].on_fault = self.supervisor.link_failed
        app = create_app(self.supervisor, api_settings(cfg))
        # Bound here and not by uvicorn, which ends the whole program where it cannot.
        listening = socket.create_server((cfg.head.api_host, cfg.head.api_port), backlog=BACKLOG,
                                         family=socket.AF_INET6 if ":" in cfg.head.api_host else socket.AF_INET)
        self.server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off",
                                             timeout_graceful_shutdown=2))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload_signal)
        serving = asyncio.create_task(self.server.serve([listening]))
        showing = asyncio.create_task(self._show())
        stopping = asyncio.create_task(self.stop_asked.wait())
        await self.supervisor.start()
        failed = self.supervisor.failed
        assert failed is not None  # start() made it
        ends: set[asyncio.Future[Any]] = {serving, stopping, failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.stops < 2:
                await self.supervisor.stop()
        finally:
            showing.cancel()
            stopping.cancel()
            self.view.close()
            self.server.should_exit = True
            await serving
        if failed.done() and not self.stops:
            raise failed.result()
        log.info("Stopped.")

    async def _show(self) -> None:
        """The countdown while it waits, and one block each time that it becomes ready."""
        was_ready = False
        while True:
            if self.supervisor.ready and not was_ready:
                self.view.ready(self.supervisor.info)
            was_ready = self.supervisor.ready
            self.view.tick()
            await asyncio.sleep(TICK_S)

    def _stop_signal(self, number: int) -> None:
        self.stops += 1
        self.view.close()
        if self.stops == 1:
            busy = len(self.supervisor.board.open())
            rest = f"; open answers: {busy}, with {self.cfg.head.grace_s:g} s left; another Ctrl-C ends them at once"
            log.info("%s: stopping%s.", signal.Signals(number).name, rest if busy else "")
            self.stop_asked.set()
        else:
            self.supervisor.stop_now()
            self.server.force_exit = True

    def _reload_signal(self) -> None:
        task = asyncio.create_task(self._reload())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _reload(self) -> None:
        """hydra.toml anew. A file that cannot be used is told and changes nothing; the API's own port and keys stay."""
        try:
            cfg = self.read_again()
            model = read_model_file(cfg.model.path)
            engine_spec(cfg, model)
            peers = peer_targets(cfg, probe_context(cfg))
            if link_settings(cfg) != self.links[-1].settings:
                # The former ones stay: a supervisor that cannot load the new settings goes back to them.
                self.links.append(await asyncio.to_thread(Links(cfg).start))
                self.links[-1].on_fault = self.supervisor.link_failed
        except HydraError as error:
            log.error("Not reloaded: %s", error)
            return
        spec = engine_spec(cfg, model, self.links[-1].endpoints)
        await self.supervisor.reload(spec, peers, supervisor_settings(cfg))
        if cfg.head != self.cfg.head:
            log.warning("[head] api_host, api_port, api_key and limits of the API need a restart of `hydra up`.")
        self.cfg = cfg


def api_settings(cfg: Config) -> ApiSettings:
    """What the API is told of [head]."""
    head = cfg.head
    return ApiSettings(host=head.api_host, port=head.api_port, api_key=head.api_key, cors_origins=head.cors_origins,
                       max_request_bytes=head.max_request_bytes, node=cfg.head_node.name)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal is for the answers first, and for the server last."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
