"""`hydra bench server`: hydra's head beside llama-server of the same llama.cpp, local and split, with and without MTP.

Both are whole programs asked over HTTP in the same way, with the same tokens, by the same clock of their own
(`timings`): one request, then several at once. Both are loaded at the same time and asked in turn (A B B A), so that
a machine that warms up, or is busy for a while, favours nobody; what is reported is the ratio of neighbours.

Split, hydra's head has a hydra peer and llama-server a stock `ggml-rpc-server`; `--crossed` gives each the other's. The
same number of layers lies on the peer. A head without a GPU is a limit of llama-server's: it can leave only its *last*
layers to a peer, and the MTP block goes with them.

Needs the programs that build/stock-server.sh makes. Knows processes and HTTP; nothing of engines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra.bench.options import HALF_OF_THE_CORES, Threads
from hydra.bench.pairs import Setting, start
from hydra.bench.process import Child, free_port, start_hydra
from hydra.bench.resident import LlamaServer
from hydra.embedded import cache_home
from hydra.errors import ConfigError, HydraError

ANSWER_S, START_S = 300.0, 120.0
LINE_FEED = 10
RUNS_BEFORE = 8  # steps of an answer before another prompt comes
SAME_STEP_S = 0.002  # tokens that come so close together are one step's
Report = Callable[[str], None]
Head = tuple[str, str, str]  # who, where its HTTP is, and the path that answers


@dataclass(frozen=True)
class Plan:
    """What is compared. ``layers`` on the peer when split; ``places``: of "local", "split", "crossed".

    ``vocabulary``: prompts are made of tokens from this range, chosen at random; ``n_layer`` and ``n_nextn``: the
    model's.
    """

    model: Path
    programs: Path
    places: tuple[str, ...] = ("local", "split")
    mtp: tuple[bool, ...] = (False, True)
    requests: int = 4
    pairs: int = 4
    tokens: int = 64
    prompt_tokens: int = 256
    threads: int = 1
    device: str = "CPU"
    layers: int = 0
    n_layer: int = 0
    n_nextn: int = 0
    cache_type: str = "f16"
    n_max: int = 3
    vocabulary: tuple[int, int] = (33, 126)

    @property
    def ctx_size(self) -> int:
        return self.requests * (self.prompt_tokens + self.tokens + 64)


@dataclass
class Sample:
    """One round: tokens per second of a request's prompt and answer (means over the requests), and of all together."""

    prefill_tps: float
    decode_tps: float
    total_tps: float
    accepted: int
    answers: list[list[int]] = field(repr=False, default_factory=list)


@dataclass
class Pace:
    """A running answer while another prompt is read: seconds between its steps before and meanwhile (the median and
    the longest), and how long the other one waits for its first token.
    """

    alone_s: float
    median_s: float
    longest_s: float
    first_s: float


@dataclass
class Comparison:
    """One place, MTP on or off, one or several requests."""

    place: str
    mtp: bool
    requests: int
    hydra: list[Sample] = field(default_factory=list)
    stock: list[Sample] = field(default_factory=list)
    paces: dict[str, list[Pace]] = field(default_factory=lambda: {"hydra": [], "stock": []})

    @property
    def paced(self) -> bool:
        """Whether the pace of a running answer was measured of both."""
        return all(self.paces.values())

    def ratio(self, name: str) -> float:
        """Hydra over llama-server, the median of pairs."""
        pairs = zip(self.hydra, self.stock, strict=True)
        return statistics.median(getattr(ours, name) / max(1e-9, getattr(theirs, name)) for ours, theirs in pairs)

    def median(self, who: str, name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in getattr(self, who))

    @property
    def same(self) -> bool:
        """Whether every answer was the same, token for token."""
        return all(a.answers == b.answers for a, b in zip(self.hydra, self.stock, strict=True))

    def row(self) -> list[str]:
        cells = [self.place, "on" if self.mtp else "off", str(self.requests)]
        for name in ("prefill_tps", "decode_tps", "total_tps"):
            theirs, ours = self.median("stock", name), self.median("hydra", name)
            cells.append(f"{theirs:.1f} -> {ours:.1f}")
            cells.append(f"{self.ratio(name):.2f}")
        return [*cells, "yes" if self.same else "no"]

    def pace(self, who: str) -> dict[str, float]:
        """Medians of what was measured, in milliseconds."""
        return {name: 1e3 * statistics.median(getattr(pace, name) for pace in self.paces[who])
                for name in Pace.__dataclass_fields__}

    def pace_row(self) -> list[str]:
        both = [self.pace(who) for who in ("stock", "hydra")]
        cells = [" -> ".join(f"{pace[name]:.0f}" for pace in both) for name in Pace.__dataclass_fields__]
        return [self.place, "on" if self.mtp else "off", *cells]

    def to_dict(self) -> dict[str, Any]:
        report: dict[str, Any] = {"place": self.place, "mtp": self.mtp, "requests": self.requests, "same": self.same}
        if self.paced:
            report["pace_ms"] = {who: self.pace(who) for who in self.paces}
        for name in ("prefill_tps", "decode_tps", "total_tps"):
            report[name] = {"hydra": self.median("hydra", name), "stock": self.median("stock", name),
                            "ratio": self.ratio(name), "hydra_all": [getattr(s, name) for s in self.hydra],
                            "stock_all": [getattr(s, name) for s in self.stock]}
        report["accepted"] = {"hydra": [s.accepted for s in self.hydra], "stock": [s.accepted for s in self.stock]}
        return report


COLUMNS = ("place", "MTP", "requests", "prefill tok/s", "ratio", "decode tok/s", "ratio", "all tok/s", "ratio", "same")
PACE_COLUMNS = ("place", "MTP", "step alone, ms", "meanwhile: median", "longest", "the other's first token, ms")


def find_programs(given: Path | None) -> Path:
    """The folder with llama-server and ggml-rpc-server. Raises: ConfigError when there is none."""
    cache = cache_home() / "stock-server"
    found = sorted(cache.glob("*/complete"), key=lambda mark: mark.stat().st_mtime, reverse=True)
    folder = given or next((mark.parent / "work" / "bin" for mark in found), None)
    if folder is None or not (folder / "llama-server").is_file():
        raise ConfigError(f"llama-server is not in {folder or cache}.",
                          "Run `bash build/stock-server.sh`, whose last line is the folder for --programs.")
    return folder


def run(plan: Plan, report: Report) -> list[Comparison]:
    """Measure everything. Raises: HydraError when one of the programs fails."""
    result = []
    for place in plan.places:
        for mtp in plan.mtp:
            for requests in sorted({1, plan.requests}):
                comparison = Comparison(place, mtp, requests)
                # Heads made for so many: slots that share a cache look at each other's cells.
                sized = replace(plan, requests=requests)
                with heads(sized, place, mtp) as both:
                    for head in both:
                        ask(sized, head, 0, requests, tokens=8)  # graphs, thread pools, pages: made at first use
                    for pair in range(plan.pairs):
                        for head in both if pair % 2 == 0 else both[::-1]:
                            getattr(comparison, head[0]).append(ask(sized, head, pair + 1, requests))
                            found = pace(sized, head, pair + 1) if requests > 1 else None
                            if found is not None:
                                comparison.paces[head[0]].append(found)
                report(f"{place}, MTP {'on' if mtp else 'off'}, {requests} at once: decode "
                       f"{comparison.ratio('decode_tps'):.3f}, prefill {comparison.ratio('prefill_tps'):.3f}, all "
                       f"{comparison.ratio('total_tps'):.3f}")
                result.append(comparison)
    return result


@contextmanager
def heads(plan: Plan, place: str, mtp: bool) -> Iterator[list[Head]]:
    """Both heads, loaded, each with its peer where there is one."""
    with contextlib.ExitStack() as stack:
        addresses = {"hydra": "", "stock": ""}
        if place != "local":
            for who in addresses:
                kind = who if place == "split" else {"hydra": "stock", "stock": "hydra"}[who]
                addresses[who] = stack.enter_context(_peer(plan, kind))
        server = stack.enter_context(LlamaServer(str(plan.programs / "llama-server"),
                                                 stock_arguments(plan, addresses["stock"], mtp)))
        url = stack.enter_context(_hydra_head(plan, addresses["hydra"], mtp))
        yield [("stock", f"http://127.0.0.1:{server.port}", "/completion"), ("hydra", url, "/v1/completions")]


@contextmanager
def _peer(plan: Plan, kind: str) -> Iterator[str]:
    if kind == "hydra":
        with start("hydra", Setting(plan.device, plan.threads)) as peer:
            yield peer.endpoint
        return
    port = free_port()
    command = [str(plan.programs / "ggml-rpc-server"), "-p", str(port), "-t", str(plan.threads), "-d", plan.device]
    with Child(command) as child:
        child.wait_listening(port)
        yield f"127.0.0.1:{port}"


def stock_arguments(plan: Plan, address: str, mtp: bool) -> list[str]:
    """llama-server's options for the same thing."""
    threads = ["-t", str(plan.threads), "-tb", str(plan.threads)]
    arguments = ["-m", str(plan.model), "-c", str(plan.ctx_size), "-b", "2048", "-ub", "512", *threads,
                 "-np", str(plan.requests), "-ctk", plan.cache_type, "-ctv", plan.cache_type, "-fa", "auto",
                 "-fit", "off", "-cram", "0", "-ctxcp", "0", "--no-webui", "--no-cache-prompt"]
    if mtp:
        arguments += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(plan.n_max)]
    on_gpu = plan.device != "CPU"
    if address:
        arguments += ["--rpc", address]
    if on_gpu:
        rest = plan.n_layer - plan.layers + plan.n_nextn + 1
        return [*arguments, "-ngl", "999", *(["-ts", f"{plan.layers},{rest}"] if address else [])]
    # Without a GPU the last layers are the peer's. The output, counted as one of them, is fetched back to the head.
    count = plan.layers + plan.n_nextn + 1
    return [*arguments, *(["-ngl", str(count), "-ot", r"^(output|token_embd)\.weight$=CPU"] if address else [])]


_TOML = """\
[model]
path = {model}
ctx_size = {ctx_size}
parallel = {requests}
threads = {threads}
cache_type_k = "{cache_type}"
cache_type_v = "{cache_type}"
[mtp]
enabled = {mtp}
draft_n_max = {n_max}
adaptive = false
[head]
api_port = {port}
[[nodes]]
name = "head"
role = "head"
host = "127.0.0.1"
device = "{device}"
"""
_PEER_TOML = """\
layers = {rest}
[[nodes]]
name = "peer"
role = "peer"
host = "127.0.0.1"
port = {peer_port}
layers = {layers}
"""


@contextmanager
def _hydra_head(plan: Plan, address: str, mtp: bool) -> Iterator[str]:
    port = free_port()
    text = _TOML.format(model=json.dumps(str(plan.model)), ctx_size=plan.ctx_size, requests=plan.requests,
                        threads=plan.threads, cache_type=plan.cache_type, mtp=str(mtp).lower(), n_max=plan.n_max,
                        port=port, device=plan.device)
    if address:
        text += _PEER_TOML.format(rest=plan.n_layer - plan.layers, layers=plan.layers,
                                  peer_port=address.rpartition(":")[2])
    with tempfile.TemporaryDirectory(prefix="hydra-bench-") as folder:
        config = Path(folder) / "hydra.toml"
        config.write_text(text)
        with start_hydra(["up", "--config", str(config), "--node", "head"]) as child:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(child, url)
            yield url


def _wait_ready(child: Child, url: str) -> None:
    import httpx

    end = time.monotonic() + START_S
    while time.monotonic() < end and child.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise HydraError("hydra's head did not become ready.", child.log_tail(30))


def prompt(plan: Plan, seed: int, number: int) -> list[int]:
    """Tokens of one request: others for every seed and number, the same for both heads, a line feed at the end."""
    import numpy as np

    low, high = plan.vocabulary
    made = np.random.default_rng(1000 * seed + number).integers(low, high, plan.prompt_tokens - 1)
    return [*map(int, made), LINE_FEED]


def request(plan: Plan, seed: int, number: int, tokens: int) -> dict[str, Any]:
    """What either head is sent for ``tokens`` tokens after the prompt of that number."""
    return {"prompt": prompt(plan, seed, number), "temperature": 0, "ignore_eos": True, "return_tokens": True,
            "n_predict": tokens, "max_tokens": tokens, "cache_prompt": False}


def ask(plan: Plan, head: Head, seed: int, requests: int, tokens: int = 0) -> Sample:
    """``requests`` prompts at once. Raises: HydraError when one is refused or not answered in time."""
    import httpx

    _who, url, path = head
    count = tokens or plan.tokens
    replies: list[dict[str, Any]] = [{} for _ in range(requests)]
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:

        def one(number: int) -> None:
            body = request(plan, seed, number, count)
            with contextlib.suppress(httpx.HTTPError, ValueError):
                replies[number] = client.post(url + path, json=body).json()

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(requests)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
        seconds = time.perf_counter() - began
    failed = next((reply for reply in replies if "timings" not in reply), None)
    if failed is not None:
        raise HydraError(f"{head[0]} did not answer: {json.dumps(failed)[:300]}.")
    timings = [reply["timings"] for reply in replies]
    answers = [reply["tokens"] if "tokens" in reply else reply["choices"][0]["tokens"] for reply in replies]
    return Sample(statistics.mean(t["prompt_per_second"] for t in timings),
                  statistics.mean(t["predicted_per_second"] for t in timings),
                  requests * count / seconds, sum(t.get("draft_n_accepted") or 0 for t in timings), answers)


def pace(plan: Plan, head: Head, seed: int) -> Pace | None:
    """One answer runs, then another prompt comes; None when the answer was over too soon to tell.

    Raises: HydraError when the other one is refused.
    """
    import httpx

    _who, url, path = head
    came: list[float] = []
    running, enough = threading.Event(), threading.Event()

    def run_on() -> None:
        short = replace(plan, prompt_tokens=16)
        asked = {**request(short, seed, 100, plan.tokens + plan.prompt_tokens), "stream": True}
        with (contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=ANSWER_S) as client,
              client.stream("POST", url + path, json=asked) as reply):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    came.append(time.perf_counter())
                if len(came) > RUNS_BEFORE:
                    running.set()
                if enough.is_set():
                    return
        running.set()

    thread = threading.Thread(target=run_on, daemon=True)
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        thread.start()
        running.wait(ANSWER_S)
        sent = time.perf_counter()
        reply = client.post(url + path, json=request(plan, seed, 101, 1))
        done = time.perf_counter()
    time.sleep(min(1.0, done - sent))  # the running answer's step in which the other one's token came
    enough.set()
    thread.join(ANSWER_S)
    steps = [at for before, at in zip([0.0, *came], came, strict=False) if at - before > SAME_STEP_S]
    gaps = list(itertools.pairwise(steps))
    before = [b - a for a, b in gaps if b < sent]
    meanwhile = [b - a for a, b in gaps if b > sent and a < done]
    if reply.status_code != 200:
        raise HydraError(f"{head[0]} did not answer: {reply.text[:300]}.")
    if not before or not meanwhile:
        return None
    return Pace(statistics.median(before), statistics.median(meanwhile), max(meanwhile), done - sent)


def command(
    model: Annotated[Path | None, typer.Option("--model", "-m", metavar="FILE", help="GGUF to measure with.")] = None,
    synthetic: Annotated[str, typer.Option("--synthetic", metavar="SHAPE", help="Make a model, such as tiny.")] = "",
    places: Annotated[
        str, typer.Option("--places", metavar="P,P", help="Of local, split, crossed.")] = "local,split",
    mtp: Annotated[str, typer.Option("--mtp", metavar="off,on", help="Without MTP, with it, or both.")] = "off,on",
    requests: Annotated[int, typer.Option("--requests", "-np", metavar="N", min=1, help="Requests at once.")] = 4,
    pairs: Annotated[int, typer.Option("--pairs", metavar="N", min=1, help="Pairs of runs, in turn.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=8, help="Tokens of each answer.")] = 64,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=8, help="Prompt tokens.")] = 256,
    threads: Threads = HALF_OF_THE_CORES,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="ggml device: CPU, CUDA0.")] = "CPU",
    layers: Annotated[int, typer.Option("--layers", metavar="N", help="Layers on the peer (-1: half).")] = -1,
    cache_type: Annotated[str, typer.Option("--cache-type", metavar="T", help="KV cache: f16, q8_0.")] = "f16",
    programs: Annotated[
        Path | None, typer.Option("--programs", metavar="DIR", help="Where build/stock-server.sh put llama-server.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line of stdout.")] = False,
) -> None:
    """Compare hydra's head with llama-server: prefill, decode, several requests; local and split; MTP off and on."""
    from hydra import console
    from hydra.bench import cli
    from hydra.model_file import read_model_file

    chosen = cli.model_path(model, synthetic)
    shape = read_model_file(chosen)
    wanted = tuple(part.strip() == "on" for part in mtp.split(",")) if shape.n_nextn else (False,)
    plan = Plan(
        chosen, find_programs(programs), tuple(places.split(",")), wanted, requests, pairs, tokens, prompt, threads,
        device, shape.n_layer // 2 if layers < 0 else layers, shape.n_layer, shape.n_nextn, cache_type)
    found = run(plan, console.note)
    console.table(COLUMNS, [comparison.row() for comparison in found])
    console.result("llama-server -> hydra, medians; ratio: hydra over llama-server, the median of pairs")
    together = [comparison.pace_row() for comparison in found if comparison.paced]
    if together:
        console.table(PACE_COLUMNS, together)
        console.result("a running answer while another prompt is read, llama-server -> hydra, medians")
    if as_json:
        setting = {**asdict(plan), "model": str(plan.model), "programs": str(plan.programs)}
        console.result_json({"setting": setting, "comparisons": [comparison.to_dict() for comparison in found]})
