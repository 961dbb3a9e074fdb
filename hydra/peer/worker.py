"""The process that owns the device: one thread per head's connection, and a control thread that talks to the listener.

A process of its own because libggml aborts on some faults (an assertion on a shape, a CUDA error). Its death costs its
connections and nothing else: the listener sees it, says so, and starts another; the card's memory is free again.

Knows nothing of listening. Descriptors of connections, already made ready and known to begin with HELLO, come over a
SEQPACKET socket, one JSON object a packet:

    listener → worker   {"op": "serve", "id": n, "peer": "address:port", "link": bool} + descriptor ·
                        {"op": "stats", "id": n} · {"op": "stop"}
    worker → listener   {"ev": "ready", "devices": […]} · {"ev": "closed", "id": n, "reason": …,
    "clean": bool} · {"ev": "stats", …}
                        · {"ev": "failed", "kind": a class of hydra.errors, "message": …, "hint": …}
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hydra.errors import HydraError
from hydra.ggml import abi, library
from hydra.ggml.backend import memory, pick_device
from hydra.peer.linked import LinkedSession
from hydra.peer.session import Session
from hydra.peer.settings import PeerSettings
from hydra.peer.shared import SharedState
from hydra.peer.sockets import read_options
from hydra.peer.stats import CommandStats, summary
from hydra.peer.weights import WeightCache

MAX_PACKET = 1 << 18
SEND_TIMEOUT_S = 30


class Worker:
    """Serves the connections that the listener hands over, until told to stop or the listener is gone."""

    def __init__(self, control: socket.socket, settings: PeerSettings) -> None:
        self.control = control
        self.settings = settings
        self.lock = threading.Lock()
        self.sessions: dict[int, tuple[Session, str, float]] = {}
        self.closed_stats = CommandStats(settings.timings)
        self.cache: WeightCache | None = None

    def run(self) -> None:
        try:
            ggml = library.load()
            ggml.quiet()
            problem = abi.verify_layout(ggml)
            devices = [pick_device(ggml, name) for name in self.settings.devices]
            if self.settings.cache_dir:
                model = Path(self.settings.model_path) if self.settings.model_path else None
                self.cache = WeightCache(Path(self.settings.cache_dir), self.settings.cache_max_bytes, model)
            self.shared = SharedState(ggml, devices, self.settings, self.cache, private_layout=not problem)
        except HydraError as exc:
            self.report({"ev": "failed", "kind": type(exc).__name__, "message": exc.message, "hint": exc.hint})
            return
        self.report(
            {
                "ev": "ready",
                "pid": os.getpid(),
                "layout": problem,
                "devices": [
                    {"name": d.name, "description": d.description, "kind": d.kind, "memory": memory(ggml, d)}
                    for d in devices
                ],
            }
        )
        # Nothing on the path makes reference cycles; a collection in the middle of a step would be a pause for nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 1000)
        self.serve()

    def serve(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.control, MAX_PACKET, 1)
            except OSError:
                break
            if not data:
                break  # the listener is gone
            message = json.loads(data)
            if message["op"] == "serve" and fds:
                sock = socket.socket(fileno=fds[0])
                thread = threading.Thread(
                    target=self.connection, args=(sock, message), name=f"head {message['peer']}", daemon=True
                )
                thread.start()
            elif message["op"] == "stats":
                self.report({"ev": "stats", "id": message["id"], **self.describe()})
            elif message["op"] == "stop":
                break
        self.stop()

    def connection(self, sock: socket.socket, message: dict[str, Any]) -> None:
        reason, clean = "", True
        number, peer = message["id"], message["peer"]
        session: Session | None = None
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_TIMEOUT_S))
            session = (LinkedSession if message["link"] else Session)(sock, self.shared)
            with self.lock:
                self.sessions[number] = (session, peer, time.monotonic())
            session.run()
        except HydraError as exc:
            reason, clean = exc.message, False
        except Exception as exc:  # our own fault: the connection ends, the worker and the others go on
            reason, clean = f"{type(exc).__name__}: {exc}", False
            sys.excepthook(type(exc), exc, exc.__traceback__)
        finally:
            with self.lock:
                self.sessions.pop(number, None)
                if session is not None:
                    self.closed_stats.absorb(session.stats)
            sock.close()
            self.report({"ev": "closed", "id": number, "reason": reason, "clean": clean})

    def describe(self) -> dict[str, Any]:
        with self.lock:
            sessions = dict(self.sessions)
            parts = [self.closed_stats, *(s.stats for s, _, _ in sessions.values())]
        connections = []
        for number, (session, peer, since) in sessions.items():
            try:
                options = read_options(session.sock)
            except OSError:
                continue  # closed in this moment
            connections.append(
                {
                    "id": number,
                    "peer": peer,
                    "seconds": round(time.monotonic() - since, 1),
                    "buffer_bytes": session.handles.total_bytes,
                    "options": options,
                }
            )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "connections": connections,
            "commands": summary(parts),
            "rss_peak_bytes": usage.ru_maxrss * 1024,
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
            "threads": threading.active_count(),
            "memory": [memory(self.shared.ggml, d) for d in self.shared.devices],
            "cache": None if self.cache is None else vars(self.cache.counters),
        }

    def report(self, event: dict[str, Any]) -> None:
        try:
            with self.lock:
                self.control.send(json.dumps(event).encode())
        except OSError:
            pass  # the listener is gone; serve() sees it too

    def stop(self) -> None:
        """Ends all connections, within a few seconds, and gives the device back."""
        with self.lock:
            sessions = [session for session, _, _ in self.sessions.values()]
        for session in sessions:
            session.receiver.stopping = True
            try:
                session.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it ended by itself
        deadline = time.monotonic() + 5.0
        while self.sessions and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.cache is not None:
            self.cache.close()


def _timeval(seconds: int) -> bytes:
    return struct.pack("ll", seconds, 0)


def main(control_fd: int) -> None:
    """Entry of the worker process; the first packet on control_fd carries its settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the listener decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=False)
    control = socket.socket(fileno=control_fd)
    settings = PeerSettings.from_json(control.recv(MAX_PACKET).decode())
    Worker(control, settings).run()
    control.close()
    # The CUDA runtime and OpenMP have exit handlers that can hang when a device failed; everything of ours is closed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
