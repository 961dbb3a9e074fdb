"""Plays the hostile corpus against hydra's peer and the stock server, a connection for each case: who survives?

    python -m tests.hostile.run [--peer hydra|stock|both] [--only WORDS] [--markdown] [--json]

After each case a new client must get a small sum computed, and get it right. A server that has ended, or that does not
serve that client within the limit, is started again for the next case. Both run on the CPU device: same library, same
kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hydra.bench.stock import StockServer
from hydra.errors import HydraError
from hydra.peer.launch import PeerProcess, start_peer
from hydra.rpc import wire
from hydra.rpc.client import Client
from hydra.rpc.wire import Command
from tests.hostile.corpus import CASES, Case
from tests.hostile.craft import BUFFER_BYTES, HELLO, Context, message
from tests.peer_tools import Vectors, get_json

DEADLINE_S = 1.0  # hydra's own, for the first byte, HELLO and the rest of a message
ANSWER_S = 8.0
NEXT_CLIENT_S = 6.0
_MEMORY_BYTES = 8 << 30  # the stock server allocates what a message announces: not with this machine's memory
_PROBE = message(Command.DEVICE_COUNT)
_PROBE_REPLY = struct.pack("<QI", 4, 1)


@dataclass(frozen=True)
class Result:
    """peer: "hydra" or "stock". outcome: what became of the hostile connection: "closed", "answered" or "silent".

    served: a new client got its sum. ended: the server's process (hydra: its device worker) died of it.
    """

    case: str
    kind: str
    peer: str
    outcome: str
    served: bool
    ended: bool
    seconds: float
    note: str = ""

    @property
    def survived(self) -> bool:
        return self.served and not self.ended


class HydraTarget:
    """hydra's peer on the CPU, with deadlines short enough to wait for."""

    name = "hydra"

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process: PeerProcess = start_peer(
            device="CPU",
            threads=1,
            first_byte_s=DEADLINE_S,
            hello_s=DEADLINE_S,
            message_s=DEADLINE_S,
            max_connections=8,
        )
        self.host, self.port = self.process.host, self.process.port
        self.restarts = 0

    def ended(self) -> bool:
        """Whether the device worker has died since the last question."""
        if self.process.process.poll() is not None:
            return True
        restarts = int(get_json(self.port, "/health")["restarts"])
        died, self.restarts = restarts > self.restarts, restarts
        return died

    def restart(self) -> None:
        """Only where the listener itself is gone: the worker is its business."""
        if self.process.process.poll() is not None:
            self.close()
            self.start()

    def close(self) -> None:
        self.process.stop()


class StockTarget:
    """The C++ server of the same library."""

    name = "stock"

    def __init__(self) -> None:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger on every abort would only take time
        self.start()

    def start(self) -> None:
        self.server = StockServer(device="CPU", threads=1)
        resource.prlimit(self.server.pid, resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        self.host, self.port = self.server.host, self.server.port

    def ended(self) -> bool:
        try:
            return Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        self.server.close()


Target = HydraTarget | StockTarget


def open_session(host: str, port: int) -> tuple[socket.socket, Context]:
    """A connection after HELLO with two buffers, spoken by hand so that nothing of it depends on hydra's client."""
    sock = socket.create_connection((host, port), timeout=ANSWER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(HELLO)
    _reply(sock)
    pointers = []
    for _ in range(2):
        sock.sendall(message(Command.ALLOC_BUFFER, wire.ALLOC_BUFFER.pack(0, BUFFER_BYTES)))
        ptr = struct.unpack("<QQ", _reply(sock))[0]
        sock.sendall(message(Command.BUFFER_GET_BASE, struct.pack("<Q", ptr)))
        pointers += [ptr, struct.unpack("<Q", _reply(sock))[0]]
    return sock, Context(*pointers)


def _reply(sock: socket.socket) -> bytes:
    (size,) = struct.unpack("<Q", _exactly(sock, 8))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def outcome_of(sock: socket.socket, limit_s: float) -> str:
    """"closed", "answered" (the probe at the end got its reply) or "silent"."""  # fmt: skip
    deadline = time.monotonic() + limit_s
    tail = b""
    while (left := deadline - time.monotonic()) > 0:
        # the probe's reply may also stand in the middle of others: it counts when nothing follows it
        sock.settimeout(min(left, 0.3) if tail.endswith(_PROBE_REPLY) else left)
        try:
            piece = sock.recv(1 << 20)
        except TimeoutError:
            if tail.endswith(_PROBE_REPLY):
                return "answered"
            continue
        except OSError:
            return "closed"
        if not piece:
            return "closed"
        tail = (tail + piece)[-64:]
    return "silent"


def next_client(host: str, port: int) -> tuple[bool, str]:
    """Whether a new client gets 1 + 2 computed, and why not."""
    try:
        with Client(host, port, timeout_s=NEXT_CLIENT_S) as client:
            vectors = Vectors(client)
            vectors.set(0, np.ones(64))
            vectors.set(1, np.full(64, 2.0))
            vectors.add(2, 0, 1)
            right = bool((vectors.get(2) == 3.0).all())
            return right, "" if right else "a wrong sum"
    except HydraError as error:
        return False, error.message


def play(case: Case, target: Target) -> Result:
    """One case against one server, which is left fit for the next."""
    started = time.monotonic()
    outcome, note = "closed", ""
    sock: socket.socket | None = None
    try:
        if case.raw:
            sock = socket.create_connection((target.host, target.port), timeout=ANSWER_S)
            data = case.build(Context(0, 0, 0, 0))
        else:
            sock, context = open_session(target.host, target.port)
            data = case.build(context)
            if not case.hold and case.end == "wait":
                data += _PROBE
        sock.settimeout(ANSWER_S if not case.hold else 0.5)
        with contextlib.suppress(OSError):  # the server may close in the middle, or not read on: both are its right
            sock.sendall(data)
        if case.end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if case.end != "wait":
            sock.close()
        elif not case.hold:
            outcome = outcome_of(sock, ANSWER_S)
            sock.close()  # a server of one client at a time must not be blamed for the next one's wait
    except OSError as error:
        note = f"no session: {error}"
    served, why = next_client(target.host, target.port)
    if case.hold and sock is not None:
        outcome = "silent" if case.then == "answered" else outcome_of(sock, ANSWER_S)
    if sock is not None:
        sock.close()
    ended = target.ended()
    for _ in range(0 if served or ended else 30):  # a process that aborts takes a moment to be gone
        time.sleep(0.1)
        ended = ended or target.ended()
    if ended or not served:
        target.restart()
    return Result(case.name, case.kind, target.name, outcome, served, ended, time.monotonic() - started, note or why)


def run(
    targets: Iterable[Callable[[], Target]], cases: Iterable[Case], report: Callable[[Result], None]
) -> list[Result]:
    """Every case against every server, server by server."""
    cases, results = list(cases), []
    for make in targets:
        target = make()
        try:
            for case in cases:
                results.append(play(case, target))
                report(results[-1])
        finally:
            target.close()
    return results


def markdown(results: list[Result]) -> str:
    """The table of docs/security.md: a row for each kind; the cases that a server did not survive are named."""
    kinds = list(dict.fromkeys(r.kind for r in results))
    peers = list(dict.fromkeys(r.peer for r in results))
    heads = [f"{peer}: ended | {peer}: no longer served" for peer in peers]
    lines = [f"| kind | cases | {' | '.join(heads)} |", "|---" * (2 + 2 * len(peers)) + "|"]
    for kind in [*kinds, "all"]:
        rows = [r for r in results if kind in (r.kind, "all")]
        cells = []
        for peer in peers:
            own = [r for r in rows if r.peer == peer]
            cells += [str(sum(r.ended for r in own)), str(sum(not r.served and not r.ended for r in own))]
        lines.append(f"| {kind} | {len(rows) // len(peers)} | {' | '.join(cells)} |")
    for peer in peers:
        for what, lost in (
            ("ended by", [r.case for r in results if r.peer == peer and r.ended]),
            (
                "served nobody during or after",
                [r.case for r in results if r.peer == peer and not (r.served or r.ended)],
            ),
        ):
            lines += ["", f"{peer} {what}: {'; '.join(lost) if lost else 'none'}."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.run", description=__doc__)
    parser.add_argument("--peer", choices=("hydra", "stock", "both"), default="both")
    parser.add_argument("--only", default="", help="cases whose name or kind contains this")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/security.md")
    parser.add_argument("--json", action="store_true", help="print every result as one JSON object at the end")
    options = parser.parse_args(arguments)
    makers: dict[str, Callable[[], Any]] = {"hydra": HydraTarget, "stock": StockTarget}
    chosen = list(makers) if options.peer == "both" else [options.peer]
    cases = [case for case in CASES if options.only in case.name or options.only == case.kind]

    def report(result: Result) -> None:
        verdict = "survived" if result.survived else "ENDED" if result.ended else "NOT SERVING"
        line = f"{result.peer:6} {verdict:12} {result.outcome:9} {result.seconds:5.1f} s  {result.kind}: {result.case}"
        sys.stderr.write(f"{line}  {result.note}\n")

    results = run([makers[name] for name in chosen], cases, report)
    if options.markdown:
        sys.stdout.write(markdown(results) + "\n")
    if options.json:
        sys.stdout.write(json.dumps({"results": [asdict(r) for r in results]}) + "\n")
    return 1 if any(not r.survived for r in results if r.peer == "hydra") else 0


if __name__ == "__main__":
    sys.exit(main())
