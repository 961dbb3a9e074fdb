"""The head of every measurement: one process that loads a model, times it, and ends.

The same code runs whatever the peer is (stock, hydra's, a sink, none), so that a difference between two runs is the
peer's. One process a run, because the stock RPC client keeps connections for as long as its process lives and aborts
with it. Talks to its parent in JSON lines on stdout: ``{"phase": NAME, "edge": "begin"|"end"}`` around each phase, so
that the parent can weigh the peer at that moment, and ``{"result": …}`` at the end.

Knows how to measure and nothing of pairs, ratios or peers; llama.cpp is reached through hydra.head.llama only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.bench.process import die_with_parent
from hydra.errors import HydraError

# After a load and nothing else the model is kept for as long as the parent takes to see what the peer holds of it.
_WEIGHED_S = 0.3


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
    """Load, measure as ``spec`` says, and end. Raises: HydraError."""
    result = HeadResult()
    with _loaded(spec, result) as model:
        if spec.prompts or spec.decode_tokens or spec.verify_steps:
            began = time.perf_counter()
            with _Meter(spec, model) as meter:
                result.context_s = time.perf_counter() - began
                for length in spec.prompts:
                    with _phase(f"prefill {length}"):
                        speeds = [length / meter.prefill(length, repeat) for repeat in range(spec.prefill_repeats)]
                    result.prefill_tps[str(length)] = statistics.median(speeds)
                meter.begin()
                if spec.decode_tokens:
                    with _phase("decode"):
                        result.step_ms, result.tokens = meter.decode(spec.decode_tokens)
                    result.decode_tps = spec.decode_tokens / sum(result.step_ms) * 1e3
                if spec.verify_steps:
                    with _phase("verify"):
                        result.verify_sps = spec.verify_steps / meter.verify(spec.verify_steps)
        else:
            time.sleep(_WEIGHED_S)
        if spec.stats and spec.peer:
            with urllib.request.urlopen(f"http://{spec.peer}/stats?timings", timeout=10) as answer:
                result.stats = json.load(answer)
    return result


def stay(spec: HeadSpec) -> None:
    """Load, then do what each line on stdin asks, until ``quit``: turns short enough to go round several heads in them.

    ``{"do": "prefill", "tokens": n, "seed": k}``, ``begin``, ``{"do": "decode", "tokens": n}``, ``{"do": "verify",
    "steps": n}``; each is answered with seconds (and tokens). Raises: HydraError.
    """
    result = HeadResult()
    with _loaded(spec, result) as model, _Meter(spec, model) as meter:
        _say({"ready": {"load_s": result.load_s, "layers": result.layers}})
        for line in sys.stdin:
            request = json.loads(line)
            what = request["do"]
            if what == "quit":
                return
            if what == "prefill":
                _say({"result": {"s": meter.prefill(request["tokens"], request["seed"])}})
            elif what == "begin":
                meter.begin()
                _say({"result": {}})
            elif what == "decode":
                step_ms, tokens = meter.decode(request["tokens"])
                _say({"result": {"s": sum(step_ms) / 1e3, "step_ms": step_ms, "tokens": tokens}})
            elif what == "verify":
                _say({"result": {"s": meter.verify(request["steps"])}})
            else:
                raise HydraError(f"A head cannot {what!r}.")


@contextmanager
def _loaded(spec: HeadSpec, result: HeadResult) -> Iterator[Any]:
    """The model, placed as the spec says; ``result`` gets the time and the layers."""
    # Here and not at the top: the parent imports this module for HeadSpec and must not load llama.cpp.
    from hydra.head import llama, loading, placement

    llama.api()
    shape = loading.read_shape(spec.model)
    devices: list[llama.Device] = []
    split: list[float] = []
    if spec.peer:
        count = shape.n_layer if spec.peer_layers < 0 else spec.peer_layers
        if count > shape.n_layer:
            raise HydraError(
                f"{count} layers cannot lie on the peer: the model has {shape.n_layer}.", "Give fewer with --layers."
            )
        peer = llama.register_peer(spec.peer)
        if spec.everything_on_peer:
            devices, split, result.layers = [peer], [1.0], {"peer": shape.n_layer, "head": 0}
        else:
            local = llama.local_devices(spec.devices)[:1]
            devices = [peer, *local]
            split = placement.tensor_split([count, shape.n_layer - count], shape.n_layer_nextn + 1)
            result.layers = {"peer": count, "head": shape.n_layer - count}
    else:
        local = llama.local_devices(spec.devices)[:1]
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
            # Off with no peer too: repacked weights would be other kernels, which a peer cannot use.
            use_extra_bufts=False,
        )
        result.load_s = time.perf_counter() - began
    with model:
        if spec.peer and not spec.everything_on_peer:
            nodes = {devices[0].name: "peer", **{device.name: "head" for device in devices[1:]}}
            placement.verify(result.layers, model.log.layers, nodes, shape.n_layer, "head")
        yield model


class _Meter:
    """One context and the clock: prefill, decode and verify of tokens that do not matter."""

    def __init__(self, spec: HeadSpec, model: Any) -> None:
        import numpy as np

        from hydra.head import llama

        self._spec = spec
        self._n_batch = max(spec.ubatch_size, min(2048, spec.ctx_size))
        self._context = llama.Context(
            model,
            n_ctx=spec.ctx_size,
            n_batch=self._n_batch,
            n_ubatch=spec.ubatch_size,
            n_seq_max=1,
            n_outputs_max=max(spec.verify_width, 1),
            type_k=spec.cache_type,
            type_v=spec.cache_type,
            flash_attn=spec.flash_attn,
            n_threads=spec.threads,
        )
        self._batch = llama.Batch(self._n_batch)
        # Not the first few hundred, where control tokens are.
        low, high = model.vocab.n_tokens // 8, model.vocab.n_tokens // 2
        self._text = [int(token) for token in np.random.default_rng(1).integers(low, high, 1 << 16)]
        self._position = self._token = 0
        self._feed(self._text[:64], 0)
        for step in range(spec.warmup_tokens):
            self._token = self._feed([self._token], 64 + step)

    def prefill(self, length: int, seed: int) -> float:
        """Seconds for a prompt of ``length`` tokens in an empty memory."""
        self._context.remove(0, -1)
        began = time.perf_counter()
        self._feed(self._text[seed : seed + length], 0)
        return time.perf_counter() - began

    def begin(self) -> None:
        """An empty memory and a short prompt, the same every time."""
        self._context.remove(0, -1)
        self._position = self._spec.decode_after
        self._token = self._feed(self._text[: self._position], 0)

    def decode(self, count: int) -> tuple[list[float], list[int]]:
        """Milliseconds of each of ``count`` greedy steps, and the tokens that were fed."""
        step_ms, tokens = [], []
        last = time.perf_counter()
        for _ in range(count):
            tokens.append(self._token)
            self._token = self._feed([self._token], self._position)
            self._position += 1
            now = time.perf_counter()
            step_ms.append(round((now - last) * 1e3, 4))
            last = now
        return step_ms, tokens

    def verify(self, steps: int) -> float:
        """Seconds for ``steps`` batches of ``verify_width`` tokens, logits of all read."""
        width = self._spec.verify_width
        began = 0.0
        # The first steps of a new width build new graphs on both sides: they are not two of many.
        extra = 2
        for step in range(steps + extra):
            if step == extra:
                began = time.perf_counter()
            self._batch.clear()
            self._batch.add(self._text[self._position : self._position + width], self._position, 0, output="all")
            _decode(self._context, self._batch)
            for row in range(width):
                int(self._context.logits(row).argmax())
            self._position += width
        return time.perf_counter() - began

    def _feed(self, tokens: list[int], at: int) -> int:
        """Decode ``tokens`` from position ``at``; the token that greedy choice gives next."""
        for first in range(0, len(tokens), self._n_batch):
            part = tokens[first : first + self._n_batch]
            self._batch.clear()
            self._batch.add(part, at + first, 0, output="last")
            _decode(self._context, self._batch)
        return int(self._context.logits(self._batch.n - 1).argmax())

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()


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
    spec = HeadSpec.from_json(given[0])
    try:
        if "--stay" in given[1:]:
            stay(spec)
            return 0
        result = run(spec)
    except HydraError as error:
        _say({"error": error.message, "hint": error.hint})
        return error.exit_code
    _say({"result": asdict(result)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
