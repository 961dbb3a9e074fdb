"""`hydra bench peer`: the stock C++ peer and hydra's, in turn, in one run, under the same head.

A figure of ours without the stock server's beside it says nothing: machines differ, and so do their busy minutes. So
every pair runs both, and what is reported is the ratio within pairs. Beside it stand the ceiling (no peer) and the
floor of a load (a sink that throws everything away, which is the client's own cost). Knows what to measure; how is
pairs.py and run_head.py.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.bench.link import Link
from hydra.bench.pairs import Ratio, Report, Setting, compare, order, percentile, run_head, settle, start
from hydra.bench.process import cpu_seconds, process_tree
from hydra.bench.resident import SpeedHead
from hydra.bench.run_head import HeadSpec

_FLOOR_RUNS = 3
_TURNS = 4


@dataclass(frozen=True)
class Plan:
    """What is compared. ``link``: bits per second and one-way delay in s, None = loopback. ``loads``: those too.

    ``resident``: all heads are loaded at once and take turns of a second or so, which a busy machine disturbs least;
    else each run loads anew, for models of which a card holds only one.
    """

    model: Path
    pairs: int = 5
    device: str = "CPU"
    threads: int = 2
    head_devices: tuple[str, ...] = ()
    link: tuple[float, float] | None = None
    prompts: tuple[int, ...] = (512, 2048)
    decode_tokens: int = 64
    verify_steps: int = 32
    peer_layers: int = -1
    ctx_size: int = 4096
    cache_type: str = "f16"
    pipeline: bool = False
    loads: bool = True
    resident: bool = True


@dataclass
class Outcome:
    """All figures: ``ratios`` by name (above 1 = hydra's is better), single figures, and remarks a reader must know."""

    ratios: dict[str, Ratio] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The last line of ``--json``; a ratio that was not measured is null."""
        names = ("decode", "prefill", "verify", "load", "warm_load")
        flat: dict[str, Any] = {f"{n}_ratio": self.ratios[n].median if n in self.ratios else None for n in names}
        return {
            **flat,
            **self.figures,
            "pairs": {name: ratio.to_dict() for name, ratio in self.ratios.items()},
            "remarks": self.remarks,
            "setting": self.setting,
        }


def run(plan: Plan, report: Report) -> Outcome:
    """Measure. ``report`` gets a line of progress now and then.

    Raises: HydraError when a peer or head fails, or the link cannot be made.
    """
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link(*plan.link)) if plan.link else None
        caches = Path(tempfile.mkdtemp(prefix="hydra-bench-"))
        stack.callback(shutil.rmtree, caches, ignore_errors=True)
        measurement = _Measurement(plan, link, caches, report)
        if plan.resident:
            measurement.turns()
        for pair in range(plan.pairs):
            for kind in order(pair):
                if not plan.resident:
                    measurement.speed(kind, f"pair {pair + 1} of {plan.pairs}")
                if plan.loads:
                    measurement.load(kind)
                    measurement.warm_load(kind)
        measurement.bounds()
        return measurement.outcome()


class _Measurement:
    """The samples of one comparison, by figure and peer."""

    def __init__(self, plan: Plan, link: Link | None, caches: Path, report: Report) -> None:
        self._plan = plan
        self._link = link
        self._caches = caches
        self._report = report
        self._setting = Setting(plan.device, plan.threads, link)
        self._netns = link.head_netns if link else None
        self._samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._tokens: dict[str, list[int]] = {}
        self._agree = True
        self._filled: set[str] = set()
        self._loader = HeadSpec(str(plan.model), everything_on_peer=True, threads=plan.threads)
        self._speeder = HeadSpec(
            str(plan.model),
            peer_layers=plan.peer_layers,
            devices=plan.head_devices,
            threads=plan.threads,
            ctx_size=plan.ctx_size,
            cache_type=plan.cache_type,
            pipeline=plan.pipeline,
            prompts=plan.prompts,
            decode_tokens=plan.decode_tokens,
            verify_steps=plan.verify_steps,
        )

    def turns(self) -> None:
        """All heads loaded, and round them in short turns: a pair is what was measured within seconds of each other."""
        plan = self._plan
        with contextlib.ExitStack() as stack:
            pids: dict[str, int] = {}
            heads: dict[str, SpeedHead] = {}
            for kind in ("stock", "hydra", "none"):
                peer = stack.enter_context(start(kind, self._setting)) if kind != "none" else None
                netns = self._netns if peer else None
                heads[kind] = stack.enter_context(SpeedHead(self._speeder, peer, netns))
                if peer is not None:
                    pids[kind] = peer.pid
            for pair in range(plan.pairs):
                self._pair_of_turns(heads, pids, pair)
                last = {kind: self._samples[kind, "decode"][-1] for kind in heads if self._samples[kind, "decode"]}
                said = ", ".join(f"{kind} {speed:.2f}" for kind, speed in last.items())
                self._report(f"pair {pair + 1} of {plan.pairs}: decode in tok/s: {said}")

    def _pair_of_turns(self, heads: dict[str, SpeedHead], pids: dict[str, int], pair: int) -> None:
        plan = self._plan

        def around(turn: int) -> list[str]:
            kinds = [*order(pair + turn)]
            return [*kinds, "none"] if (pair + turn) % 2 == 0 else ["none", *kinds]

        for number, length in enumerate(plan.prompts):
            for kind in around(number):
                seconds = heads[kind].ask(do="prefill", tokens=length, seed=pair)["s"]
                self._add(kind)(f"prefill {length}", length / seconds)
        for kind in heads:
            heads[kind].ask(do="begin")
        steps: dict[str, list[float]] = defaultdict(list)
        tokens: dict[str, list[int]] = defaultdict(list)
        cpu: dict[str, float] = defaultdict(float)
        verify_s: dict[str, float] = defaultdict(float)
        for turn, count in enumerate(_parts(plan.decode_tokens)):
            for kind in around(turn):
                before = cpu_seconds(process_tree(pids[kind])) if kind in pids else 0.0
                result = heads[kind].ask(do="decode", tokens=count)
                cpu[kind] += cpu_seconds(process_tree(pids[kind])) - before if kind in pids else 0.0
                steps[kind] += result["step_ms"]
                tokens[kind] += result["tokens"]
        for turn, count in enumerate(_parts(plan.verify_steps)):
            for kind in around(turn):
                verify_s[kind] += heads[kind].ask(do="verify", steps=count)["s"]
        for kind in heads:
            add = self._add(kind)
            if plan.decode_tokens:
                add("decode", 1e3 * len(steps[kind]) / sum(steps[kind]))
                add("step_p50_ms", statistics.median(steps[kind]))
                add("step_p99_ms", percentile(steps[kind], 0.99))
                if kind in pids:
                    add("cpu_s_per_token", cpu[kind] / len(steps[kind]))
            if plan.verify_steps:
                add("verify", plan.verify_steps / verify_s[kind])
            self._agree &= tokens[kind] == tokens["none"]

    def speed(self, kind: str, where: str) -> None:
        with start(kind, self._setting) as peer:
            result, weighed = run_head(self._speeder, peer, self._netns)
        add = self._add(kind)
        add("decode", result.decode_tps)
        add("verify", result.verify_sps)
        add("step_p50_ms", statistics.median(result.step_ms) if result.step_ms else 0.0)
        add("step_p99_ms", percentile(result.step_ms, 0.99))
        for length, speed in result.prefill_tps.items():
            add(f"prefill {length}", speed)
        add("cpu_s_per_token", weighed.cpu_s.get("decode", 0.0) / max(1, self._plan.decode_tokens))
        reference = next(iter(self._tokens.values()), result.tokens)
        self._agree &= reference == result.tokens
        self._tokens[kind] = result.tokens
        prefill = ", ".join(f"{speed:,.0f}" for speed in result.prefill_tps.values())
        self._report(f"{where}: {kind}: decode {result.decode_tps:.2f} tok/s, prefill {prefill} tok/s")
        settle()

    def load(self, kind: str) -> None:
        with start(kind, self._setting) as peer:
            result, weighed = run_head(self._loader, peer, self._netns)
        add = self._add(kind)
        add("load", result.load_s)
        add("rss_idle", weighed.idle_bytes)
        add("rss_peak", weighed.peak_bytes)
        add("rss_loaded", weighed.loaded_bytes)
        self._report(f"  {kind}: cold load {result.load_s:.2f} s")
        settle()

    def warm_load(self, kind: str) -> None:
        """With a cache that holds what the client lets it hold, in a peer that has just started."""
        directory = self._caches / kind
        for _ in range(1 if kind in self._filled else 2):
            with start(kind, self._setting, cache_dir=directory) as peer:
                result, _ = run_head(self._loader, peer, self._netns)
            settle()
        self._filled.add(kind)
        if any(path.is_file() and path.stat().st_size > 1 << 20 for path in directory.rglob("*")):
            self._add(kind)("warm_load", result.load_s)
            self._report(f"  {kind}: warm load {result.load_s:.2f} s")

    def bounds(self) -> None:
        """The ceiling of speed (no peer) and the floors of loads (a sink)."""
        if not self._plan.resident:
            result, _ = run_head(self._speeder, None)
            add = self._add("none")
            add("decode", result.decode_tps)
            add("verify", result.verify_sps)
            for length, speed in result.prefill_tps.items():
                add(f"prefill {length}", speed)
            self._report(f"no peer: decode {result.decode_tps:.2f} tok/s")
        if not self._plan.loads:
            return
        for kind, name in (("sink", "load"), ("sink-found", "warm_load")):
            for _ in range(_FLOOR_RUNS):
                with start(kind, self._setting) as peer:
                    result, _ = run_head(self._loader, peer, self._netns)
                self._add(kind)(name, result.load_s)
                self._report(f"{kind}: {name} {result.load_s:.2f} s")

    def outcome(self) -> Outcome:
        outcome = Outcome()
        longest = max(self._plan.prompts, default=0)
        figures = [
            ("decode", "decode", "tok/s", False),
            *((f"prefill {length}", f"prefill {length}", "tok/s", False) for length in self._plan.prompts),
            ("verify", "verify", "steps/s", False),
            ("step_p50_ms", "step_p50_ms", "ms", True),
            ("step_p99_ms", "step_p99_ms", "ms", True),
            ("load", "load", "s", True),
            ("warm_load", "warm_load", "s", True),
            ("cpu_s_per_token", "cpu_s_per_token", "s", True),
        ]
        for name, key, unit, smaller in figures:
            ratio = compare(
                name, unit, self._samples["stock", key], self._samples["hydra", key], smaller_is_better=smaller
            )
            if ratio is not None:
                outcome.ratios[name] = ratio
        if f"prefill {longest}" in outcome.ratios:
            outcome.ratios["prefill"] = replace(outcome.ratios[f"prefill {longest}"], name="prefill")
        self._single_figures(outcome)
        self._remarks(outcome)
        plan = self._plan
        outcome.setting = {
            "model": plan.model.name,
            "pairs": plan.pairs,
            "device": plan.device,
            "threads": plan.threads,
            "link": self._link.description if self._link else "loopback",
            "decode_tokens": plan.decode_tokens,
            "verify_steps": plan.verify_steps,
            "peer_layers": plan.peer_layers,
            "cache_type": plan.cache_type,
            "resident": plan.resident,
        }
        return outcome

    def _single_figures(self, outcome: Outcome) -> None:
        figures = outcome.figures
        for kind, prefix in (("hydra", "peer"), ("stock", "stock_peer")):
            for part in ("idle", "peak", "loaded"):
                figures[f"{prefix}_rss_{part}_bytes"] = self._median(kind, f"rss_{part}")
        figures["cpu_s_per_token"] = self._median("hydra", "cpu_s_per_token")
        figures["stock_cpu_s_per_token"] = self._median("stock", "cpu_s_per_token")
        figures["ceiling_decode_tps"] = self._median("none", "decode")
        for length in self._plan.prompts:
            figures[f"ceiling_prefill_{length}_tps"] = self._median("none", f"prefill {length}")
        figures["floor_load_s"] = self._median("sink", "load")
        figures["floor_warm_load_s"] = self._median("sink-found", "warm_load")
        for name in ("load", "warm_load"):
            floor = figures[f"floor_{name}_s"]
            if floor and name in outcome.ratios:
                figures[f"{name}_over_floor"] = outcome.ratios[name].hydra / floor
        ceiling = figures["ceiling_decode_tps"]
        if ceiling and "decode" in outcome.ratios:
            figures["decode_over_ceiling"] = outcome.ratios["decode"].hydra / ceiling

    def _remarks(self, outcome: Outcome) -> None:
        if not self._agree:
            outcome.remarks.append("The runs did not all choose the same tokens: a fault, unless the devices differ.")
        if self._plan.device == "CPU" and self._plan.loads:
            outcome.remarks.append(
                "On a CPU device the weights are in the peer's own memory: its need beside them is peak less loaded."
            )
        if self._plan.loads and "warm_load" not in outcome.ratios:
            outcome.remarks.append("No tensor is above 10 MiB, so the client caches none and there is no warm load.")
        if self._plan.pairs < 5:
            outcome.remarks.append(f"Fewer than 5 pairs ({self._plan.pairs}) are too few to trust.")

    def _add(self, kind: str) -> Any:
        return lambda name, value: self._samples[kind, name].append(float(value))

    def _median(self, kind: str, name: str) -> float | None:
        values = [value for value in self._samples.get((kind, name), ()) if value]
        return statistics.median(values) if values else None


def _parts(count: int) -> list[int]:
    """``count`` in up to four turns of about the same size."""
    return [part for turn in range(_TURNS) if (part := (count + turn) // _TURNS)]
