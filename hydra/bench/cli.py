"""The commands of `hydra bench`: options in, tables on stdout, progress on stderr, one JSON object last with `--json`.

Holds no measurement; each is imported when it runs. `mtp`, `server` and `soak` stand in modules of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra.bench import linkbench
from hydra.bench.options import HALF_OF_THE_CORES, Threads
from hydra.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure side by side: stock peer, our peer, link, MTP, llama-server.",
)

_RESIDENT_BYTES = 2 << 30  # three copies of a larger model may not fit
_NAGLE_SHAPE = "toy-llama"  # small, so that a step is all network

# Processes that a benchmark starts of itself from the single file; from a checkout they are run as modules.
_WORKERS = ("explain", "stock", "sink", "relay", "run_head", "engine_head", "linkhead")

ModelFile = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="FILE", help="GGUF to measure with (else one that is at hand).")
]
Synthetic = Annotated[
    str, typer.Option("--synthetic", metavar="SHAPE", help="Make a model of this shape and use it, such as 27b.")
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="The peer's ggml device: CPU, CUDA0.")]
HeadDevice = Annotated[
    str, typer.Option("--head-device", metavar="NAME", help="The head's ggml device (else as --device).")
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Tokens to decode in each run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Report as one JSON object, the last line of stdout.")]


def model_path(model: Path | None, synthetic: str) -> Path:
    """The GGUF that the options mean. Raises: ConfigError, ModelError."""
    if model is not None and synthetic:
        raise ConfigError("--model and --synthetic were both given.", "Give one of them.")
    if model is not None:
        if not model.is_file():
            raise ConfigError(f"There is no file {model}.", "Give the path of a GGUF file.")
        return model.resolve()
    if synthetic:
        from hydra.bench import synthetic as maker

        return maker.model(synthetic, confirm=_confirm)
    from hydra.embedded import embedded_model

    embedded = embedded_model()
    if embedded.notice:
        from hydra import console

        console.note(embedded.notice)
    return embedded.path


def _confirm(path: str, size_bytes: int) -> bool:
    if not sys.stdin.isatty():
        return False
    return typer.confirm(f"{path} takes {size_bytes / 1e9:.1f} GB. Make it?", err=True)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context, synthetic: Synthetic = "") -> None:
    """With a shape and no command: that model is made, and MTP measured with it."""
    if not synthetic:
        return
    if context.invoked_subcommand is not None:
        raise ConfigError(f"--synthetic stands before {context.invoked_subcommand}.",
                          f"Write: hydra bench {context.invoked_subcommand} --synthetic {synthetic}")
    from hydra.bench import mtp

    mtp.command(synthetic=synthetic)


@app.command("peer")
def peer_command(
    model: ModelFile = None,
    synthetic: Synthetic = "",
    pairs: Annotated[int, typer.Option("--pairs", metavar="N", min=1, help="Pairs of runs, stock and ours.")] = 5,
    link: Annotated[
        str, typer.Option("--link", metavar="RATE,DELAY", help="Shape the network between them, such as 1gbit,0.2ms.")
    ] = "",
    device: Device = "CPU",
    head_device: HeadDevice = "",
    threads: Threads = HALF_OF_THE_CORES,
    tokens: Tokens = 64,
    prompts: Annotated[str, typer.Option("--prompts", metavar="N,N", help="Prompt lengths for prefill.")] = "512,2048",
    verify: Annotated[int, typer.Option("--verify", metavar="N", min=0, help="Verify steps of 4 tokens each.")] = 32,
    layers: Annotated[int, typer.Option("--layers", metavar="N", help="Layers on the peer (-1: all).")] = -1,
    cache_type: Annotated[
        str, typer.Option("--cache-type", metavar="T", help="Type of the KV cache: f16, q8_0.")
    ] = "f16",
    pipeline: Annotated[bool, typer.Option("--pipeline", help="With llama.cpp's pipeline parallelism.")] = False,
    loads: Annotated[bool, typer.Option("--loads/--no-loads", help="Time cold and warm loads too.")] = True,
    resident: Annotated[
        bool | None,
        typer.Option(
            "--resident/--apart", help="All heads loaded at once, or each run by itself (else by the model's size)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare hydra's peer with the stock C++ one: decode, prefill, verify, load, memory, CPU."""
    from hydra import console
    from hydra.bench import sidebyside
    from hydra.bench.link import parse_link

    lengths = tuple(_number(part) for part in prompts.split(",") if part.strip())
    chosen = model_path(model, synthetic)
    plan = sidebyside.Plan(
        chosen,
        pairs=pairs,
        device=device,
        threads=threads,
        head_devices=(head_device,) if head_device else (device,) if device != "CPU" else (),
        link=parse_link(link) if link else None,
        prompts=lengths,
        decode_tokens=tokens,
        verify_steps=verify,
        peer_layers=layers,
        ctx_size=max(4096, *(length + 64 for length in lengths), tokens + 4 * verify + 256),
        cache_type=cache_type,
        pipeline=pipeline,
        loads=loads,
        resident=chosen.stat().st_size < _RESIDENT_BYTES if resident is None else resident,
    )
    outcome = sidebyside.run(plan, console.note)
    console.table(
        ("figure", "stock", "hydra", "ratio", "min … max"),
        [ratio.row() for name, ratio in outcome.ratios.items() if name != "prefill"],
    )
    _bounds(outcome.figures, console)
    console.result(f"network: {outcome.setting['link']}")
    for remark in outcome.remarks:
        console.result(f"note: {remark}")
    if as_json:
        console.result_json(outcome.to_dict())


def _bounds(figures: dict[str, float | None], console: Any) -> None:
    """The table of single figures; what was not measured is left out."""
    mib = 1 << 20
    rows = []
    for key, name, unit in (
        ("ceiling_decode_tps", "no peer (ceiling), decode", "tok/s"),
        ("floor_load_s", "sink (floor), cold load", "s"),
        ("floor_warm_load_s", "sink (floor), warm load", "s"),
    ):
        if figures.get(key):
            rows.append([name, f"{figures[key]:.2f} {unit}"])
    for prefix, name in (("peer", "hydra"), ("stock_peer", "stock")):
        sizes = [(figures.get(f"{prefix}_rss_{part}_bytes") or 0.0) / mib for part in ("idle", "peak", "loaded")]
        if all(sizes):
            rows.append([f"memory of the {name} peer", "idle {:.0f} MiB, peak {:.0f}, loaded {:.0f}".format(*sizes)])
    console.table(("beside it", ""), rows)


@app.command("nagle")
def nagle_command(
    model: ModelFile = None,
    synthetic: Synthetic = "",
    device: Device = "CPU",
    threads: Threads = HALF_OF_THE_CORES,
    tokens: Tokens = 100,
    as_json: AsJson = False,
) -> None:
    """Show what decode loses when the accepted socket has no TCP_NODELAY (nobody can configure that)."""
    from hydra import console
    from hydra.bench import nagle
    from hydra.bench.pairs import Setting

    chosen = model_path(model, synthetic or ("" if model else _NAGLE_SHAPE))
    figures = nagle.run(chosen, Setting(device, threads), tokens, console.note)
    console.table(
        ("peer", "with TCP_NODELAY", "without", "factor", "sockets"),
        [
            [
                kind,
                f"{f.with_tps:.2f} tok/s ({f.with_step_ms:.1f} ms)",
                f"{f.without_tps:.2f} tok/s ({f.without_step_ms:.1f} ms)",
                f"{f.factor:.2f}",
                f.sockets,
            ]
            for kind, f in figures.items()
        ],
    )
    console.result("hydra's replies leave in one segment, so that Nagle has nothing to hold back even then.")
    if as_json:
        console.result_json({kind: f.to_dict() for kind, f in figures.items()})


@app.command("wire")
def wire_command(
    model: ModelFile = None,
    synthetic: Synthetic = "",
    device: Device = "CPU",
    threads: Threads = HALF_OF_THE_CORES,
    tokens: Tokens = 64,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=0, help="Prompt tokens before the decode.")] = 512,
    own: Annotated[bool, typer.Option("--own/--no-own", help="Time the peer's own part of a message too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show where a token's time goes in hydra's peer: count, bytes and time of every command."""
    from hydra import console
    from hydra.bench import graphcost, wire
    from hydra.bench.pairs import Setting

    figures = wire.run(model_path(model, synthetic), Setting(device, threads), tokens, prompt, console.note)
    console.table(wire.COLUMNS, figures.rows())
    console.result(f"decode: {figures.decode_tps:.2f} tok/s")
    report = figures.to_dict()
    if own:
        console.note("timing the peer's own part, on graphs that cost next to nothing")
        costs = graphcost.run()
        console.table(graphcost.COLUMNS, costs.rows())
        report["own"] = costs.to_dict()
    if as_json:
        console.result_json(report)


@app.command("device")
def device_command(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="ggml device: CPU, CUDA0; auto.")] = "auto",
    mib: Annotated[int, typer.Option("--mib", metavar="N", min=16, help="Size of the matrix that is read.")] = 512,
    kind: Annotated[str, typer.Option("--type", metavar="T", help="Its type: q8_0, q4_K, f16 …")] = "q8_0",
    threads: Annotated[int, typer.Option("--threads", "-t", metavar="N", min=0, help="CPU threads; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a device's memory bandwidth in decode and the cost of an operation, for `hydra plan`."""
    from hydra import console
    from hydra.bench import device as bench
    from hydra.plan.gguf import BY_NAME

    if kind not in BY_NAME:
        raise ConfigError(f"--type {kind} is not known.", f"Types: {', '.join(BY_NAME)}.")
    found = bench.measure(device, mib=mib, kind=kind, threads=threads)
    if as_json:
        console.result_json({**found.to_dict(), "toml": found.toml})
        return
    sheet = f", {found.bandwidth_bytes_s / found.sheet_bytes_s:.0%} of its data sheet" if found.sheet_bytes_s else ""
    console.result(f"{found.device} ({found.description}): {found.bandwidth_bytes_s / 1e9:.1f} GB/s reading "
                   f"{found.matrix_bytes / 2**20:.0f} MiB of {found.matrix_type}{sheet}")
    console.result(f"one operation costs {found.op_s * 1e6:.2f} µs")
    console.result(f"for the node's table in hydra.toml: {found.toml}")


@app.command("explain")
def explain_command(
    model: ModelFile = None,
    synthetic: Synthetic = "",
    peer: Annotated[
        str, typer.Option("--peer", metavar="HOST:PORT", help="A running peer; else one is started on loopback.")
    ] = "",
    layers: Annotated[int, typer.Option("--layers", metavar="N", help="Layers on the peer (-1: half of them).")] = -1,
    device: Device = "CPU",
    head_device: HeadDevice = "",
    threads: Threads = HALF_OF_THE_CORES,
    tokens: Tokens = 64,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", metavar="N", help="Context in tokens.")] = 4096,
    cache_type: Annotated[
        str, typer.Option("--cache-type", metavar="T", help="Type of the KV cache: f16, q8_0.")
    ] = "f16",
    as_json: AsJson = False,
) -> None:
    """Why is it slow? Split a token's time into head, peer, wire and Python, each beside its limit."""
    from hydra import console
    from hydra.bench import explain

    chosen = model_path(model, synthetic)
    head = head_device or device
    work = explain.Work(str(chosen), peer, explain.default_layers(chosen) if layers < 0 else layers,
                        (head,) if head != "CPU" else (), threads, tokens, ctx_size, cache_type)
    found = explain.run(work, peer_device=device, report=console.note)
    if as_json:
        console.result_json(found.to_dict())
        return
    console.result(f"{found.tokens_per_s:.2f} tok/s: {found.step_s * 1e3:.2f} ms a token ("
                   + ", ".join(f"{count} layers on {name}" for name, count in found.layers.items()) + ")")
    console.table(("PART", "MS", "SHARE", "LIMIT", ""), [
        (part.name, f"{part.seconds * 1e3:.3f}", f"{part.seconds / found.step_s:.0%}",
         f"{part.limit_s * 1e3:.3f}" if part.limit_s else "-", part.limit) for part in found.parts])
    if not found.peer_clocks and work.peer:
        console.result("That peer keeps no clocks: the head is taken to be at its limit, the peer to have the rest.")
    console.result(found.verdict)


@app.command("worker", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def worker_command(context: typer.Context, name: str) -> None:
    """A process of a benchmark, started by it from the single-file program."""
    if name not in _WORKERS:
        raise ConfigError(f"There is no benchmark process {name!r}.", "Use `hydra bench --help`.")
    code = importlib.import_module(f"hydra.bench.{name}").main(context.args)
    if code:
        raise typer.Exit(code)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no number of tokens.", "Write --prompts like 512,2048.") from None


def _register(name: str) -> None:
    """Take in a benchmark that brings its own command, where its module is part of this build."""
    if importlib.util.find_spec(f"hydra.bench.{name}") is not None:
        module = importlib.import_module(f"hydra.bench.{name}")
        app.command(name)(module.command)


for _name in ("mtp", "server", "soak"):
    _register(_name)
app.command("link")(linkbench.command)
