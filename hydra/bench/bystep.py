"""What adaptive drafting costs where drafts are worth little, on a machine whose speed drifts: step by step.

Three engines on one model answer the same prompt in turn, one step each, so whatever slows the machine slows all:
**off** has no MTP, **on** adapts its drafts, **idle** has MTP and never drafts: what it loses is the price of being
able to, mostly llama.cpp's snapshots of a recurrent state. Two contexts of one kind may differ by some per cent for as
long as they live (where their memory lies), so all are made anew for every round. What is compared is time, for the
same tokens.

Knows the engine; nothing of processes or peers.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE_FEED = 10
Report = Callable[[str], None]


@dataclass
class Cost:
    """Speeds over that without MTP, by round. ``first``: of the first answer with drafts; ``later``: of those after it,
    when the engine has learned what drafts are worth here; ``idle``: of all answers with MTP that never drafts.
    """

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    same: bool = True

    def rows(self) -> list[list[str]]:
        rows = []
        for name, values in (("adaptive, first answer", self.first), ("adaptive, later answers", self.later),
                             ("never drafts", self.idle)):
            rows.append([name, f"{statistics.median(values):.3f}", f"{min(values):.3f} … {max(values):.3f}"])
        return rows

    def to_dict(self) -> dict[str, Any]:
        medians = {f"{name}_median": statistics.median(getattr(self, name)) for name in ("first", "later", "idle")}
        return {**dataclasses.asdict(self), **medians}


COLUMNS = ("MTP", "speed over off", "min … max")


def run(model: Path, *, rounds: int, answers: int, tokens: int, n_max: int, threads: int, report: Report) -> Cost:
    """``rounds`` sets of engines give ``answers`` answers of ``tokens`` tokens each."""
    from hydra.head.engine import Engine
    from hydra.head.spec import DraftSpec, EngineSpec

    on = EngineSpec(str(model), ctx_size=tokens + 256, threads=threads, use_extra_bufts=False,
                    draft=DraftSpec("mtp", n_max, 0.0, True))
    specs = {"off": dataclasses.replace(on, draft=DraftSpec("none")), "on": on, "idle": on}
    cost = Cost()
    with Engine(on) as holder:
        for number in range(rounds):
            names = list(specs)[number % 3:] + list(specs)[:number % 3]
            engines: dict[str, Any] = {}
            try:
                for name in names:
                    engines[name] = holder.shared(specs[name])
                times = [_answer(engines, number * answers + i, tokens, cost) for i in range(answers)]
            finally:
                for engine in engines.values():
                    engine.close()
            cost.first.append(times[0]["off"] / times[0]["on"])
            cost.later.append(_over(times[1:] or times, "on"))
            cost.idle.append(_over(times, "idle"))
            report(f"round {number + 1} of {rounds}: first {cost.first[-1]:.3f}, later {cost.later[-1]:.3f}, "
                   f"never drafts {cost.idle[-1]:.3f}")
    return cost


def _over(times: list[dict[str, float]], name: str) -> float:
    return sum(t["off"] for t in times) / sum(t[name] for t in times)


def _answer(engines: dict[str, Any], seed: int, tokens: int, cost: Cost) -> dict[str, float]:
    """Seconds of each engine for one answer, its prompt not counted."""
    from hydra.head.sampling import SamplingParams
    from hydra.head.slots import Chunk, Done

    prompt = [*((seed * 7 + i) % 90 + 33 for i in range(63)), LINE_FEED]
    params = SamplingParams.from_dict({"temperature": 0, "max_tokens": tokens, "ignore_eos": False})
    seconds = dict.fromkeys(engines, 0.0)
    said: dict[str, list[int]] = {name: [] for name in engines}

    def step(name: str) -> None:
        began = time.perf_counter()
        events = engines[name].step()
        seconds[name] += time.perf_counter() - began
        for event in events:
            if isinstance(event, Chunk):
                said[name] += event.tokens
            elif isinstance(event, Done) and name == "on":
                cost.drafted.append(event.stats["drafted"])

    for name in engines:
        engines[name].submit("one", prompt, dataclasses.replace(params, draft_n=0) if name == "idle" else params)
        step(name)
        seconds[name] = 0.0
    names, turn = list(engines), 0
    while any(engine.busy for engine in engines.values()):
        turn += 1
        for name in names[turn % 3:] + names[:turn % 3]:
            if engines[name].busy:
                step(name)
    cost.same &= said["on"] == said["off"] == said["idle"]
    return seconds
