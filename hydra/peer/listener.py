"""The peer's front: accepts, makes ready, looks at one byte, and hands the connection to whom it is for.

    start-up     bind, start the worker process (it owns the device), wait until it is ready
    main loop    one thread, one selector, never blocks:
                   accept ─► make_ready (hydra.peer.sockets) ─► allow-list ─► wait for ONE byte, with a deadline
                     0x0E (HELLO)          the descriptor goes to the worker (SCM_RIGHTS) and is forgotten here
                     0x68 (hydra's link)   the same, and the worker is told
                     an HTTP verb          to the control pool (hydra.peer.control)
                     0x16 (TLS)            with security.tls: the handshake on a thread, then its plain end is looked
                     at the same way
                   anything else         closed, with a line in the log
                   the worker's events: ready, a connection closed, its own death (restart after 1 s, doubling to 30 s)
    shutdown     the worker is told to stop, given some seconds, then killed

But for a TLS tunnel no compute byte is ever read here, so nothing of this is on the path of a token. Knows nothing of
ggml.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import logging
import os
import queue
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra import errors, hardware
from hydra.errors import DeviceError, HydraError, PeerError
from hydra.link import frames
from hydra.peer import sockets
from hydra.peer.control import VERBS, ControlPool
from hydra.peer.ratelog import RateLimitedLog
from hydra.peer.settings import PeerSettings
from hydra.peer.worker import MAX_PACKET
from hydra.rpc import wire
from hydra.security import Tunnel, load_identity, server_context, terminate

BACKLOG = 64
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
FIRST_TRIES = 3  # a worker that never was ready in so many starts will not be in the next one
STABLE_S = 60.0  # a worker that lived this long starts again at once
STOP_S = 8.0
STATS_S = 3.0
TLS_BYTE = 0x16  # a TLS record of the handshake
MAX_HANDSHAKES = 16
MAX_WAITING = 64  # connections that have not said their first byte
_WAKE, _LISTEN, _WORKER, _FIRST_BYTE = "wake", "listen", "worker", "first byte"


@dataclass
class Waiting:
    """A connection of which not a byte has been read."""

    sock: socket.socket
    address: tuple[str, int]
    deadline: float
    tunnel: Tunnel | None = None  # TLS ends there, and sock is its plain end
    link: bool = False  # speaks hydra's link (hydra.link.frames), not plain ggml-RPC


def worker_command(fd: int) -> list[str]:
    """How the worker process is started: from the same interpreter, or the same single file."""
    if getattr(sys, "frozen", False):
        return [sys.executable, "_worker", str(fd)]
    return [sys.executable, "-m", "hydra.peer.worker", str(fd)]


class Listener:
    """One peer. ``run`` returns after ``stop``.

    make_ready: what is done to every accepted socket; only the benchmark that shows what happens without it gives
    another. Raises (from run): PeerError when the port is taken; when the worker cannot be started for the first time
    its own error, such as DeviceError where the device is missing.
    """

    def __init__(
        self,
        settings: PeerSettings,
        make_ready: Callable[[socket.socket], None] = sockets.make_ready,
        on_ready: Callable[[Listener], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.settings = settings
        self.make_ready = make_ready
        self.on_ready = on_ready
        self.log = logger or logging.getLogger("hydra.peer")
        self.noisy = RateLimitedLog(self.log)
        self.port = settings.port
        self.started = time.time()
        self.state, self.reason = "starting", "the device worker starts"
        self.restarts = 0
        self.devices: list[dict[str, Any]] = []
        self.worker: subprocess.Popen[bytes] | None = None
        self._worker_since = 0.0
        self._control: socket.socket | None = None
        self._control_lock = threading.Lock()
        self._backoff = FIRST_BACKOFF_S
        self._restart_at = 0.0
        self._ever_ready = False
        self._fatal: HydraError | None = None
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[int, Waiting] = {}
        self._held: list[Waiting] = []  # said HELLO while the worker was not ready
        self._active: dict[int, str] = {}
        self._tls: ssl.SSLContext | None = None
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._decrypted: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._tunnels: list[tuple[Tunnel, str, dict[str, Any]]] = []
        self._ids = itertools.count(1)
        self._stats_ids = itertools.count(1)
        self._stats: dict[int, tuple[threading.Event, dict[str, Any]]] = {}
        self._allowed = {ipaddress.ip_address(a) for a in _addresses(settings.allow, self.log)}
        self._stopping = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)

    # -- start-up, main loop, shutdown ---------------------------------------------------------------------------------

    def run(self) -> None:
        if self.settings.tls_dir:
            self._tls = server_context(load_identity(Path(self.settings.tls_dir), self.settings.name))
        listening = self._bind()
        self.pool = ControlPool(self)
        try:
            self._selector.register(self._wake_r, selectors.EVENT_READ, _WAKE)
            self._selector.register(listening, selectors.EVENT_READ, _LISTEN)
            self._start_worker()
            while not self._stopping and self._fatal is None:
                for key, _ in self._selector.select(self._next_timeout()):
                    if key.data is _LISTEN:
                        self._accept(listening)
                    elif key.data is _FIRST_BYTE:
                        self._first_byte(key.fd)
                    elif key.data is _WORKER:
                        self._worker_event()
                    else:
                        self._wake_r.recv(64)
                        self._take_decrypted()
                self._tick()
        finally:
            listening.close()
            self._shutdown()
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """Ends run(); safe from signal handlers and other threads."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_w.send(b"x")
        except OSError:
            pass  # it is awake already, or gone

    def _bind(self) -> socket.socket:
        host, port = self.settings.host, self.settings.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except socket.gaierror as exc:
            raise PeerError(
                f"The address {host} cannot be resolved: {exc.strerror}.", "Use an address of this box."
            ) from exc
        except OSError as exc:
            raise PeerError(
                f"{host}:{port} cannot be listened on: {exc.strerror}.",
                "Another process has the port (`ss -ltnp` shows which), or the address is not this box's.",
            ) from exc
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        return listening

    def _shutdown(self) -> None:
        self.pool.close()
        for waiting in [*self._waiting.values(), *self._held]:
            waiting.sock.close()
        for tunnel, _, _ in self._tunnels:
            tunnel.close()
        self._stop_worker()
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _next_timeout(self) -> float:
        now = time.monotonic()
        times = [w.deadline for w in (*self._waiting.values(), *self._held)]
        if self.worker is None:
            times.append(self._restart_at)
        return max(0.0, min(times, default=now + 3600.0) - now)

    def _tick(self) -> None:
        now = time.monotonic()
        for fd, waiting in list(self._waiting.items()):
            if now >= waiting.deadline:
                self._forget(fd)
                self._refuse(waiting, "silent", f"no byte within {self.settings.first_byte_s:g} s")
        for waiting in [w for w in self._held if now >= w.deadline]:
            self._held.remove(waiting)
            self._refuse(waiting, "no worker", f"the device worker is not ready: {self.reason}")
        if self.worker is None and not self._stopping and self._fatal is None and now >= self._restart_at:
            self._start_worker()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """The one place that accepts."""
        for _ in range(BACKLOG):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # out of descriptors, mostly
                self.noisy.report("accept", "failed", f"cannot accept: {exc.strerror}")
                time.sleep(0.05)
                return
            waiting = Waiting(sock, (address[0], address[1]), time.monotonic() + self.settings.first_byte_s)
            try:
                self.make_ready(sock)
                sock.setblocking(False)
            except OSError:
                sock.close()  # it went away at once
                continue
            if not self._may_connect(address[0]):
                self._refuse(waiting, "address", "is not a node of hydra.toml and may not connect")
            elif len(self._waiting) >= MAX_WAITING:
                self._refuse(waiting, "flood", f"{MAX_WAITING} connections have not said their first byte yet")
            else:
                self._waiting[sock.fileno()] = waiting
                self._selector.register(sock, selectors.EVENT_READ, _FIRST_BYTE)

    def _may_connect(self, host: str) -> bool:
        address = ipaddress.ip_address(host.split("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        return address.is_loopback or address in self._allowed

    def _first_byte(self, fd: int) -> None:
        waiting = self._forget(fd)
        try:
            byte = waiting.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            byte = b""
        if not byte:
            waiting.sock.close()  # connected and left: a port check
        elif waiting.tunnel is None and (self._tls is not None or byte[0] == TLS_BYTE):
            self._encrypted_only(waiting, byte[0])
        elif byte[0] in (wire.HELLO_BYTE, frames.FIRST_BYTE):
            waiting.link = byte[0] == frames.FIRST_BYTE
            self._hello(waiting)
        elif byte[0] in VERBS:
            self.pool.submit(waiting.sock, waiting.address)
        else:
            self._refuse(waiting, "first byte", f"begins with byte {byte[0]:#04x}, which is neither ggml-RPC nor HTTP")

    def _encrypted_only(self, waiting: Waiting, byte: int) -> None:
        """The first byte of a connection when TLS is on, or of one that wants TLS when it is off."""
        if self._tls is None:
            self._refuse(waiting, "tls", "speaks TLS, and security.tls is off here")
        elif byte == TLS_BYTE:
            if not self._handshakes.acquire(blocking=False):
                self._refuse(waiting, "flood", f"{MAX_HANDSHAKES} TLS handshakes are under way already")
                return
            threading.Thread(
                target=self._handshake, args=(waiting, self._tls), name="tls handshake", daemon=True
            ).start()
        elif byte in VERBS and ipaddress.ip_address(waiting.address[0].split("%")[0]).is_loopback:
            self.pool.submit(waiting.sock, waiting.address)  # this box asks after its own peer
        else:
            self._refuse(waiting, "plain", "does not speak TLS, and security.tls is on here")

    def _handshake(self, waiting: Waiting, context: ssl.SSLContext) -> None:
        """On a thread of its own: TLS ends in a tunnel, whose plain end is then looked at like any other connection."""
        try:
            host = waiting.address[0]
            options = sockets.read_options(waiting.sock)
            plain, node, tunnel = terminate(
                waiting.sock, context, self.settings.tls_nodes or None, self.settings.hello_s
            )
        except HydraError as exc:
            reason = exc.message.replace(f"{host}:{waiting.address[1]}", host)  # the same from every port
            self.noisy.report(host, reason, reason)
            return
        finally:
            self._handshakes.release()
        self._tunnels = [entry for entry in self._tunnels if entry[0].thread.is_alive()]
        self._tunnels.append((tunnel, f"{host}:{waiting.address[1]}", {"node": node, "options": options}))
        deadline = time.monotonic() + self.settings.first_byte_s
        self._decrypted.put(Waiting(plain, waiting.address, deadline, tunnel))
        self._wake()

    def _take_decrypted(self) -> None:
        while not self._decrypted.empty():
            waiting = self._decrypted.get()
            waiting.sock.setblocking(False)
            self._waiting[waiting.sock.fileno()] = waiting
            self._selector.register(waiting.sock, selectors.EVENT_READ, _FIRST_BYTE)

    def _hello(self, waiting: Waiting) -> None:
        limit = self.settings.max_connections
        if len(self._active) + len(self._held) >= limit:
            self._refuse(waiting, "full", f"{limit} heads are connected already (peer.max_connections)")
        elif self.state == "ok":
            self._serve(waiting)
        else:
            waiting.deadline = time.monotonic() + LAST_BACKOFF_S
            self._held.append(waiting)

    def _serve(self, waiting: Waiting) -> None:
        number = next(self._ids)
        peer = f"{waiting.address[0]}:{waiting.address[1]}"
        packet = json.dumps({"op": "serve", "id": number, "peer": peer, "link": waiting.link}).encode()
        control = self._control
        try:
            if control is None:
                raise OSError("no worker")
            with self._control_lock:
                socket.send_fds(control, [packet], [waiting.sock.fileno()])
            self._active[number] = peer
        except OSError as exc:
            self._refuse(waiting, "no worker", f"the device worker does not take connections: {exc}")
            return
        waiting.sock.close()  # the worker has its own descriptor
        self.log.info("%s: connected (%d of %d)", peer, len(self._active), self.settings.max_connections)

    def _forget(self, fd: int) -> Waiting:
        waiting = self._waiting.pop(fd)
        self._selector.unregister(waiting.sock)
        return waiting

    def _refuse(self, waiting: Waiting, kind: str, text: str) -> None:
        waiting.sock.close()
        self.noisy.report(waiting.address[0], kind, text)

    # -- the worker ----------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.worker = subprocess.Popen(
                worker_command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # On an abort ggml starts a debugger for a backtrace, and the next worker waits for it.
                env={"GGML_NO_BACKTRACE": "1", **os.environ},
            )
        finally:
            theirs.close()
        ours.send(self.settings.to_json().encode())
        self._control = ours
        self._worker_since = time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, _WORKER)

    def _worker_event(self) -> None:
        control = self._control
        assert control is not None  # only a registered control socket has events
        try:
            data = control.recv(MAX_PACKET)
        except OSError:
            data = b""
        if not data:
            self._worker_died()
            return
        event = json.loads(data)
        kind = event["ev"]
        if kind == "ready":
            self._worker_ready(event)
        elif kind == "closed":
            peer = self._active.pop(event["id"], "a head")
            if event["clean"]:
                self.log.info("%s: closed", peer)
            else:
                self.noisy.report(peer.rsplit(":", 1)[0], event["reason"][:40], f"connection closed: {event['reason']}")
        elif kind == "stats":
            entry = self._stats.get(event["id"])
            if entry is not None:
                entry[1].update(event)
                entry[0].set()
        elif kind == "failed":
            self.reason = event["message"]
            if not self._ever_ready:
                kind = getattr(errors, event["kind"], HydraError)
                self._fatal = kind(event["message"], event["hint"])

    def _worker_ready(self, event: dict[str, Any]) -> None:
        self.devices = event["devices"]
        if event["layout"]:
            self.log.warning(
                "This libggml's ggml_cgraph differs (%s): graphs are built through the public API, without fusion.",
                event["layout"],
            )
        self.state, self.reason = "ok", ""
        for device in self.devices:
            free, total = device["memory"]
            self.log.info(
                "%s ready: %s (%s), %.1f of %.1f GiB free",
                self.settings.name, device["name"], device["description"], free / 2**30, total / 2**30,
            )  # fmt: skip
        first, self._ever_ready = not self._ever_ready, True
        for waiting in self._held:
            self._serve(waiting)
        self._held.clear()
        if first and self.on_ready is not None:
            self.on_ready(self)

    def _worker_died(self) -> None:
        worker, control = self.worker, self._control
        assert worker is not None and control is not None  # it was running
        self._selector.unregister(control)
        control.close()
        self._control = None
        try:
            code = worker.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            code = worker.wait()
        self.worker = None
        lost = len(self._active)
        self._active.clear()
        for event, _ in list(self._stats.values()):
            event.set()
        if self._stopping or self._fatal is not None:
            return
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if self.state == "ok" or not self.reason:
            self.reason = f"the device worker {how}"
        self.state = "degraded"
        self.restarts += 1
        if not self._ever_ready and self.restarts >= FIRST_TRIES:
            self._fatal = DeviceError(
                f"The device worker {how}, {self.restarts} times in a row before it was ready.",
                "The driver or the card fails: see `hydra doctor` and the system's log (dmesg).",
            )
            return
        if time.monotonic() - self._worker_since >= STABLE_S:
            self._backoff = FIRST_BACKOFF_S
        self.log.error(
            "The device worker %s; %d connections lost. It starts again in %.0f s.", how, lost, self._backoff
        )
        self._restart_at = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, LAST_BACKOFF_S)

    def _stop_worker(self) -> None:
        worker, control = self.worker, self._control
        if worker is None:
            return
        try:
            if control is not None:
                control.send(json.dumps({"op": "stop"}).encode())
            worker.wait(timeout=STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            worker.kill()
            worker.wait()
        if control is not None:
            control.close()
        self.worker = None

    # -- what the control pool asks (other threads) --------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        worker = self.worker
        return {
            "state": self.state,
            "reason": self.reason,
            "name": self.settings.name,
            "version": hydra.__version__,
            "protocol": ".".join(map(str, wire.PROTOCOL_VERSION)),
            "devices": [
                {**device, **hardware.figures_of(device["name"], device["description"], device["kind"])}
                for device in self.devices
            ],
            "connections": len(self._active),
            "max_connections": self.settings.max_connections,
            "restarts": self.restarts,
            "uptime_s": round(time.time() - self.started, 1),
            "worker_pid": worker.pid if worker is not None else None,
            "config_digest": self.settings.config_digest,
            "time": time.time(),
            "allow": sorted(str(address) for address in self._allowed),
        }

    def stats(self) -> dict[str, Any]:
        """The worker's figures; without them (it is not there, or does not answer in time) what this process knows."""
        number = next(self._stats_ids)
        event = threading.Event()
        answer: dict[str, Any] = {}
        self._stats[number] = (event, answer)
        try:
            control = self._control
            if control is not None:
                with self._control_lock:
                    control.send(json.dumps({"op": "stats", "id": number}).encode())
                event.wait(STATS_S)
        except OSError as exc:
            self.log.debug("stats: %s", exc)
        finally:
            del self._stats[number]
        answer.pop("ev", None)
        answer.pop("id", None)
        if not answer:
            answer = {
                "connections": [],
                "commands": {},
                "error": f"no answer from the device worker ({self.state})",
            }
        answer["tls"] = [{"peer": peer, **told} for tunnel, peer, told in self._tunnels if tunnel.thread.is_alive()]
        return answer


def _addresses(names: tuple[str, ...], log: logging.Logger) -> list[str]:
    """The IP addresses behind the names of the other nodes; a name that cannot be resolved now is said and left out."""
    found = []
    for name in names:
        try:
            found += [info[4][0].split("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]  # type: ignore[union-attr]
        except OSError as exc:
            log.warning("Node address %s cannot be resolved (%s); connections from it will be refused.", name, exc)
    return found


def serve(settings: PeerSettings, **options: Any) -> None:
    """Runs a peer in the foreground until SIGINT or SIGTERM; for the main thread only. Raises as Listener.run."""
    listener = Listener(settings, **options)
    previous = {s: signal.signal(s, lambda *_: listener.stop()) for s in (signal.SIGINT, signal.SIGTERM)}
    # The kernel may give a signal to any thread, and Python's handler runs in the main one: the main loop has to wake.
    with listener._wake_w.dup() as wake:
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            listener.run()
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in previous.items():
                signal.signal(number, handler)
