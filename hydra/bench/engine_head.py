"""A head that stays: one process with a loaded engine that measures what it is told, for comparisons on large models.

Loading a 27B model takes half a minute, so a comparison that loads anew for every run spends its time on loads. Here
each head loads once, and the caller goes round them: stock, hydra, none, and back. The engine is the product's own
(hydra.head.engine), drafting included; the same model also gets contexts without drafting, so that both are measured
on one load.

Talks JSON lines: its argument is ``{"spec": EngineSpec, …}``; then each line on stdin is one request (see ``Head``) and
gets one line on stdout. Knows nothing of peers, pairs or tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from typing import Any

from hydra.bench.process import die_with_parent
from hydra.errors import HydraError


class Head:
    """A loaded model and its engines by kind: "mtp" (as the spec drafts), "plain" (no drafting), "many" (several
    slots).

    The first is made with the model, the others when they are first used.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from hydra.head.engine import Engine
        from hydra.head.spec import EngineSpec

        self._spec = EngineSpec.from_dict(spec)
        self._stages: dict[str, float] = {}
        self._serial = 0
        _say({"phase": "load", "edge": "begin"})
        self._main = Engine(self._spec, self._progress)
        self._stages["end"] = time.perf_counter()
        _say({"phase": "load", "edge": "end"})
        self._engines: dict[str, Any] = {"mtp": self._main}

    def ready(self) -> dict[str, Any]:
        """Seconds of the load by part, and what the engine says of itself."""
        stages = self._stages
        info = self._main.info
        return {
            "model_s": stages["contexts"] - stages["weights"],
            "contexts_s": stages["end"] - stages["contexts"],
            "layers": info["layers"],
            "drafter": info["drafter"],
            "memory": info["memory"],
            "notes": info["notes"],
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of ``prompt`` tokens, ``tokens`` answered greedily; ``engine``: mtp or plain; ``seed`` of the
        prompt.

        Gives speeds, drafted and accepted counts, the tokens, and the wall time.
        """
        return self._generate(self._engine(request["engine"]), request, 1)[0]

    def many(self, request: dict[str, Any]) -> dict[str, Any]:
        """``requests`` at once: tokens per second of all together, and of each."""
        engine = self._engine("many", request["requests"])
        began = time.perf_counter()
        results = self._generate(engine, request, request["requests"])
        elapsed = time.perf_counter() - began
        made = sum(len(result["tokens"]) for result in results)
        return {"total_tps": made / elapsed, "decode_tps": [result["decode_tps"] for result in results]}

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        """The logits that follow a prompt, at evenly spaced ids; computed in one batch, or ``width`` at a time."""
        from hydra.head import llama

        engine = self._engine("plain")
        context, tokens = engine._target, self._prompt(request, 0)
        width = int(request.get("width", len(tokens)))
        batch = llama.Batch(max(width, 1))
        context.remove(0, -1)
        for first in range(0, len(tokens), width):
            part = tokens[first : first + width]
            batch.clear()
            batch.add(part, first, 0, output="last")
            if context.decode(batch) != 0:
                raise HydraError("The context has no room.")
        row = context.logits(batch.n - 1)
        step = max(1, len(row) // 512)
        chosen = [float(value) for value in row[::step]]
        top = int(row.argmax())
        context.remove(0, -1)
        for slot in engine.slots:
            slot.tokens.clear()
        return {"logits": chosen, "top": top, "spread": float(row.std())}

    def close(self) -> None:
        """Contexts first, then the model."""
        for name, engine in self._engines.items():
            if name != "mtp":
                engine.close()
        self._main.close()

    def _engine(self, name: str, slots: int = 1) -> Any:
        if name not in self._engines:
            self._engines[name] = self._another(name, slots)
        return self._engines[name]

    def _another(self, name: str, slots: int) -> Any:
        """An engine of its own contexts on the model that is already loaded."""
        from hydra.head.spec import DraftSpec

        spec = self._spec
        if name == "plain":
            spec = dataclasses.replace(spec, draft=DraftSpec("none"))
        elif name == "many":
            spec = dataclasses.replace(spec, parallel=slots)
        made = self._main.shared(spec)
        self._generate(made, {"prompt": 32, "tokens": 8, "seed": 0}, 1)
        return made

    def _generate(self, engine: Any, request: dict[str, Any], count: int) -> list[dict[str, Any]]:
        from hydra.head.sampling import SamplingParams
        from hydra.head.slots import Chunk, Done, Failed

        params = SamplingParams.from_dict({"temperature": 0.0, "max_tokens": request["tokens"], "ignore_eos": True})
        tokens: dict[str, list[int]] = {}
        results: dict[str, dict[str, Any]] = {}
        began = time.perf_counter()
        for number in range(count):
            self._serial += 1
            tokens[str(self._serial)] = []
            engine.submit(str(self._serial), self._prompt(request, number), params)
        while len(results) < count:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise HydraError(event.message, event.hint)
                if isinstance(event, Chunk):
                    tokens[event.id] += event.tokens
                elif isinstance(event, Done):
                    results[event.id] = {
                        **event.stats,
                        "tokens": tokens[event.id],
                        "wall_s": time.perf_counter() - began,
                    }
        return [results[id] for id in tokens]

    def _prompt(self, request: dict[str, Any], number: int) -> list[int]:
        """Different for every seed, so that nothing of it is in memory already; the same for every head."""
        import numpy as np

        n_tokens = self._main.vocab.n_tokens
        low, high = request.get("alphabet") or (n_tokens // 8, n_tokens // 2)
        rng = np.random.default_rng(1000 * int(request.get("seed", 0)) + number)
        return [int(token) for token in rng.integers(low, high, request["prompt"])]

    def _progress(self, event: dict[str, Any]) -> None:
        self._stages.setdefault(event["stage"], time.perf_counter())


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    try:
        head = Head(json.loads(given[0])["spec"])
        _say({"ready": head.ready()})
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "quit":
                break
            _say({"result": {"run": head.run, "many": head.many, "logits": head.logits}[request["do"]](request)})
    except HydraError as error:
        with contextlib.suppress(BrokenPipeError):
            _say({"error": error.message, "hint": error.hint})
        return error.exit_code
    head.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
