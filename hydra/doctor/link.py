"""What the wire to a peer does to a token: round trips in the pattern of a decode step, and bandwidth both ways.

A step is many small sends and one reply (the computing between them is left out: it would only blur the wire). Where
the peer's accepted socket lacks TCP_NODELAY and its reply leaves in two parts, Nagle's algorithm holds the second until
our kernel's delayed acknowledgement, 40 ms later on Linux (up to 200 ms elsewhere): that signature is looked for,
against the bare round trip of the network.

Knows ggml-RPC through hydra.doctor.kernels and nothing of who is at the other end.
Rules: RFC 896, RFC 1122 4.2.3.2; TCP_DELACK_MIN in Linux' include/net/tcp.h; docs/doctor.md for the figures.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hydra.doctor import kernels
from hydra.doctor.finding import Finding, fail, ok, warn
from hydra.rpc.client import Client

# One step of a 27B's peer as seen on the wire: activations, positions, mask, indices.
STEP_SENDS = (2400, 2400, 300, 1024, 1024, 300, 300, 512)
STEPS, WARMUP = 60, 4
LIMIT_S = 6.0  # of the whole measurement: 60 stalls of 40 ms are 2.4 s
PIECE_BYTES = 4 << 20
BANDWIDTH_S = 0.4
DELAYED_ACK_MS = (35.0, 60.0)
LONG_DELAYED_ACK_MS = (180.0, 230.0)


@dataclass(frozen=True)
class Trips:
    """Round trips of a step in ms; floor_ms: the bare network's, as the kernel measured it."""

    ms: tuple[float, ...]
    floor_ms: float

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.ms, share * 100))

    @property
    def stalled(self) -> tuple[float, ...]:
        """Those that took one delayed acknowledgement longer than the network needs."""
        return tuple(ms for ms in self.ms if any(low <= ms - self.floor_ms <= high for low, high in
                                                 (DELAYED_ACK_MS, LONG_DELAYED_ACK_MS)))

    @property
    def nagle(self) -> bool:
        return len(self.stalled) >= max(3, len(self.ms) // 5) and self.floor_ms < DELAYED_ACK_MS[0] / 2


def measure_trips(client: Client, graph: kernels.RemoteGraph, floor_s: float, steps: int = STEPS) -> Trips:
    """Time the messages of ``steps`` steps on one connection, nothing computed between.

    floor_s: a bare round trip (the TCP handshake), 0 if unknown.
    """
    data = [bytes(size) for size in STEP_SENDS]
    graph.compute()
    graph.result()
    times: list[float] = []
    end = time.perf_counter() + LIMIT_S
    for step in range(steps + WARMUP):
        began = time.perf_counter()
        for piece in data:
            graph.set(graph.spare, piece)
        graph.get(graph.out, 4 * graph.n * graph.m)
        now = time.perf_counter()
        if step >= WARMUP:
            times.append((now - began) * 1e3)
        if now > end and len(times) >= 5:
            break
    floors = [value for value in (floor_s * 1e3, kernel_rtt_ms(client.socket), min(times)) if value > 0]
    return Trips(tuple(times), min(floors))


def kernel_rtt_ms(sock: socket.socket) -> float:
    """The smallest round trip that the kernel saw on this connection (tcpi_min_rtt); 0 where it does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, option, 192)
    # tcp_info: 8 bytes of state, 24 u32 (to offset 104), 4 u64 (pacing rates, bytes), then u32s: min_rtt is at 148
    return struct.unpack_from("I", info, 148)[0] / 1e3 if len(info) >= 152 else 0.0


def judge_trips(check: str, trips: Trips) -> Finding:
    """The distribution in words, and whether it has the signature of Nagle's algorithm."""
    p50, p99 = trips.percentile(0.5), trips.percentile(0.99)
    words = (f"a step's messages take {p50:.2f} ms (median of {len(trips.ms)}; 90 % within "
             f"{trips.percentile(0.9):.2f}, 99 % within {p99:.2f}, longest {max(trips.ms):.2f}); the network itself "
             f"{trips.floor_ms:.3f} ms")
    data = {"p50_ms": round(p50, 4), "p90_ms": round(trips.percentile(0.9), 4), "p99_ms": round(p99, 4),
            "max_ms": round(max(trips.ms), 4), "floor_ms": round(trips.floor_ms, 4), "steps": len(trips.ms),
            "stalled": len(trips.stalled)}
    if trips.nagle:
        typical = float(np.median(trips.stalled))
        return fail("link", check, f"{len(trips.stalled)} of {len(trips.ms)} steps stall for a delayed acknowledgement "
                    f"({typical:.0f} ms a step): Nagle's algorithm; {words}",
                    f"TCP_NODELAY is missing on the sockets that the peer accepts: every token pays {typical:.0f} ms. "
                    "Serve with `hydra up` there (or llama.cpp's own ggml-rpc-server).", **data)
    if trips.floor_ms > 5 or p50 > 10:
        return warn("link", check, words, "That is a slow network for this: every token pays it once. Use a cable, one "
                    "switch, no VPN.", **data)
    if p99 > 10 * p50 and p99 > 5:
        return warn("link", check, words, "Some steps wait long: Wi-Fi, power saving of the network card, a busy box "
                    "or switch.", **data)
    return ok("link", check, words, **data)


def measure_bandwidth(graph: kernels.RemoteGraph) -> tuple[float, float]:
    """(to the peer, from the peer) in bytes per second, through its device's memory."""

    def settle() -> None:
        graph.get(graph.out, 4)

    def rate(move: object, limit_s: float = BANDWIDTH_S) -> float:
        assert callable(move)
        moved, began = 0, time.perf_counter()
        while moved < 2 * PIECE_BYTES or time.perf_counter() - began < limit_s:
            move()
            moved += PIECE_BYTES
            if time.perf_counter() - began > 4 * limit_s:
                break
        settle()
        return moved / (time.perf_counter() - began)

    data = bytes(PIECE_BYTES)
    settle()
    return (rate(lambda: graph.set(graph.spare, data)), rate(lambda: graph.get(graph.spare, PIECE_BYTES)))


def judge_bandwidth(check: str, up: float, down: float, speed_mbit: int = 0) -> Finding:
    """speed_mbit: of this box's interface to that peer; 0 = not known, or loopback."""
    words = f"{up / 1e6:.0f} MB/s to the peer, {down / 1e6:.0f} MB/s from it"
    data = {"up_bytes_s": round(up), "down_bytes_s": round(down), "speed_mbit": speed_mbit}
    if speed_mbit:
        line = speed_mbit * 125_000
        words += f"; the interface could do {line / 1e6:.0f}"
        if min(up, down) < 0.5 * line and line <= 1.25e9 / 2:
            return warn("link", check, words, "Something in between is slower: a 100 Mbit/s port, a bad cable, a busy "
                        "switch, Wi-Fi at the other end.", **data)
    if min(up, down) < 30e6:
        return warn("link", check, words, "Loads of weights will be long (10 GB take "
                    f"{10e9 / up / 60:.0f} minutes): use a gigabit cable; set peer.cache_dir or peer.model_path.",
                    **data)
    return ok("link", check, words, **data)


def check(client: Client, name: str, connect_s: float, speed_mbit: int = 0) -> Iterator[Finding]:
    """Compute, round trips and bandwidth over one open connection. Raises: PeerError."""
    graph = kernels.RemoteGraph(client, 64, 128, 16, spare_bytes=PIECE_BYTES)
    yield check_compute(graph, name)
    yield judge_trips(name, measure_trips(client, graph, connect_s))
    yield judge_bandwidth(f"{name}: bandwidth", *measure_bandwidth(graph), speed_mbit=speed_mbit)
    graph.free()


def check_compute(graph: kernels.RemoteGraph, name: str, rounds: int = 3,
                  expected: Sequence[np.ndarray] = ()) -> Finding:
    """A known product through the peer against the local result; the second round on reuses the peer's graph."""
    wrong = total = 0
    for seed in range(rounds):
        a = kernels.whole_numbers(graph.n, graph.k, seed)
        b = kernels.whole_numbers(graph.m, graph.k, 50 + seed)
        graph.set(graph.a, a)
        graph.set(graph.b, b)
        if seed:
            graph.recompute()
        else:
            graph.compute()
        wrong += kernels.differing(graph.result(), expected[seed] if expected else b @ a.T)
        total += graph.n * graph.m
    if wrong:
        return fail("compute", f"product on {name}", f"{wrong} of {total} numbers differ from this box's result",
                    "Its card, memory or library is at fault: run `hydra doctor` on that box.", wrong=wrong)
    return ok("compute", f"product on {name}", f"{total} numbers equal to this box's result")
