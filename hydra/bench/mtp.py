"""`hydra bench mtp`: what drafting ahead is worth here: off and on in turn, over draft lengths, with and without a
peer.

One engine process at a time, loaded as `hydra up` loads it. Without MTP and with it are loaded in turn (A B A B), since
a machine's speed drifts; draft lengths are changed per request within one loaded engine. Beside each measured speed
stands the **ideal**: the mean acceptance length over what a draft and its verification cost in llama.cpp alone. What is
missing from it is hydra's own: sampling, Python, sending.

Knows engine frames and peers; does not know llama.cpp or how a command line is parsed (cli.py takes ``command`` in).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra.bench.options import HALF_OF_THE_CORES, Threads
from hydra.errors import EngineError, HydraError

LOAD_TIMEOUT_S = 1800.0
ANSWER_TIMEOUT_S = 600.0
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sits down to think about it.\n"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured. ``peers``: of "none", "hydra", "stock". ``lengths``: draft lengths; ``adaptive``: hydra's own
    choice too.
    """

    model: Path
    peers: tuple[str, ...] = ("none", "hydra", "stock")
    lengths: tuple[int, ...] = (1, 2, 3, 4)
    adaptive: bool = True
    rounds: int = 2
    tokens: int = 128
    prompt_tokens: int = 512
    device: str = "CPU"
    threads: int = 2
    layers: int = -1
    ctx_size: int = 4096
    cache_type: str = "f16"
    parallel: int = 1


@dataclass
class Figure:
    """One way of drafting, over all rounds: speeds in tokens/s; ``other_ms``: of a step outside llama.cpp, sampling
    included.
    """

    peer: str
    draft: str
    decode_tps: list[float] = field(default_factory=list)
    prefill_tps: list[float] = field(default_factory=list)
    ideal_tps: list[float] = field(default_factory=list)
    other_ms: list[float] = field(default_factory=list)
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None

    def median(self, name: str) -> float | None:
        values = getattr(self, name)
        return statistics.median(values) if values else None


@dataclass
class Outcome:
    figures: list[Figure]
    setting: dict[str, Any]
    identical: bool

    def find(self, peer: str, draft: str) -> Figure | None:
        return next((f for f in self.figures if (f.peer, f.draft) == (peer, draft)), None)

    def rows(self) -> list[list[str]]:
        """The table: speed, against off, against no peer, of the ideal, acceptance, and prefill against off."""
        rows = []
        for figure in self.figures:
            off, local = self.find(figure.peer, "off"), self.find("none", figure.draft)
            rows.append([
                figure.peer, figure.draft, _number(figure.median("decode_tps")),
                _ratio(figure, off, "decode_tps"), _ratio(figure, local, "decode_tps"),
                _of(figure.median("decode_tps"), figure.median("ideal_tps")),
                "–" if figure.acceptance_rate is None else f"{figure.acceptance_rate:.2f}",
                "–" if figure.mean_acceptance_length is None else f"{figure.mean_acceptance_length:.2f}",
                _number(figure.median("prefill_tps")), _ratio(figure, off, "prefill_tps"),
                "–" if not figure.other_ms else f"{statistics.median(figure.other_ms):.2f}"])
        return rows

    def to_dict(self) -> dict[str, Any]:
        figures = []
        for figure in self.figures:
            entry: dict[str, Any] = asdict(figure)
            for name in ("decode_tps", "prefill_tps", "ideal_tps"):
                entry[f"{name}_median"] = figure.median(name)
            figures.append(entry)
        return {"figures": figures, "identical": self.identical, "setting": self.setting}


COLUMNS = ("peer", "draft", "decode tok/s", "vs off", "vs no peer", "of ideal", "accepted", "mean length",
           "prefill tok/s", "vs off", "python ms")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _of(value: float | None, whole: float | None) -> str:
    return f"{value / whole:.2f}" if value and whole else "–"


def _ratio(figure: Figure, other: Figure | None, name: str) -> str:
    return _of(figure.median(name), other.median(name)) if other is not None and other is not figure else "–"


class _Client:
    """One loaded engine process, asked one thing after another."""

    def __init__(self, spec: Any) -> None:
        from hydra.head import launch

        self._process = launch.start()
        self._process.channel.settimeout(LOAD_TIMEOUT_S)
        try:
            self._process.channel.send({"type": "load", "spec": spec.to_dict()})
            self.info = self._wait("ready")["info"]
        except BaseException:
            self._process.close()
            raise
        self._process.channel.settimeout(ANSWER_TIMEOUT_S)

    def _wait(self, kind: str, frames: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        while True:
            frame = self._process.channel.receive()
            if frame is None:
                raise EngineError(f"The engine process ended with status {self._process.process.wait()}.")
            if frame["type"] == "failed":
                raise EngineError(frame["error"]["message"], frame["error"]["hint"])
            if frame["type"] == kind:
                return dict(frame)
            if frames is not None:
                frames.append(frame)

    def tokenize(self, text: str) -> list[int]:
        self._process.channel.send({"type": "tokenize", "id": "t", "text": text, "add_special": False})
        return [int(token) for token in self._wait("result")["value"]]

    def answer(self, prompt: list[int], copies: int, **params: Any) -> tuple[list[int], list[dict[str, Any]], float]:
        """The first copy's tokens, each copy's statistics, and the seconds from first to last token of all."""
        for i in range(copies):
            self._process.channel.send({"type": "generate", "id": str(i), "prompt": [*prompt, *([i] if i else [])],
                                        "params": {"temperature": 0, "ignore_eos": True, **params}})
        tokens: list[int] = []
        stats: list[dict[str, Any]] = []
        frames: list[dict[str, Any]] = []
        began = time.perf_counter()
        while len(stats) < copies:
            done = self._wait("done", frames)
            stats.append(done["stats"])
        seconds = time.perf_counter() - began
        for frame in frames:
            if frame["type"] == "chunk" and frame["id"] == "0":
                tokens += frame["tokens"]
        return tokens, stats, seconds

    def close(self) -> None:
        self._process.close()


@contextmanager
def _loaded(plan: Plan, kind: str, address: str) -> Iterator[_Client]:
    from hydra.head.spec import DraftSpec, Endpoint, EngineSpec

    spec = EngineSpec(
        model_path=str(plan.model), ctx_size=plan.ctx_size, threads=plan.threads, parallel=plan.parallel,
        endpoints=(Endpoint("peer", address),) if address else (),
        layers={"peer": plan.layers} if address and plan.layers >= 0 else {},
        devices=() if plan.device == "CPU" else (plan.device,),
        cache_type_k=plan.cache_type, cache_type_v=plan.cache_type,
        flash_attn="on" if plan.cache_type != "f16" else "auto", use_extra_bufts=False,
        draft=DraftSpec(kind, max(plan.lengths), 0.0, True))
    client = _Client(spec)
    try:
        yield client
    finally:
        client.close()


def run(plan: Plan, report: Report) -> Outcome:
    """Measure. ``report`` gets a line of progress now and then.

    Raises: HydraError when a peer or an engine fails, or when the model has no MTP block.
    """
    from hydra.bench.pairs import Setting, start

    drafts = [*map(str, plan.lengths), *(["adaptive"] if plan.adaptive else [])]
    figures = {(peer, draft): Figure(peer, draft) for peer in plan.peers for draft in ("off", *drafts)}
    answers: set[tuple[int, ...]] = set()
    info: dict[str, Any] = {}
    for round_number in range(plan.rounds):
        for peer in plan.peers:
            running = nullcontext(None) if peer == "none" else start(peer, Setting(plan.device, plan.threads))
            with running as server:
                address = server.endpoint if server is not None else ""
                for kind in ("none", "mtp"):
                    state = "off" if kind == "none" else "on"
                    report(f"round {round_number + 1} of {plan.rounds}: peer {peer}, MTP {state}")
                    with _loaded(plan, kind, address) as client:
                        if kind == "mtp" and not client.info["mtp"]["enabled"]:
                            raise HydraError(f"{plan.model} has no MTP block that hydra can use.",
                                             "Measure with --synthetic tiny, or with a model that has one.")
                        info = client.info
                        _measure(plan, client, peer, ("off",) if kind == "none" else tuple(drafts), figures, answers)
    setting = {**asdict(plan), "model": str(plan.model), "layers": info.get("layers"), "name": info.get("model")}
    return Outcome(list(figures.values()), setting, len(answers) == 1)


def _measure(plan: Plan, client: _Client, peer: str, drafts: tuple[str, ...],
             figures: dict[tuple[str, str], Figure], answers: set[tuple[int, ...]]) -> None:
    text = client.tokenize(PROMPT)
    prompt = (text * (plan.prompt_tokens // len(text) + 1))[-plan.prompt_tokens:]
    client.answer(prompt[-32:], 1, max_tokens=8)  # the first graphs are made here
    for number, draft in enumerate(drafts):
        figure = figures[(peer, draft)]
        params: dict[str, Any] = {"max_tokens": plan.tokens}
        if draft.isdigit():
            params["draft_n"] = int(draft)
        # A prompt of its own each time, so that nothing of it is in the cache; its last line is the same.
        tokens, stats, _seconds = client.answer([text[number % len(text)], *prompt[1:]], plan.parallel, **params)
        answers.add(tuple(tokens))
        figure.decode_tps.append(sum(s["decode_tps"] or 0.0 for s in stats))
        figure.prefill_tps += [s["prefill_tps"] for s in stats if s["prefill_tps"]][:1]
        drafted, rounds = sum(s["drafted"] for s in stats), sum(s["draft_rounds"] for s in stats)
        accepted = sum(s["accepted"] for s in stats)
        if rounds:
            figure.acceptance_rate = accepted / drafted
            figure.mean_acceptance_length = 1 + accepted / rounds
        figure.other_ms.append(1e3 * sum(s["other_s"] for s in stats) / max(1, max(s["steps"] for s in stats)))
        native = max(s["draft_s"] + s["verify_s"] for s in stats)
        made = sum(s["completion_tokens"] - 1 for s in stats)
        if native > 0:
            figure.ideal_tps.append(made / (native * len(stats)))


def command(
    model: Annotated[Path | None, typer.Option("--model", "-m", metavar="FILE", help="GGUF with an MTP block.")] = None,
    synthetic: Annotated[
        str, typer.Option("--synthetic", metavar="SHAPE", help="Make a model: tiny, small, 9b, 27b.")] = "",
    acceptance: Annotated[
        str, typer.Option("--acceptance", metavar="A,A", help="Acceptances of the synthetic model, such as 0.3,0.7,1.")
    ] = "0.7",
    peers: Annotated[str, typer.Option("--peers", metavar="P,P", help="Of none, hydra, stock.")] = "none,hydra,stock",
    lengths: Annotated[str, typer.Option("--draft-n", metavar="N,N", help="Draft lengths.")] = "1,2,3,4",
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Off and on in turn, so often.")] = 2,
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=8, help="Tokens of each answer.")] = 128,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=32, help="Prompt tokens.")] = 512,
    parallel: Annotated[int, typer.Option("--parallel", "-np", metavar="N", min=1, help="Requests at once.")] = 1,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="ggml device of head and peer.")] = "CPU",
    threads: Threads = HALF_OF_THE_CORES,
    layers: Annotated[int, typer.Option("--layers", metavar="N", help="Layers on the peer (-1: by memory).")] = -1,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", metavar="N", help="Context (0: what is needed).")] = 0,
    cache_type: Annotated[str, typer.Option("--cache-type", metavar="T", help="KV cache: f16, q8_0.")] = "f16",
    by_step: Annotated[
        bool, typer.Option("--by-step", help="Only what adaptive drafting costs, in one process and in turn.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line of stdout.")] = False,
) -> None:
    """Measure MTP: off and on in turn, by draft length and acceptance, with and without a peer."""
    from hydra import console
    from hydra.bench import bystep, cli

    if synthetic:
        from hydra.bench import synthetic as maker

        wanted = [float(part) for part in acceptance.split(",")]
        models = [(f"{a:g}", maker.model(synthetic, acceptance=a, confirm=cli._confirm)) for a in wanted]
    elif model is None:
        from hydra.bench import synthetic as maker

        models = [("0.7", maker.model("tiny", confirm=cli._confirm))]
    else:
        models = [("", cli.model_path(model, ""))]
    outcomes: dict[str, Any] = {}
    for name, path in models:
        if by_step:
            cost = bystep.run(path, rounds=rounds, answers=3, tokens=tokens, n_max=max(map(int, lengths.split(","))),
                              threads=threads, report=console.note)
            console.result(f"acceptance built in: {name}" if name else str(path))
            console.table(bystep.COLUMNS, cost.rows())
            outcomes[name or "model"] = cost
            continue
        plan = Plan(
            path, tuple(peers.split(",")), tuple(int(n) for n in lengths.split(",")), rounds=rounds, tokens=tokens,
            prompt_tokens=prompt, device=device, threads=threads, layers=layers,
            ctx_size=ctx_size or parallel * (prompt + tokens + 64), cache_type=cache_type, parallel=parallel)
        outcome = outcomes[name or "model"] = run(plan, console.note)
        if name:
            console.result(f"acceptance built in: {name}")
        console.table(COLUMNS, outcome.rows())
        console.result("answers: all identical" if outcome.identical else
                       "answers: they differ (a kernel may round differently with the width of a batch)")
    if as_json:
        console.result_json({name: outcome.to_dict() for name, outcome in outcomes.items()})
