"""`hydra bench explain`: where a token's time goes: head, peer, wire, Python, each beside its limit.

Loads the model as `hydra up` does (head here, the first layers on a peer), decodes with drafting off, and splits the
mean step:

    python   engine time outside of llama.cpp, by the engine's own clock
    peer     time in which the peer worked on our messages, by its own clocks; on one that keeps none (it serves
             already), what is left of the remote part
    wire     a step's messages on a connection of their own, nothing computed between (hydra.doctor.link)
    head     what is left: llama.cpp on the head's device

A limit is what the same work takes at the device's measured bandwidth (hydra.bench.device, hydra.plan.speed), and the
network's bare round trip. Runs the engine in a process of its own, because llama.cpp's client ends its process when a
peer dies.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.bench.process import Child, die_with_parent, worker_command
from hydra.doctor import kernels, link
from hydra.doctor.ask import NoAnswer, Target, get, open_client
from hydra.errors import HydraError
from hydra.plan import cards, speed
from hydra.plan.gguf import read_header
from hydra.plan.memory import Place, Setting
from hydra.plan.shape import shape_of

LIMIT_S = 1800.0
WARMUP = 8
_WORK = ("SET_TENSOR", "GET_TENSOR", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "COPY_TENSOR", "MEMSET_TENSOR", "BUFFER_CLEAR")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What the inner process does. peer: host:port, empty = all layers on the head."""

    model: str
    peer: str = ""
    peer_layers: int = 0
    devices: tuple[str, ...] = ()
    threads: int = 2
    tokens: int = 64
    ctx_size: int = 4096
    cache_type: str = "f16"


@dataclass(frozen=True)
class Part:
    """One part of a step: its share of the time, what it cannot be below (0 = not known), and in words what that is."""

    name: str
    seconds: float
    limit_s: float = 0.0
    limit: str = ""

    @property
    def excess_s(self) -> float:
        return max(0.0, self.seconds - self.limit_s) if self.limit_s or self.name == "python" else 0.0


@dataclass
class Explained:
    """A step of decode: `step_s` and its parts, which add up to it."""

    step_s: float
    parts: list[Part] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    peer_clocks: bool = True

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s if self.step_s else 0.0

    @property
    def verdict(self) -> str:
        """The part with most to win."""
        worst = max(self.parts, key=lambda part: part.excess_s)
        if worst.excess_s < 0.1 * self.step_s:
            return "Every part is near its limit: faster memory, a smaller model or MTP would help."
        advice = {
            "peer": "its card (clocks, temperature: `hydra doctor` there) and the split (`hydra plan`)",
            "head": "its card (clocks, temperature: `hydra doctor`) and the split (`hydra plan`)",
            "wire": "the network: `hydra doctor` measures it, cable and socket options first",
            "python": "what else uses the head's CPU",
        }[worst.name]
        return (f"Most is lost in {worst.name}: {worst.seconds * 1e3:.2f} ms a token where {worst.limit_s * 1e3:.2f} "
                f"would do. Look at {advice}.")

    def to_dict(self) -> dict[str, Any]:
        parts = {part.name: {"ms": round(part.seconds * 1e3, 4), "limit_ms": round(part.limit_s * 1e3, 4) or None,
                             "limit": part.limit} for part in self.parts}
        return {"step_ms": round(self.step_s * 1e3, 4), "tokens_per_s": round(self.tokens_per_s, 3),
                "layers": self.layers, "peer_clocks": self.peer_clocks, "verdict": self.verdict, "parts": parts}


def run(work: Work, *, peer_device: str = "CPU", head_bandwidth: float = 0.0, peer_bandwidth: float = 0.0,
        report: Report = lambda _line: None) -> Explained:
    """Measure and split. work.peer empty and work.peer_layers above 0: a peer is started on loopback for it.

    head_bandwidth, peer_bandwidth: bytes per second, 0 = measured here (the head, and a peer on this box) or by the
    card's data sheet.
    Raises: HydraError.
    """
    with contextlib.ExitStack() as stack:
        target: Target | None = None
        own = bool(work.peer_layers) and not work.peer
        if own:
            from hydra.peer.launch import start_peer

            report("starting a peer on loopback")
            process = stack.enter_context(start_peer(device=peer_device, threads=work.threads, timings=True))
            work = Work(**{**asdict(work), "peer": f"{process.host}:{process.port}", "devices": tuple(work.devices)})
        if work.peer:
            host, _, port = work.peer.rpartition(":")
            target = Target("peer", host.strip("[]"), int(port))
        op_s = {"head": 0.0, "peer": 0.0}
        if not head_bandwidth:
            report("measuring the head's device")
            head_bandwidth, op_s["head"] = _device(work.devices[0] if work.devices else "CPU", work.threads)
        if own and not peer_bandwidth:
            report("measuring the peer's device")
            peer_bandwidth, op_s["peer"] = _device(peer_device, work.threads)
        elif target is not None and not peer_bandwidth:
            peer_bandwidth = _sheet(target)
        report("loading and decoding")
        inner = _inner(work)
        wire_s, floor_s = _wire(target) if target is not None else (0.0, 0.0)
    return split(work, inner, wire_s, floor_s, head_bandwidth, peer_bandwidth, op_s)


def split(work: Work, inner: dict[str, Any], wire_s: float, floor_s: float, head_bandwidth: float,
          peer_bandwidth: float, op_s: dict[str, float]) -> Explained:
    """The parts, from what was measured. inner: what the inner process said."""
    step_s, python_s, peer_s = float(inner["step_s"]), float(inner["python_s"]), float(inner["peer_s"])
    layers = {str(name): int(count) for name, count in inner["layers"].items()}
    shape = shape_of(read_header(work.model))
    setting = Setting(work.ctx_size, type_k=work.cache_type, type_v=work.cache_type, draft=False)
    counts = {"peer": layers.get("peer", 0), "head": layers.get("head", shape.n_layer)}
    places = [Place("peer", False, False, 0, peer_bandwidth or 1.0, op_s["peer"]),
              Place("head", True, False, 0, head_bandwidth or 1.0, op_s["head"])]
    predicted = speed.predict(shape, setting, places, counts, depth=int(inner["depth"]), link_s=0.0, wire_bytes_s=1e15)
    assert predicted is not None  # both bandwidths were given
    clocks = peer_s > 0
    if work.peer and not clocks:  # head at its limit, and the rest is the peer's
        head_limit = predicted.nodes["head"].work_s if head_bandwidth else 0.0
        peer_s = max(0.0, step_s - python_s - wire_s - head_limit)
    head_s = max(0.0, step_s - python_s - peer_s - wire_s)

    def limit(node: str, bandwidth: float) -> tuple[float, str]:
        if not bandwidth:
            return 0.0, "its bandwidth is not known"
        found = predicted.nodes[node]
        return found.work_s, f"{found.read_bytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s"

    parts = [Part("head", head_s, *limit("head", head_bandwidth))]
    if work.peer:
        parts.append(Part("peer", peer_s, *limit("peer", peer_bandwidth)))
        parts.append(Part("wire", wire_s, floor_s, "a bare round trip"))
    parts.append(Part("python", python_s, 0.0, "nothing"))
    return Explained(step_s, parts, layers, clocks)


def _sheet(target: Target) -> float:
    """The peer's bandwidth by its card's data sheet; 0 where the card is not known."""
    try:
        devices = get(target, "/health").body.get("devices") or [{}]
    except NoAnswer:
        return 0.0
    card = cards.find(str(devices[0].get("description", "")))
    return card[1] * 1e9 * cards.EFFICIENCY if card else 0.0


def _wire(target: Target) -> tuple[float, float]:
    """(a step's messages, the bare round trip) in seconds."""
    with open_client(target, 30.0) as client:
        graph = kernels.RemoteGraph(client, 64, 128, 16)
        trips = link.measure_trips(client, graph, 0.0)
        graph.free()
    return trips.percentile(0.5) / 1e3, trips.floor_ms / 1e3


def _device(name: str, threads: int) -> tuple[float, float]:
    """Bandwidth and cost of an operation of a device of this box, measured in a process of its own."""
    answer = _child(["device", json.dumps({"name": name, "threads": threads})], 120.0)
    return float(answer["bandwidth_bytes_s"]), float(answer["op_s"])


def _inner(work: Work) -> dict[str, Any]:
    return _child(["decode", json.dumps(asdict(work))], LIMIT_S)


def _child(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The one JSON answer of an inner process. Raises: HydraError with its words."""
    with Child(worker_command("explain", arguments), pipe=True) as child:
        deadline = threading.Timer(limit_s, child.process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            assert child.process.stdout is not None
            for line in child.process.stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if "error" in message:
                        raise HydraError(message["error"], message.get("hint", ""))
                    return dict(message)
        finally:
            deadline.cancel()
        child.process.wait(10)
        raise HydraError(f"The measuring process ended with status {child.process.returncode}:\n{child.log_tail()}")


# ---- the inner process ---------------------------------------------------------------------------------------------


def decode(work: Work) -> dict[str, Any]:
    """Load, decode, and say what a step took: step_s, python_s, peer_s (0 = it keeps no clocks), depth, layers."""
    from hydra.head.engine import Engine
    from hydra.head.sampling import SamplingParams
    from hydra.head.spec import DraftSpec, Endpoint, EngineSpec

    spec = EngineSpec(
        work.model, endpoints=(Endpoint("peer", work.peer),) if work.peer else (),
        layers={"peer": work.peer_layers} if work.peer else {}, devices=tuple(work.devices), ctx_size=work.ctx_size,
        cache_type_k=work.cache_type, cache_type_v=work.cache_type, threads=work.threads, use_extra_bufts=False,
        draft=DraftSpec("none"))
    host, _, port = work.peer.rpartition(":")
    target = Target("peer", host.strip("[]"), int(port)) if work.peer else None
    with Engine(spec) as engine:
        prompt = [(engine.vocab.n_tokens // 3 + 7 * i) % engine.vocab.n_tokens for i in range(64)]
        params = SamplingParams(temperature=0.0, max_tokens=work.tokens + WARMUP, ignore_eos=True)
        events = engine.generate(prompt, params)
        made = 0
        while made < WARMUP:
            made += len(getattr(next(events), "tokens", ()))
        before, python_s, steps = _busy_s(target), engine.python_s, engine.decoded_steps
        began = time.perf_counter()
        for _ in events:
            pass
        took = time.perf_counter() - began
        count = max(1, engine.decoded_steps - steps)
        return {"step_s": took / count, "python_s": (engine.python_s - python_s) / count,
                "peer_s": (_busy_s(target) - before) / count, "depth": len(prompt) + WARMUP + count // 2,
                "layers": engine.info["layers"]}


def _busy_s(target: Target | None) -> float:
    """How long the peer has worked on messages so far, by its own clocks; 0 where it keeps none."""
    if target is None:
        return 0.0
    try:
        commands = get(target, "/stats").body.get("commands") or {}
    except NoAnswer:
        return 0.0
    return sum(float(commands.get(name, {}).get("total_ms", 0.0)) for name in _WORK) / 1e3


def main(arguments: list[str] | None = None) -> int:
    """Entry of the inner process; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    try:
        fields = json.loads(given[1])
        if given[0] == "device":
            from hydra.bench.device import measure

            answer = measure(fields["name"], threads=fields["threads"], mib=256).to_dict()
        else:
            answer = decode(Work(**{**fields, "devices": tuple(fields["devices"])}))
    except HydraError as error:
        answer = {"error": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 1 if "error" in answer else 0


def default_layers(model: Path) -> int:
    """Half of the model's layers."""
    return shape_of(read_header(model)).n_layer // 2


if __name__ == "__main__":
    sys.exit(main())
