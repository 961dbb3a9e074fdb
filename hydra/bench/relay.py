"""A TCP relay that holds every byte for a fixed time: the one-way delay of a longer network, for kernels without netem.

One thread a direction reads, one sends when its time has come; the reader never waits for the sender, so the rate is
not bounded by the delay. Costs some 20 µs a message of its own, the same for every peer behind it. Knows nothing of
what it carries.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import sys
import threading
import time

from hydra.bench.process import die_with_parent

_READ_BYTES = 256 << 10
_QUEUED = 1 << 14


def serve(listen: tuple[str, int], forward: tuple[str, int], delay_s: float) -> None:
    """Relay until the process ends."""
    with socket.create_server(listen) as listener:
        while True:
            near, _ = listener.accept()
            threading.Thread(target=_join, args=(near, forward, delay_s), daemon=True).start()


def _join(near: socket.socket, forward: tuple[str, int], delay_s: float) -> None:
    try:
        far = socket.create_connection(forward, timeout=10)
    except OSError:
        near.close()
        return
    far.settimeout(None)
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for source, target in ((near, far), (far, near)):
        held: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUED)
        threading.Thread(target=_read, args=(source, held, delay_s), daemon=True).start()
        threading.Thread(target=_send, args=(target, held), daemon=True).start()


def _read(source: socket.socket, held: queue.Queue[tuple[float, bytes]], delay_s: float) -> None:
    while True:
        try:
            data = source.recv(_READ_BYTES)
        except OSError:
            data = b""
        held.put((time.perf_counter() + delay_s, data))
        if not data:
            return


def _send(target: socket.socket, held: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, data = held.get()
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        try:
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
        except OSError:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            return


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="hydra.bench.relay")
    parser.add_argument("--listen", type=_address, required=True)
    parser.add_argument("--forward", type=_address, required=True)
    parser.add_argument("--delay", type=float, required=True)
    options = parser.parse_args(arguments)
    die_with_parent()
    serve(options.listen, options.forward, options.delay)
    return 0


if __name__ == "__main__":
    sys.exit(main())
