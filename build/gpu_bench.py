"""The reference run on a real GPU: T1, T2 and T3 at 27B with MTP, the stock peer, hydra's and none in turn.

Three parts, chosen on the command line: ``speed`` (hydra heads, then llama-server), ``loads``, ``checks``. Each head
loads once and stays; the rounds go A B C, C B A. A part has a time allowance, and what no longer fits is left out and
listed as not run: no figure is made up for it. Everything goes into one JSON file, into which later parts are merged.

Started by build/gpu_bench.sh. Knows what to compare; how is hydra.bench.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.bench import nagle, synthetic
from hydra.bench.pairs import Peer, Setting, run_head, start
from hydra.bench.process import process_tree
from hydra.bench.resident import LlamaServer, ResidentHead, Run, find_llama_server
from hydra.bench.run_head import HeadSpec
from hydra.errors import HydraError
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec

TESTS = {"T1": (2048, 256), "T2": (8192, 256), "T3": (30, 512)}  # prompt tokens, tokens answered
TEXT = (32, 127)  # the synthetic model's language: bytes that it continues with certainty
GOALS = {
    "decode, hydra over stock, MTP on": 1.03,
    "decode, hydra over stock, MTP off": 1.03,
    "prefill, hydra over stock, MTP on": 1.02,
    "cold load, stock over hydra": 1.15,
    "decode, hydra head over llama-server, MTP on": 1.0,
    "decode, split over no peer, MTP off": 0.95,
    "decode, split over no peer, MTP on": 0.93,
    "prefill, MTP on over off": 0.93,
}


class Bench:
    """One run of the script: options, the clock, and the report that grows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = self.out / "gpu_bench.json"
        self.report: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.deadline = time.monotonic() + options.budget
        # What an earlier command could not run or failed at stays, unless the same part runs again.
        for key in ("not_run", "failed"):
            kept = {part: found for part, found in self.report.get(key, {}).items() if part not in options.parts}
            self.report[key] = kept
        self.part = ""
        tests = {
            name: (max(8, int(p * options.scale)), max(8, int(n * options.scale))) for name, (p, n) in TESTS.items()
        }
        self.tests = {name: tests[name] for name in options.tests.split(",")}
        self.seed = 0

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{self.options.budget - self.left():5.0f} s] {text}", file=sys.stderr, flush=True)

    def fits(self, seconds: float, what: str) -> bool:
        """True when ``seconds`` are left; else ``what`` is noted as not run."""
        if self.left() >= seconds:
            return True
        self.not_run(f"{what}: {self.left():.0f} s were left, it needs about {seconds:.0f}")
        return False

    def not_run(self, why: str) -> None:
        self.report["not_run"].setdefault(self.part, []).append(why)
        self.say(f"not run: {why}")

    def save(self) -> None:
        self.file.write_text(json.dumps(self.report, indent=1) + "\n")

    def new_seed(self) -> int:
        self.seed += 1
        return self.seed

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A part that fails is a finding, not the end of the run."""
        try:
            yield
        except (HydraError, OSError, subprocess.SubprocessError, AssertionError, KeyError, ValueError) as error:
            self.report["failed"].setdefault(self.part, []).append({"what": what, "error": str(error)[-2000:]})
            self.say(f"FAILED: {what}: {error}")
        self.save()

    def model(self) -> Path:
        options = self.options
        if options.model:
            return Path(options.model)
        began = time.monotonic()
        path = synthetic.model(
            options.shape,
            acceptance=options.acceptance,
            quant=options.quant or None,
            directory=Path(options.models),
            confirm=lambda _path, _size: True,
        )
        self.say(f"model {path.name}: {path.stat().st_size / 1e9:.1f} GB, {time.monotonic() - began:.0f} s")
        return path

    def spec(self, model: Path, peer: Peer | None) -> dict[str, Any]:
        options = self.options
        return EngineSpec(
            str(model),
            endpoints=(Endpoint("peer", peer.endpoint),) if peer else (),
            layers={"peer": options.layers} if peer else {},
            devices=(options.device,),
            ctx_size=options.ctx,
            cache_type_k=options.cache_type,
            cache_type_v=options.cache_type,
            flash_attn="on",
            threads=options.threads,
            pipeline=options.pipeline,
            draft=DraftSpec("mtp", 3, 0.0, adaptive=False),
        ).to_dict()

    def setting(self) -> Setting:
        return Setting(self.options.peer_device or self.options.device, self.options.threads)


# ---- speed ---------------------------------------------------------------------------------------------------------


def speed(bench: Bench) -> None:
    """Hydra heads over each peer, then llama-server over each."""
    model = bench.model()
    with bench.guarded("hydra heads"):
        hydra_heads(bench, model)
    with bench.guarded("llama-server"):
        llama_servers(bench, model)


def hydra_heads(bench: Bench, model: Path) -> None:
    samples: dict[str, list[Run]] = defaultdict(list)
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        heads: dict[str, ResidentHead] = {}
        peers: dict[str, Peer] = {}
        for kind in ("stock", "hydra", "none"):
            peer = stack.enter_context(start(kind, bench.setting(), timings=True)) if kind != "none" else None
            head = stack.enter_context(ResidentHead(bench.spec(model, peer), peer))
            heads[kind] = head
            figures[kind] = {"load_s": head.load_s, "layers": head.ready["layers"], "memory": head.ready["memory"]}
            if peer is not None:
                peers[kind] = peer
                weighed = head.weighed
                figures[kind]["peer_rss"] = {
                    "idle_bytes": weighed.idle_bytes,
                    "peak_bytes": weighed.peak_bytes,
                    "loaded_bytes": weighed.loaded_bytes,
                    "cpu_s": weighed.cpu_s,
                }
            bench.say(f"hydra head, {kind}: loaded in {head.load_s:.1f} s, drafter {head.ready['drafter']}")
            head.run("mtp", 64, 16, 999, TEXT)
        bench.report["hydra_head"] = figures
        # MTP on first: it is the reference. The shares leave time for llama-server.
        rounds(bench, heads, "mtp", samples, until_left=0.62 * bench.options.budget, least=2)
        rounds(bench, heads, "plain", samples, until_left=0.45 * bench.options.budget, least=1)
        bench.report["hydra_head"]["tokens_agree"] = tokens_agree(samples)
        bench.report["hydra_head"]["runs"] = summary(samples)
        bench.save()
        if bench.options.concurrent and bench.fits(60, "concurrent requests"):
            with bench.guarded("concurrent requests"):
                four_at_once(bench, heads, figures)
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{peers['hydra'].endpoint}/stats?timings", timeout=10) as answer:
                figures["commands"] = json.load(answer).get("commands")
        if bench.fits(30, "without TCP_NODELAY"):
            with bench.guarded("without TCP_NODELAY"):
                figures["nagle"] = without_nodelay(bench, heads, peers)
        figures["gpu_memory"] = gpu_memory()


def rounds(
    bench: Bench,
    heads: dict[str, Any],
    engine: str,
    samples: dict[str, list[Run]],
    *,
    until_left: float,
    least: int,
    prefix: str = "",
) -> None:
    """Each test on each head, in an order that turns round every time; ``least`` rounds, more while there is time."""
    number, longest = 0, 0.0
    while number < least or (number < bench.options.rounds and bench.left() - longest > until_left):
        if bench.left() < longest + 10:
            bench.not_run(f"round {number + 1} of {prefix}{engine}: {bench.left():.0f} s were left")
            return
        began = time.monotonic()
        for test, (prompt, tokens) in bench.tests.items():
            seed = bench.new_seed()
            for kind in list(heads) if number % 2 == 0 else list(reversed(heads)):
                run = heads[kind].run(engine, prompt, tokens, seed, TEXT)
                samples[f"{prefix}{kind} {engine} {test}"].append(run)
        number += 1
        longest = max(longest, time.monotonic() - began)
        bench.say(
            f"{prefix}{engine}: round {number} in {time.monotonic() - began:.0f} s; "
            + headline(samples, engine, prefix)
        )


def headline(samples: dict[str, list[Run]], engine: str, prefix: str) -> str:
    kinds = sorted(
        {key.removeprefix(prefix).split()[0] for key in samples if f" {engine} " in key and key.startswith(prefix)}
    )
    return ", ".join(
        f"{kind} {samples[f'{prefix}{kind} {engine} T1'][-1].decode_tps:.1f}"
        for kind in kinds
        if f"{prefix}{kind} {engine} T1" in samples
    )


def tokens_agree(samples: dict[str, list[Run]]) -> dict[str, Any]:
    """Whether all heads answered alike, run by run, and where the first difference lies."""
    groups: dict[str, dict[str, list[Run]]] = defaultdict(dict)
    for key, runs in samples.items():
        kind, engine, test = key.split()
        groups[f"{engine} {test}"][kind] = runs
    result: dict[str, Any] = {}
    for name, by_kind in groups.items():
        reference = next(iter(by_kind.values()))
        differing = {
            kind: next((i for i, (a, b) in enumerate(zip(run.tokens, ref.tokens, strict=False)) if a != b), -1)
            for kind, runs in by_kind.items()
            for run, ref in zip(runs, reference, strict=False)
            if run.tokens != ref.tokens
        }
        result[name] = differing or True
    return result


def summary(samples: dict[str, list[Run]]) -> dict[str, Any]:
    return {
        key: {
            "prefill_tps": statistics.median(run.prefill_tps for run in runs),
            "decode_tps": statistics.median(run.decode_tps for run in runs),
            "acceptance": sum(r.accepted for r in runs) / max(1, sum(r.drafted for r in runs)),
            "prefill_tps_all": [round(run.prefill_tps, 1) for run in runs],
            "decode_tps_all": [round(run.decode_tps, 2) for run in runs],
        }
        for key, runs in samples.items()
    }


def four_at_once(bench: Bench, heads: dict[str, ResidentHead], figures: dict[str, Any]) -> None:
    prompt, tokens = (max(8, int(n * bench.options.scale)) for n in (512, 128))
    for kind, head in heads.items():
        result = head.ask(do="many", requests=4, prompt=prompt, tokens=tokens, seed=bench.new_seed(), alphabet=TEXT)
        figures[kind]["four_at_once"] = result
        bench.say(f"four requests at once, {kind}: {result['total_tps']:.1f} tok/s together")


def without_nodelay(bench: Bench, heads: dict[str, ResidentHead], peers: dict[str, Peer]) -> dict[str, Any]:
    """The bug: decode with the option taken from the peer's accepted socket. Last, because it is not given back."""
    figures = {}
    for kind, peer in peers.items():
        usual = heads[kind].run("plain", 30, 32, bench.new_seed(), TEXT)
        with nagle.without_nodelay(peer.pid) as thief:
            heads[kind].run("plain", 30, 16, bench.new_seed(), TEXT)
            bad = heads[kind].run("plain", 30, 32, bench.new_seed(), TEXT)
        figures[kind] = {"with_tps": usual.decode_tps, "without_tps": bad.decode_tps, "sockets": thief.sockets}
        bench.say(f"TCP_NODELAY taken from {kind}: {usual.decode_tps:.1f} -> {bad.decode_tps:.1f} tok/s")
    return figures


def llama_servers(bench: Bench, model: Path) -> None:
    program = find_llama_server()
    if program is None:
        bench.not_run("llama-server: it is neither on the PATH nor beside the libraries")
        return
    if not bench.fits(110, "llama-server as the head"):
        return
    samples: dict[str, list[Run]] = defaultdict(list)
    options = bench.options
    common = [
        *(
            "-m",
            str(model),
            "-c",
            str(options.ctx),
            "-ub",
            "512",
            "-b",
            "2048",
            "-ngl",
            "999",
            "-fit",
            "off",
            "-np",
            "1",
        ),
        *("-ctk", options.cache_type, "-ctv", options.cache_type, "-fa", "on", "-cram", "0", "-ctxcp", "0"),
        *("-t", str(options.threads)),
    ]
    mtp = ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]
    shape = synthetic.SHAPES.get(options.shape)
    n_layer, extra = (shape.n_layer, shape.n_nextn + 1) if shape else (64, 2)
    split = ["-ts", f"{options.layers},{n_layer - options.layers + extra}"]
    with contextlib.ExitStack() as stack:
        servers: dict[str, dict[str, LlamaServer]] = {"mtp": {}, "plain": {}}
        for engine, kind in (
            ("mtp", "stock"),
            ("mtp", "hydra"),
            ("mtp", "none"),
            ("plain", "stock"),
            ("plain", "none"),
        ):
            if engine == "plain" and not options.server_plain:
                continue
            # llama-server takes no CPU for a device: there the whole model goes to the peer, or stays where it is.
            local = "" if options.device == "CPU" else options.device
            place = ["-dev", local or "none"]
            if kind != "none":
                peer = stack.enter_context(start(kind, bench.setting()))
                # --rpc first: the name RPC0 is known only after it.
                place = ["--rpc", peer.endpoint, "-dev", f"RPC0,{local}".rstrip(","), *(split if local else [])]
            arguments = [*common, *place, *(mtp if engine == "mtp" else [])]
            # All load at once: each is bound by one core of its own, and nothing is measured meanwhile.
            servers[engine][kind] = stack.enter_context(LlamaServer(str(program), arguments, wait=False))
        for by_kind in servers.values():
            for server in by_kind.values():
                server.wait_ready()
                server.run("", 64, 16, 999, TEXT)
        bench.say("llama-servers are loaded")
        for engine, by_kind in servers.items():
            if by_kind:
                rounds(bench, by_kind, engine, samples, until_left=25, least=1, prefix="server-")
        bench.report["llama_server"] = {"runs": summary(samples), "tokens_agree": tokens_agree(samples)}


# ---- loads ---------------------------------------------------------------------------------------------------------


def loads(bench: Bench) -> None:
    """Cold loads in pairs, the floor of a sink, warm loads from each peer's cache; the peer's memory meanwhile."""
    model = bench.model()
    options = bench.options
    spec = HeadSpec(str(model), peer_layers=options.layers, devices=(options.device,), threads=options.threads)
    figures: dict[str, Any] = defaultdict(list)
    bench.report["loads"] = figures
    caches = Path(tempfile.mkdtemp(prefix="gpu-bench-cache-", dir=options.models))
    longest = 30.0 if options.scale == 1 else 1.0

    def load(kind: str, name: str, cache: Path | None = None) -> None:
        nonlocal longest
        if not bench.fits(longest, f"{name}, {kind}"):
            return
        began = time.monotonic()
        with bench.guarded(f"{name}, {kind}"):
            with start(kind, bench.setting(), cache_dir=cache) as peer:
                result, weighed = run_head(spec, peer)
            figures[f"{name} {kind} s"].append(round(result.load_s, 3))
            if cache is None and kind in ("stock", "hydra"):
                figures[f"peer_rss {kind}"].append([weighed.idle_bytes, weighed.peak_bytes, weighed.loaded_bytes])
            risen, idle = (weighed.peak_bytes - weighed.idle_bytes) >> 20, weighed.idle_bytes >> 20
            bench.say(f"{name}, {kind}: {result.load_s:.2f} s; peer at most {risen} MiB above its {idle}")
        longest = max(longest, time.monotonic() - began)

    try:
        # What matters most comes first, should the time not suffice for all.
        for kind in ("stock", "hydra", "sink"):
            load(kind, "cold")
        for kind, name in (("hydra", "filling"), ("hydra", "warm"), ("hydra", "warm")):
            load(kind, name, caches / kind)
        shutil.rmtree(caches / "hydra", ignore_errors=True)
        load("sink-found", "warm")
        for kind in ("hydra", "stock", "sink"):
            load(kind, "cold")
        for kind, name in (("stock", "filling"), ("stock", "warm"), ("stock", "warm")):
            load(kind, name, caches / kind)
    finally:
        shutil.rmtree(caches, ignore_errors=True)


# ---- checks --------------------------------------------------------------------------------------------------------


def checks(bench: Bench) -> None:
    """What must hold: logits alike over every peer, memory flat, a killed worker forgotten, the sanitizer silent."""
    models = Path(bench.options.models)
    tiny = synthetic.model("tiny", directory=models)
    mixed = synthetic.model("tiny", exact=False, directory=models)
    table: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("logits", lambda: logits_agree(bench, mixed)),
        ("memory", lambda: memory_is_flat(bench, tiny)),
        ("worker", lambda: worker_killed(bench, tiny)),
        ("sanitizer", lambda: sanitizer(bench, synthetic.model("toy-llama", directory=models))),
    )
    for what, check in table:
        if bench.fits(20, f"check: {what}"):
            with bench.guarded(f"check: {what}"):
                bench.report.setdefault("checks", {})[what] = check()
                bench.say(f"check {what}: {json.dumps(bench.report['checks'][what])[:300]}")


def small_spec(bench: Bench, model: Path, peer: Peer | None) -> dict[str, Any]:
    fields = bench.spec(model, peer)
    fields.update(ctx_size=min(8192, bench.options.ctx), layers={"peer": 5} if peer else {})
    return fields


def logits_agree(bench: Bench, model: Path) -> dict[str, Any]:
    """A model with nothing zeroed: the same logits over every peer, and what the batch's width alone changes."""
    rows: dict[str, Any] = {}
    for kind in ("none", "stock", "hydra"):
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(start(kind, bench.setting())) if kind != "none" else None
            head = stack.enter_context(ResidentHead(small_spec(bench, model, peer), peer))
            rows[kind] = head.ask(do="logits", prompt=64, seed=5, alphabet=TEXT)
            rows[kind]["narrow"] = head.ask(do="logits", prompt=64, seed=5, alphabet=TEXT, width=1)
            rows[kind]["mtp"] = head.run("mtp", 64, 64, 6, TEXT).tokens
            rows[kind]["plain"] = head.run("plain", 64, 64, 6, TEXT).tokens
    scale = rows["none"]["spread"]

    def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
        return max(abs(x - y) for x, y in zip(a["logits"], b["logits"], strict=True)) / scale

    return {
        "largest difference, in standard deviations of the logits": {
            "hydra and none": apart(rows["hydra"], rows["none"]),
            "stock and none": apart(rows["stock"], rows["none"]),
            "hydra and stock": apart(rows["hydra"], rows["stock"]),
            "64 tokens at once and one by one, no peer": apart(rows["none"], rows["none"]["narrow"]),
        },
        "same tokens over every peer, MTP off": rows["hydra"]["plain"]
        == rows["stock"]["plain"]
        == rows["none"]["plain"],
        "same tokens over every peer, MTP on": rows["hydra"]["mtp"] == rows["stock"]["mtp"] == rows["none"]["mtp"],
        "MTP on as MTP off": rows["hydra"]["mtp"] == rows["hydra"]["plain"],
    }


def memory_is_flat(bench: Bench, model: Path) -> dict[str, Any]:
    """5,000 tokens through hydra's peer: the card's memory after the first answer and after the last."""
    with start("hydra", bench.setting()) as peer, ResidentHead(small_spec(bench, model, peer), peer) as head:
        seen = []
        for seed in range(10):
            head.run("mtp", 30, max(8, int(500 * bench.options.scale)), 50 + seed, TEXT)
            seen.append(peer_memory(peer))
    grown = {key: seen[-1][key] - seen[0][key] for key in seen[0]}
    return {"after the first answer": seen[0], "after the last": seen[-1], "grown_bytes": grown}


def worker_killed(bench: Bench, model: Path) -> dict[str, Any]:
    """SIGKILL to the device worker while it computes: memory comes back and the next head is served."""
    with start("hydra", bench.setting()) as peer:
        before = peer_memory(peer)
        spec = HeadSpec(
            str(model),
            peer_layers=5,
            devices=(bench.options.device,),
            threads=bench.options.threads,
            peer=peer.endpoint,
            decode_tokens=3000,
            ctx_size=4096,
        )
        child = subprocess.Popen(
            [sys.executable, "-m", "hydra.bench.run_head", spec.to_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if b'"decode"' in line:
                    break
            time.sleep(0.3)
            during = peer_memory(peer)
            worker = process_tree(peer.pid)[1]
            os.kill(worker, signal.SIGKILL)
            status = child.wait(60)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        result = None
        for _ in range(40):
            time.sleep(0.5)
            with contextlib.suppress(HydraError):
                after_spec = HeadSpec(**{**spec.__dict__, "decode_tokens": 16})
                result, _ = run_head(after_spec, peer, timeout_s=60)
                break
        return {
            "head_status": status,
            "before": before,
            "during": during,
            "after": peer_memory(peer),
            "next_session_tokens": len(result.tokens) if result else 0,
        }


def sanitizer(bench: Bench, model: Path) -> dict[str, Any]:
    """compute-sanitizer's memcheck over the peer for one short session."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"not_run": "compute-sanitizer is not installed"}
    from hydra.peer.launch import start_peer

    logs = bench.out / "sanitizer"
    logs.mkdir(exist_ok=True)
    device = bench.options.peer_device or bench.options.device
    prefix = (program, "--tool", "memcheck", "--target-processes", "all", "--log-file", str(logs / "%p.log"))
    with start_peer(device=device, threads=1, prefix=prefix) as peer:
        spec = HeadSpec(
            str(model),
            peer=f"127.0.0.1:{peer.port}",
            devices=(bench.options.device,),
            threads=1,
            prompts=(64,),
            decode_tokens=16,
            verify_steps=2,
        )
        result, _ = run_head(spec, None, timeout_s=150)
        # The peer and not the sanitizer is asked to end: then the sanitizer writes its summary and ends after it.
        for pid in process_tree(peer.pid)[1:2]:
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            peer.process.wait(30)
    found = [
        line.strip() for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()
    ]
    return {
        "tokens": len(result.tokens),
        "summaries": [line for line in found if "ERROR SUMMARY" in line],
        "first errors": [line for line in found if "Invalid" in line or "Program hit" in line][:6],
    }


# ---- the card ------------------------------------------------------------------------------------------------------


def gpu_memory() -> dict[str, int]:
    """Bytes in use on the card by process id; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    found = {}
    for line in done.stdout.splitlines():
        pid, _, used = line.partition(",")
        with contextlib.suppress(ValueError):
            found[pid.strip()] = int(used) << 20
    return found


def peer_memory(peer: Peer) -> dict[str, int]:
    """The peer's resident memory, and what is in use on its card (of all processes together)."""
    from hydra.bench.process import memory_of

    used = 0
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        with contextlib.suppress(ValueError, IndexError):
            used = int(done.stdout.splitlines()[0]) << 20
    return {"rss_bytes": memory_of(process_tree(peer.pid)).rss_bytes, "gpu_bytes": used}


# ---- the table -----------------------------------------------------------------------------------------------------


def ratio_of(runs: dict[str, Any], above: str, below: str, figure: str) -> float | None:
    """Median over tests and rounds of ``above`` over ``below``; the keys hold ``{test}``."""
    ratios = []
    for test, (prompt, _) in TESTS.items():
        if figure == "prefill_tps" and prompt < 512:
            continue  # a prompt of 30 tokens is one small batch: it times the start of an answer, not prefill
        over, under = runs.get(above.format(test=test)), runs.get(below.format(test=test))
        if over and under:
            pairs = zip(over[f"{figure}_all"], under[f"{figure}_all"], strict=False)
            ratios += [a / b for a, b in pairs if a and b]
    return statistics.median(ratios) if ratios else None


def goals(report: dict[str, Any]) -> dict[str, float | None]:
    runs = report.get("hydra_head", {}).get("runs", {})
    servers = report.get("llama_server", {}).get("runs", {})
    both = {**runs, **servers}
    cold = report.get("loads", {})
    stock_cold, ours_cold = cold.get("cold stock s"), cold.get("cold hydra s")
    if stock_cold and ours_cold:
        load = statistics.median(stock_cold) / statistics.median(ours_cold)
    elif runs:
        load = report["hydra_head"]["stock"]["load_s"] / report["hydra_head"]["hydra"]["load_s"]
    else:
        load = None
    return {
        "decode, hydra over stock, MTP on": ratio_of(runs, "hydra mtp {test}", "stock mtp {test}", "decode_tps"),
        "decode, hydra over stock, MTP off": ratio_of(runs, "hydra plain {test}", "stock plain {test}", "decode_tps"),
        "prefill, hydra over stock, MTP on": ratio_of(runs, "hydra mtp {test}", "stock mtp {test}", "prefill_tps"),
        "cold load, stock over hydra": load,
        "decode, hydra head over llama-server, MTP on": ratio_of(
            both, "stock mtp {test}", "server-stock mtp {test}", "decode_tps"
        ),
        "decode, split over no peer, MTP off": ratio_of(runs, "hydra plain {test}", "none plain {test}", "decode_tps"),
        "decode, split over no peer, MTP on": ratio_of(runs, "hydra mtp {test}", "none mtp {test}", "decode_tps"),
        "prefill, MTP on over off": ratio_of(runs, "hydra mtp {test}", "hydra plain {test}", "prefill_tps"),
    }


def table(report: dict[str, Any]) -> str:
    lines = []
    for part, title in (("hydra_head", "head: hydra"), ("llama_server", "head: llama-server")):
        runs = report.get(part, {}).get("runs", {})
        if not runs:
            continue
        lines += ["", f"{title:<28}" + "".join(f"{test + ' pp / tg':>20}" for test in TESTS) + f"{'acceptance':>12}"]
        for engine in ("mtp", "plain"):
            for kind in ("none", "stock", "hydra"):
                keys = [f"{'server-' if part == 'llama_server' else ''}{kind} {engine} {test}" for test in TESTS]
                if not any(key in runs for key in keys):
                    continue
                name = f"{kind if kind != 'none' else 'no'} peer, MTP {'on' if engine == 'mtp' else 'off'}"
                cells = [
                    f"{runs[k]['prefill_tps']:,.0f} / {runs[k]['decode_tps']:.1f}" if k in runs else "–" for k in keys
                ]
                share = next((runs[k]["acceptance"] for k in keys if k in runs), 0.0)
                lines.append(f"{name:<28}" + "".join(f"{cell:>20}" for cell in cells) + f"{share:>12.2f}")
    lines += ["", f"{'ratio':<48}{'here':>8}{'goal':>8}"]
    for name, value in report["goals"].items():
        lines.append(f"{name:<48}{'–' if value is None else format(value, '.3f'):>8}{GOALS[name]:>8.2f}")
    for name, values in report.get("loads", {}).items():
        if name.endswith(" s"):
            lines.append(f"load, {name[:-2]:<30} {', '.join(f'{value:.2f}' for value in values)} s")
    lines += [f"not run: {line}" for found in report["not_run"].values() for line in found]
    for found in report["failed"].values():
        lines += [f"FAILED: {entry['what']}: {entry['error'].splitlines()[0]}" for entry in found]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    from hydra import __version__
    from hydra.ggml.library import load, package_version

    card = ""
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return {
        "hydra": __version__,
        "llama-cpp-python": package_version() or "",
        "libggml": load().version(),
        "python": sys.version.split()[0],
        "card": card,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_bench.sh", description="The reference run on a real GPU.")
    parser.add_argument("parts", nargs="*", default=["speed"], help="speed, loads, checks (default: speed)")
    parser.add_argument("--out", default=os.environ.get("OUT") or "gpu-bench", help="folder of the JSON file")
    parser.add_argument("--models", default="/tmp/hydra-models", help="where the synthetic model is made and kept")
    parser.add_argument("--model", default="", help="a GGUF of your own instead")
    parser.add_argument("--shape", default="27b")
    parser.add_argument("--quant", default="q8_0", help="type of the weights; empty = the shape's own")
    parser.add_argument("--acceptance", type=float, default=0.7, help="share of drafts that are right")
    parser.add_argument("--layers", type=int, default=25, help="layers on the peer")
    parser.add_argument("--ctx", type=int, default=65536)
    parser.add_argument("--cache-type", default="q8_0")
    parser.add_argument("--device", default="CUDA0", help="the head's")
    parser.add_argument("--peer-device", default="", help="the peer's (default: the head's)")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4, help="rounds at most")
    parser.add_argument("--tests", default="T1,T2,T3")
    parser.add_argument("--scale", type=float, default=1.0, help="of all token counts, for a trial on a small machine")
    parser.add_argument("--budget", type=float, default=510.0, help="seconds allowed")
    parser.add_argument("--pipeline", action="store_true", help="the heads with llama.cpp's pipeline parallelism")
    parser.add_argument("--concurrent", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--server-plain", action=argparse.BooleanOptionalAction, default=False, help="llama-server without MTP"
    )
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}")
    bench = Bench(options)
    bench.report["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    bench.report["command"] = "bash build/gpu_bench.sh " + " ".join(sys.argv[1:])
    bench.report["options"] = {
        key: value for key, value in vars(options).items() if key not in ("out", "models", "model")
    }
    bench.report["versions"] = versions()
    for part in options.parts:
        bench.part = part
        with bench.guarded(part):
            PARTS[part](bench)
    bench.report["goals"] = goals(bench.report)
    bench.report["seconds"] = round(options.budget - bench.left(), 1)
    bench.save()
    print(table(bench.report), flush=True)
    print(bench.file, flush=True)
    return 1 if any(bench.report["failed"].get(part) for part in options.parts) else 0


PARTS = {"speed": speed, "loads": loads, "checks": checks}

if __name__ == "__main__":
    sys.exit(main())
