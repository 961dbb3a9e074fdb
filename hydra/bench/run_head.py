"""The head of every measurement: one process that loads a model, times it, and ends.

The same code runs whatever the peer is (stock, hydra's, a sink, none), so that a difference between two runs is the
peer's. One process a run, because the stock RPC client keeps connections for as long as its process lives and aborts
with it. Talks to its parent in JSON lines on stdout: ``{"phase": NAME, "edge": "begin"|"end"}`` around each phase, so
that the parent can weigh the peer at that moment, and ``{"result": …}`` at the end.

Knows how to measure and nothing of pairs, ratios or peers; llama.cpp is reached through hydra.head.llama only.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.bench.process import die_with_parent
from hydra.errors import HydraError


@dataclass(frozen=True)
class HeadSpec:
    """One run of the head.

    ``peer``: ``host:port``, empty for none. ``peer_layers``: repeating layers there, -1 = all of them with the output
    on the head as hydra places it; ``everything_on_peer`` puts the output there too. ``decode_tokens``,
    ``verify_steps``, ``prompts``: 0 or empty leaves that out; all empty is a load and nothing else.
    ``warmup_tokens``: decoded before the first figure. ``stats``: ask the peer for /stats after the decode.
    """

    model: str
    peer: str = ""
    peer_layers: int = -1
    everything_on_peer: bool = False
    devices: tuple[str, ...] = ()
    threads: int = 2
    ctx_size: int = 4096
    ubatch_size: int = 512
    cache_type: str = "f16"
    flash_attn: str = "auto"
    pipeline: bool = False
    prompts: tuple[int, ...] = ()
    prefill_repeats: int = 1
    decode_tokens: int = 0
    decode_after: int = 32
    verify_steps: int = 0
    verify_width: int = 4
    warmup_tokens: int = 8
    stats: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HeadSpec:
        values: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


@dataclass
class HeadResult:
    """What one run measured; times in seconds, speeds per second, absent figures 0.

    ``prefill_tps`` by prompt length. ``step_ms``: every decode step. ``verify_sps``: steps per second of
    ``verify_width`` tokens. ``tokens``: what greedy decoding chose, so that runs can be told to agree.
    """

    load_s: float = 0.0
    context_s: float = 0.0
    prefill_tps: dict[str, float] = field(default_factory=dict)
    decode_tps: float = 0.0
    verify_sps: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def run(spec: HeadSpec) -> HeadResult:
    """Measure as ``spec`` says. Raises: HydraError."""
    # Here and not at the top: the parent imports this module for HeadSpec and must not load llama.cpp.
    from hydra.head import llama, loading, placement
    from hydra.head.spec import Endpoint, EngineSpec

    result = HeadResult()
    engine = EngineSpec(
        model_path=spec.model,
        endpoints=(Endpoint("peer", spec.peer),) if spec.peer else (),
        layers={},
        devices=spec.devices,
        ctx_size=spec.ctx_size,
    )
    llama.api()
    shape = loading.read_shape(spec.model)
    devices: list[llama.Device] = []
    split: list[float] = []
    if spec.peer:
        count = shape.n_layer if spec.peer_layers < 0 else spec.peer_layers
        peer = llama.register_peer(spec.peer)
        if spec.everything_on_peer:
            devices, split, result.layers = [peer], [1.0], {"peer": shape.n_layer, "head": 0}
        else:
            local = llama.local_devices(spec.devices)[:1]
            devices = [peer, *local]
            split = placement.tensor_split([count, shape.n_layer - count], shape.n_layer_nextn + 1)
            result.layers = {"peer": count, "head": shape.n_layer - count}
    else:
        local = llama.local_devices(engine.devices)[:1]
        use_gpu = any(device.kind != llama.DEVICE_CPU for device in local)
        devices, split = (local, [1.0]) if use_gpu else ([], [])
        result.layers = {"head": shape.n_layer}
    with _phase("load"):
        began = time.perf_counter()
        model = llama.Model(
            spec.model,
            devices,
            split,
            load_mtp=False,
            pipeline=spec.pipeline,
            use_extra_bufts=not spec.peer,
        )
        result.load_s = time.perf_counter() - began
    with model:
        if spec.peer and not spec.everything_on_peer:
            nodes = {devices[0].name: "peer", **{device.name: "head" for device in devices[1:]}}
            placement.verify(result.layers, model.log.layers, nodes, shape.n_layer, "head")
        measures = bool(spec.prompts or spec.decode_tokens or spec.verify_steps)
        if measures:
            _measure(spec, model, result)
        if spec.stats and spec.peer:
            with urllib.request.urlopen(f"http://{spec.peer}/stats?timings", timeout=10) as answer:
                result.stats = json.load(answer)
    return result


def _measure(spec: HeadSpec, model: Any, result: HeadResult) -> None:
    import numpy as np

    from hydra.head import llama

    began = time.perf_counter()
    n_batch = max(spec.ubatch_size, min(2048, spec.ctx_size))
    context = llama.Context(
        model,
        n_ctx=spec.ctx_size,
        n_batch=n_batch,
        n_ubatch=spec.ubatch_size,
        n_seq_max=1,
        n_outputs_max=max(spec.verify_width, 1),
        type_k=spec.cache_type,
        type_v=spec.cache_type,
        flash_attn=spec.flash_attn,
        n_threads=spec.threads,
    )
    result.context_s = time.perf_counter() - began
    batch = llama.Batch(n_batch)
    # Any tokens do: what is measured does not depend on them. Not the first few hundred, where control tokens are.
    text = np.random.default_rng(1).integers(model.vocab.n_tokens // 8, model.vocab.n_tokens // 2, 1 << 16).tolist()

    def feed(tokens: list[int], at: int) -> int:
        """Decode ``tokens`` from position ``at``; the token that greedy choice gives next."""
        for first in range(0, len(tokens), n_batch):
            part = tokens[first : first + n_batch]
            batch.clear()
            batch.add(part, at + first, 0, output="last")
            _decode(context, batch)
        return int(context.logits(batch.n - 1).argmax())

    with context:
        feed(text[:64], 0)
        token = 0
        for step in range(spec.warmup_tokens):
            token = feed([token], 64 + step)
        for length in spec.prompts:
            speeds = []
            with _phase(f"prefill {length}"):
                for repeat in range(spec.prefill_repeats):
                    context.remove(0, -1)
                    began = time.perf_counter()
                    feed(text[repeat : repeat + length], 0)
                    speeds.append(length / (time.perf_counter() - began))
            result.prefill_tps[str(length)] = float(np.median(speeds))
        context.remove(0, -1)
        position = spec.decode_after
        token = feed(text[:position], 0)
        if spec.decode_tokens:
            with _phase("decode"):
                began = last = time.perf_counter()
                for _ in range(spec.decode_tokens):
                    result.tokens.append(token)
                    token = feed([token], position)
                    position += 1
                    now = time.perf_counter()
                    result.step_ms.append(round((now - last) * 1e3, 4))
                    last = now
                result.decode_tps = spec.decode_tokens / (last - began)
        if spec.verify_steps:
            width = spec.verify_width
            with _phase("verify"):
                began = 0.0
                # The first step of a new width builds new graphs on both sides: it is not one of many.
                for step in range(spec.verify_steps + 2):
                    if step == 2:
                        began = time.perf_counter()
                    batch.clear()
                    batch.add(text[position : position + width], position, 0, output="all")
                    _decode(context, batch)
                    for row in range(width):
                        int(context.logits(row).argmax())
                    position += width
                result.verify_sps = spec.verify_steps / (time.perf_counter() - began)


def _decode(context: Any, batch: Any) -> None:
    if context.decode(batch) != 0:
        raise HydraError(f"The context has no room for {batch.n} more tokens.", "Give a larger --ctx-size.")


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    _say({"phase": name, "edge": "begin"})
    yield
    _say({"phase": name, "edge": "end"})


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    try:
        result = run(HeadSpec.from_json(given[0]))
    except HydraError as error:
        _say({"error": error.message, "hint": error.hint})
        return error.exit_code
    _say({"result": asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
