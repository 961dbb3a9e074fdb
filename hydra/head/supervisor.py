"""Keeps an engine child alive and loses no token while doing so.

The parent half of the head: it starts the child, feeds it the open requests, notices that it died or stalls, finds out
why (head/diagnosis.py), waits for the peers, starts the next one, and has every open answer continued after the last
token that went out. Runs on one asyncio loop; knows nothing of HTTP, templates or llama.cpp. Frames:
docs/architecture.md.

    stopped → waiting (for peers) → loading → ready ─┬→ waiting …   engine died or stalled: its streams are kept
                                                     ├→ stopping → stopped
                                                     └→ failed      the same failure too often, or one nothing can mend
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import EngineError, HydraError, PeerUnreachable
from hydra.head import launch
from hydra.head.calls import Calls
from hydra.head.diagnosis import Ending, Failure, Ledger, LinkFault, diagnose, error_from_frame
from hydra.head.peers import Peers
from hydra.head.probe import PeerReport, PeerTarget
from hydra.head.process import EngineProcess, Frame
from hydra.head.report import Event, SupervisorSettings, Totals, percent
from hydra.head.spec import EngineSpec
from hydra.head.streams import Board, Chunk, Overloaded, Stream, Unavailable, WaitedTooLong
from hydra.head.watchdog import Pulse, Watchdog

__all__ = ["Event", "Supervisor", "SupervisorSettings", "Totals"]

log = logging.getLogger("hydra.head")


class Supervisor:
    """One model, one engine at a time, any number of streams.

    spec: what to load. peers: who must be up before that. command: how to start the child, given its descriptor.
    on_event: called on the loop for every `Event`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        peers: Sequence[PeerTarget] = (),
        settings: SupervisorSettings | None = None,
        *,
        command: Callable[[int], Sequence[str]] = launch.command,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.spec = spec
        self.settings = settings or SupervisorSettings()
        self.peers = Peers(peers, self.settings.probe_timeout_s)
        self.board = Board(spec.parallel, self.settings.queue_max)
        self.ledger = Ledger(self.settings.restart_limit, self.settings.restart_window_s)
        self.totals = Totals()
        self.state = "stopped"
        self.info: dict[str, Any] = {}
        self.progress: dict[str, Any] = {}
        self.last_failure: Failure | None = None
        self._link_fault: LinkFault | None = None
        self.reason = ""
        """Why it is not ready, in words; empty when it is."""
        self.started_at = time.time()
        self.failed: asyncio.Future[HydraError] | None = None
        """Done with the terminal error, should there be one. None before `start`."""
        self._command = command
        self._on_event = on_event
        self._engine: EngineProcess | None = None
        self._ended: asyncio.Future[Ending] | None = None
        self._calls = Calls(self._send)
        self._pulse = Pulse()
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._draining = False
        self._reload_to: tuple[EngineSpec, tuple[PeerTarget, ...]] | None = None
        self._fallback: tuple[EngineSpec, tuple[PeerTarget, ...]] | None = None
        self._was_ready = False
        self._lost_at: float | None = None
        self._blocked: PeerReport | None = None

    # ---- what the API uses

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def recovering(self) -> bool:
        return self._was_ready and self.state in ("waiting", "loading")

    def generate(self, prompt: list[int], params: dict[str, Any], max_wait_s: float | None = None) -> Stream:
        """Enter a request; its answer comes through the Stream.

        max_wait_s: the longest it is willing to wait without progress, queue and recoveries included.
        Raises: Overloaded, Unavailable, or the terminal error.
        """
        self.refuse_if_closed()
        stream = self.board.new(prompt, params, self._patience(max_wait_s))
        if not self.ready:
            stream.start_waiting(self.reason or self.state)
        self._dispatch()
        return stream

    def cancel(self, stream: Stream) -> None:
        """The caller went away. Idempotent; a slot is free again once the engine says so."""
        if stream.finished:
            return
        stream.cancelled = True
        stream.finish("cancelled", {})
        self.totals.count("cancelled")
        if stream.id in self.board.active:
            self._send({"type": "cancel", "id": stream.id})
        else:
            self.board.drop_waiting(stream)

    async def call(self, kind: str, max_wait_s: float | None = None, **fields: Any) -> Any:
        """tokenize, detokenize or embed, asked of the engine; survives its restarts, as these have no state.

        Raises: Overloaded, WaitedTooLong, Unavailable, or what the engine answered.
        """
        self.refuse_if_closed()
        if len(self._calls) >= self.settings.queue_max + self.board.parallel:
            raise Overloaded(
                f"{len(self._calls)} requests wait to be read already.",
                "Try again in a few seconds.",
                self.board.retry_after_s(),
            )
        patience = self._patience(max_wait_s)
        try:
            return await self._calls.ask(kind, fields, now=self.ready, patience_s=patience)
        except asyncio.TimeoutError:
            why = f" ({self.reason})" if self.reason else ""
            raise WaitedTooLong(
                f"The request waited {patience:g} s, its limit{why}.",
                "See /health for what is missing.",
                self.board.retry_after_s(),
            ) from None

    def status(self) -> dict[str, Any]:
        """Everything /health, /slots and `hydra ps` show, as plain values."""
        now = time.time()
        load = self.progress if self.state == "loading" else {}
        engine = self._engine
        return {
            "state": self.state,
            "reason": self.reason,
            "recovering": self.recovering,
            "node": load.get("node") or (self._blocked.target.name if self._blocked else None),
            "stage": load.get("stage"),
            "percent": percent(load),
            "eta_s": load.get("eta_s"),
            "restarts": self.ledger.total,
            "uptime_s": round(now - self.started_at, 1),
            "last_failure": self.last_failure.to_json() if self.last_failure else None,
            "engine_pid": engine.pid if engine and engine.alive else None,
            "step": self._pulse.step,
            "slots": {"total": self.board.parallel, "busy": len(self.board.active)},
            "queued": len(self.board.waiting),
            "peers": self.peers.rows(),
        }

    def link_failed(self, node: str, kind: str, message: str, hint: str) -> None:
        """What a link reports of its peer just before it closes the engine's connection; from any thread."""
        self._link_fault = LinkFault(node, kind, message, hint)

    # ---- life

    async def start(self) -> None:
        """Begin; returns at once. `status` and `on_event` tell how it goes."""
        self.started_at = time.time()
        self.failed = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._run()),
            asyncio.create_task(self._expire()),
            asyncio.create_task(self._watch_peers()),
        ]

    async def stop(self, grace_s: float | None = None) -> None:
        """Let open answers finish for `grace_s`, end the rest with a clear error, end the engine. Never raises."""
        if not self._tasks:
            return
        grace = self.settings.grace_s if grace_s is None else grace_s
        self._stopping = True
        if self.state != "failed":
            self._set_state("stopping", "the head is shutting down")
        down = Unavailable("The head is shutting down.", "Send the request again once it is back.")
        for stream in list(self.board.waiting):
            stream.fail(down)
        self.board.waiting.clear()
        self._calls.fail_all(down, unsent_only=self._engine_serves())
        deadline = time.monotonic() + grace
        while self.board.active and self._engine_serves() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.board.fail_all(down)
        self._calls.fail_all(down)
        self._end(Ending("stop"))
        self._wake.set()
        run, *others = self._tasks
        for task in others:
            task.cancel()
        done, _ = await asyncio.wait({run}, timeout=10.0)
        if not done:
            run.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.state != "failed":
            self._set_state("stopped", "")

    def stop_now(self) -> None:
        """The second Ctrl-C: nobody waits for anything."""
        self._stopping = True
        self.board.fail_all(Unavailable("The head was stopped."))
        if self._engine is not None:
            self._engine.kill_now()
        self._end(Ending("stop"))
        self._wake.set()

    async def reload(
        self, spec: EngineSpec, peers: Sequence[PeerTarget] = (), settings: SupervisorSettings | None = None
    ) -> None:
        """Change model or settings under the open API port; returns once the old engine has been told to go.

        Running answers get the grace time; what is left then is continued by the new engine when the model is the same,
        and ended with a clear error when it is another. A new engine that cannot load is given up for the old
        description.
        """
        if settings is not None:
            self.settings = settings
            self.board.queue_max = settings.queue_max
            self.ledger.limit, self.ledger.window_s = settings.restart_limit, settings.restart_window_s
        self._reload_to = (spec, tuple(peers))
        self._emit("state", "Reloading: the new settings are read, open answers may finish first.")
        self._draining = True
        deadline = time.monotonic() + self.settings.grace_s
        while self.board.active and self.ready and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.ready:
            self._set_state("loading", "the settings are being changed")
        self._end(Ending("reload"))
        self._wake.set()

    # ---- the loop
    # -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_over_reload()
                if not await self._wait_for_peers():
                    continue
                await self._after(await self._one_life())
        except HydraError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("The supervisor failed; this is a bug of hydra.")
            self._give_up(
                EngineError(f"The supervisor failed: {error!r}.", "This is a bug of hydra: please report it.")
            )
        finally:
            if self._engine is not None:
                self._engine.kill_now()

    async def _after(self, ending: Ending) -> None:
        """Between two lives: nothing to do for a wanted end, else find the reason and wait as long as it takes."""
        if ending.kind in ("stop", "reload"):
            return
        engine = self._engine
        loading = not self.ready
        self._lost_at = self._lost_at or time.monotonic()
        stderr = list(engine.stderr_tail) if engine else []
        exit_words = engine.exit_words() if engine else "could not be started"
        self.board.engine_died()
        kept = self.board.engine_lost("the engine is being restarted")
        self._set_state("waiting", "the engine ended; looking for the reason")
        reports = await self.peers.look(engine_connected=False)
        self._note_mismatch(reports)
        failure = diagnose(ending, exit_words, stderr, reports, loading=loading, link=self._link_fault)
        self._link_fault = None
        self.last_failure = failure
        self.reason = failure.reason
        for _ in self.board.give_up_killers(failure.reason):
            self.totals.count("error")
            kept -= 1
        for stream in self.board.waiting:
            stream.start_waiting(failure.reason)
        self._calls.engine_died(failure.reason)
        streams = f"; {kept} open answer{'s' if kept != 1 else ''} will be continued" if kept else ""
        self._emit(
            "failure", f"{failure.reason}{streams}. {failure.hint}".strip(), failure.node, "error", failure.to_json()
        )
        # A peer that went away meanwhile says nothing about the new settings.
        if self._fallback is not None and loading and not failure.key.startswith(("peer:", "link:")):
            error = failure.error or EngineError(failure.reason, failure.hint)
            self.spec = self._fallback[0]
            self.peers.replace(self._fallback[1])
            self.board.parallel = self.spec.parallel
            self._fallback = None
            self._emit(
                "state",
                f"The new settings cannot be used ({error.message}); going back to the former ones.",
                level="error",
            )
            return
        if failure.permanent and not self._was_ready:
            raise failure.error or EngineError(failure.reason, failure.hint)
        terminal = self.ledger.note(failure, time.monotonic())
        if terminal is not None:
            raise terminal
        delay = self.ledger.delay_s(self.settings.backoff_first_s, self.settings.backoff_max_s)
        if delay:
            self._emit("state", f"Starting the engine again in {delay:g} s.")
            await self._sleep(delay)

    async def _one_life(self) -> Ending:
        """From the start of a child to its end, whatever ends it; the child is gone when this returns."""
        self._ended = asyncio.get_running_loop().create_future()
        self.progress = {"stage": "starting", "node": None}
        self._pulse = Pulse()
        self._set_state("loading", self.reason or "the model is being loaded")
        engine: EngineProcess | None = None
        watchdog: asyncio.Task[None] | None = None
        try:
            try:
                engine = self._engine = await EngineProcess.start(self._command, self._on_frame, self._on_line)
            except EngineError as error:
                return Ending("error", "could not be started", error)
            engine.ended.add_done_callback(lambda _: self._end(Ending("exit")))
            engine.send({"type": "load", "spec": self.spec.to_dict()})
            guard = Watchdog(self._pulse, self.settings, lambda: self.peers.look(engine_connected=True))
            watchdog = asyncio.create_task(self._guard(guard))
            ending = await self._ended
            if ending.kind in ("stop", "reload"):
                await engine.stop(3.0)
            elif ending.kind == "error":
                await engine.stop(1.0)
            else:
                await engine.kill()
            if ending.kind == "exit" and engine.fault:
                ending = Ending("error", f"was ended because {engine.fault}")
            return ending
        finally:
            if watchdog is not None:
                watchdog.cancel()
            if engine is not None and engine.alive:
                engine.kill_now()

    async def _guard(self, watchdog: Watchdog) -> None:
        self._end(Ending("stall", await watchdog.wait_for_stall()))

    def _take_over_reload(self) -> None:
        if self._reload_to is None:
            return
        former = (self.spec, self.peers.targets)
        (self.spec, targets), self._reload_to = self._reload_to, None
        self.peers.replace(targets)
        self._draining = False
        self._fallback = former if self._was_ready else None
        self.board.engine_lost("the settings are being changed")
        self.board.parallel = self.spec.parallel
        if self.spec.model_path != former[0].model_path:
            # Their tokens mean nothing to another model.
            self.board.fail_all(Unavailable("The model was changed while the request waited.", "Send it again.", 1.0))
        self.reason = "the settings are being changed"

    # ---- peers
    # --------------------------------------------------------------------------------------------------------

    async def _wait_for_peers(self) -> bool:
        """Until every peer is usable. False when something else (stop, reload) came first.

        Raises: PeerUnreachable when this is the first start and head.peer_wait_s is over.
        """
        delay, begin = self.settings.backoff_first_s, time.monotonic()
        while not self._stopping and self._reload_to is None:
            reports = await self.peers.look(engine_connected=False)
            self._note_mismatch(reports)
            missing = [report for report in reports if not report.usable]
            if not missing:
                return True
            first = self._blocked or missing[0]
            waited = time.monotonic() - begin
            limit = self.settings.peer_wait_s
            if limit and waited > limit and not self._was_ready:
                raise PeerUnreachable(
                    f"{first.words[:1].upper()}{first.words[1:]}, for {waited:.0f} s now.", first.hint
                )
            self._set_state("waiting", f"waiting for {first.words}")
            for stream in self.board.waiting:
                stream.start_waiting(self.reason)
            left = f", {limit - waited:.0f} s left" if limit and not self._was_ready else ""
            self._emit(
                "peer",
                f"Waiting for {first.words}; next look in {delay:g} s{left}. {first.hint}".strip(),
                first.target.name,
                "error" if self._blocked else "warning",
                {"retry_s": delay, "state": first.state},
            )
            await self._sleep(delay)
            # One that answers is on its way: it is not worth waiting long for.
            answers = first.state == "degraded"
            delay = self.settings.backoff_first_s if answers else min(self.settings.backoff_max_s, delay * 2)
        return False

    def _note_mismatch(self, reports: list[PeerReport]) -> None:
        """A peer that only a person can mend: until it is, new requests are refused and not left to wait."""
        self._blocked = next((report for report in reports if report.state == "mismatch"), None)

    async def _watch_peers(self) -> None:
        """Round trips and byte counts for /metrics and `hydra ps`, now and then."""
        while True:
            await asyncio.sleep(self.settings.probe_s)
            if self.ready:
                await self.peers.look(engine_connected=True)
                await self.peers.count()

    # ---- frames
    # -------------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        handler = getattr(self, f"_on_{frame.get('type')}_frame", None)
        self._pulse.heard()
        if handler is None:
            log.warning("The engine sent a frame of unknown type %r.", frame.get("type"))
            return
        handler(frame)

    def _on_progress_frame(self, frame: Frame) -> None:
        self.progress = {key: value for key, value in frame.items() if key != "type"}
        self._pulse.moved()
        self._emit("progress", str(frame.get("stage", "loading")), frame.get("node"), data=self.progress)

    def _on_ready_frame(self, frame: Frame) -> None:
        self.info = dict(frame.get("info") or {})
        self._pulse.loading = False
        self._pulse.moved()
        recovered, self._was_ready, self._fallback, self._blocked = self._was_ready, True, None, None
        self._set_state("ready", "")
        if recovered and self._lost_at is not None:
            took = time.monotonic() - self._lost_at
            self._emit(
                "recovered",
                f"Recovered after {took:.1f} s; {sum(1 for s in self.board.waiting if s.sent)} open answers go on.",
                data={"seconds": took},
            )
        self._lost_at = None
        self._calls.engine_ready()
        self._dispatch()

    def _on_heartbeat_frame(self, frame: Frame) -> None:
        self._pulse.beat(int(frame.get("step") or 0), bool(frame.get("busy")))

    def _on_chunk_frame(self, frame: Frame) -> None:
        self._pulse.moved()
        stream = self.board.active.get(str(frame.get("id")))
        if stream is None:
            return
        tokens = list(frame.get("tokens") or ())
        self.totals.generated_tokens += len(tokens)
        self.ledger.served()
        was_suspect = stream.suspect
        stream.deliver(Chunk(tokens, str(frame.get("text") or ""), frame.get("logprobs")))
        if was_suspect and not stream.suspect:
            self._dispatch()

    def _on_done_frame(self, frame: Frame) -> None:
        self._pulse.moved()
        stream = self.board.release(str(frame.get("id")))
        if stream is not None:
            stats = dict(frame.get("stats") or {})
            reason = str(frame.get("reason", "stop"))
            if not stream.finished:
                self.totals.count(reason)
            self.totals.add(stats)
            if reason == "error":
                stream.fail(
                    error_from_frame(frame.get("error") or {"message": "The engine could not finish this request."})
                )
            else:
                stream.finish(reason, stats)
        self._dispatch()

    def _on_result_frame(self, frame: Frame) -> None:
        self._calls.answer(str(frame.get("id")), frame.get("value"))

    def _on_failed_frame(self, frame: Frame) -> None:
        error = error_from_frame(frame.get("error"))
        number = frame.get("id")
        if number is None:
            self._end(Ending("error", "", error))
        elif not self._calls.fail(str(number), error):
            stream = self.board.release(str(number))
            if stream is not None:
                stream.fail(error)
                self.totals.count("error")
            self._dispatch()

    def _on_line(self, line: str) -> None:
        self._emit("log", line, level="debug")

    # ---- small things
    # -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        if self.state not in ("ready", "stopping") or self._draining:
            return
        while (stream := self.board.take()) is not None:
            if stream.sent:
                self.totals.resumed_streams += 1
            self._send(
                {
                    "type": "generate",
                    "id": stream.id,
                    "prompt": stream.prompt,
                    "params": stream.params,
                    "resume": stream.sent,
                }
            )

    def _send(self, frame: Frame) -> None:
        if self._engine is not None:
            self._engine.send(frame)

    def _end(self, ending: Ending) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ending)

    def _engine_serves(self) -> bool:
        return self._engine is not None and self._engine.alive and not self._pulse.loading

    def refuse_if_closed(self) -> None:
        """Raises: the terminal error, or Unavailable while nothing new can be taken."""
        if self.failed is not None and self.failed.done():
            raise self.failed.result()
        if self._stopping or not self._tasks:
            raise Unavailable("The head is shutting down.", "Send the request again once it is back.")
        if self._blocked is not None:
            raise Unavailable(f"{self._blocked.words[:1].upper()}{self._blocked.words[1:]}.", self._blocked.hint, 30.0)

    def _give_up(self, error: HydraError) -> None:
        self.board.engine_lost(error.message)
        self.board.fail_all(error)
        self._calls.fail_all(error)
        self._set_state("failed", error.message)
        self._emit("failure", str(error), level="error")
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(error)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            for stream in self.board.expire(time.monotonic()):
                self.totals.count("waited_too_long")
                if stream.id in self.board.active:
                    self._send({"type": "cancel", "id": stream.id})

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but wake for a stop or a reload."""
        self._wake.clear()
        if self._stopping or self._reload_to is not None:
            return
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    def _patience(self, max_wait_s: float | None) -> float:
        return self.settings.queue_wait_s if max_wait_s is None else max_wait_s

    def _set_state(self, state: str, reason: str) -> None:
        changed = state != self.state
        if self._stopping and state not in ("stopping", "stopped", "failed"):
            return
        self.state, self.reason = state, reason
        if changed:
            self._emit("state", f"{state}: {reason}" if reason else state, data={"state": state})

    def _emit(
        self, kind: str, message: str, node: str | None = None, level: str = "info", data: dict[str, Any] | None = None
    ) -> None:
        if self._on_event is not None:
            self._on_event(Event(kind, message, node, level, data or {}))
