"""`hydra bench link`: what a step sends and how long it takes, to a stock peer, to ours, and through the link.

All the ways are set up at once and take turns of some steps, so that a machine that is busy for a while slows all of
them; each ratio is of turns that were neighbours in time. Bytes and messages are the link's own counts: it sees both
what the stock client says (that is what goes over the network without it) and what it makes of that. Knows nothing of
frames.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra.bench.options import HALF_OF_THE_CORES, Threads
from hydra.errors import ConfigError, HydraError

if TYPE_CHECKING:
    from hydra.bench.link import Link
    from hydra.link.process import LinkProcess

Report = Callable[[str], None]
WIDTHS = {False: 1, True: 4}  # tokens of a step, without and with MTP: drafts of three and the token before them
ACCEPTANCE = 0.7
START_S = 600.0
_HEAD_NAME, _PEER_NAME = "head", "peer"


@dataclass(frozen=True)
class Plan:
    """What is measured. links: "loopback" or "RATE,DELAY". ways beside stock, hydra and link: tls, f16."""

    model: Path
    links: tuple[str, ...] = ("loopback", "1gbit,0.2ms")
    n_kv: tuple[int, ...] = (1024, 8192, 32768, 65536)
    mtp: tuple[bool, ...] = (False, True)
    ways: tuple[str, ...] = ("stock", "hydra", "link")
    turns: int = 5
    steps: int = 6
    device: str = "CPU"
    threads: int = 2


@dataclass(frozen=True)
class Row:
    """One way at one filling. tps: tokens a second (with MTP: at 70 % acceptance of three drafts); step_ms: median.

    bytes and messages: to the peer and from it, a step. ratio_to_stock: above 1 = faster than the stock pair. hop_us:
    what a step takes longer than with the way "hydra": the hop's cost where the link saves nothing. 0 without that way.
    """

    network: str
    way: str
    n_kv: int
    mtp: bool
    bytes_per_step: float
    bytes_to_peer: float
    messages_per_step: float
    step_ms: float
    tps: float
    ratio_to_stock: float
    hop_us: float
    exact: bool
    logit_error: float


def tokens_per_step(mtp: bool) -> float:
    """Expected tokens of one step: 1 + a + a² + a³ with three drafts."""
    return sum(ACCEPTANCE**k for k in range(WIDTHS[mtp]))


class Progress:
    """Rows measured so far, in a file of JSON lines that a later run goes on from. The first line is what was asked."""

    def __init__(self, file: Path | None, plan: Plan) -> None:
        self._file = file
        self.rows: list[Row] = []
        asked = {key: value for key, value in asdict(plan).items() if key not in ("links", "n_kv", "mtp")}
        asked = json.loads(json.dumps({**asked, "model": plan.model.name}))
        if file is None:
            return
        try:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
        except FileNotFoundError:
            file.write_text(json.dumps(asked) + "\n")
            return
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file} cannot be read: {exc}.", "Give --resume a new file.") from None
        if not lines or lines[0] != asked:
            raise ConfigError(f"{file} is of a run with other options.", "Give --resume a new file.")
        self.rows = [Row(**line) for line in lines[1:]]

    def has(self, network: str, n_kv: int, mtp: bool) -> bool:
        return any((row.network, row.n_kv, row.mtp) == (network, n_kv, mtp) for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        if self._file is not None:
            with self._file.open("a") as out:
                out.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def run(plan: Plan, report: Report, file: Path | None = None) -> list[Row]:
    """file: where rows are kept as they are measured; those that it has are not measured again.

    Raises: HydraError when a peer, a link or a head does not come up; ConfigError for a file of another run.
    """
    from hydra.bench.link import Link, parse_link

    progress = Progress(file, plan)
    for network in plan.links:
        wanted = [(n_kv, mtp) for n_kv in plan.n_kv for mtp in plan.mtp if not progress.has(network, n_kv, mtp)]
        if not wanted:
            continue
        with contextlib.ExitStack() as stack:
            shaped = None if network == "loopback" else stack.enter_context(Link(*parse_link(network)))
            report(f"{network}: loading {len(plan.ways)} times{f' ({shaped.description})' if shaped else ''}")
            with shaped.unshaped() if shaped else contextlib.nullcontext():
                heads = {way: stack.enter_context(_head(way, plan, shaped)) for way in plan.ways}
            for n_kv in sorted({n_kv for n_kv, _ in wanted}):
                with shaped.unshaped() if shaped else contextlib.nullcontext():
                    for head in heads.values():
                        head.ask({"fill": n_kv})
                for mtp in (mtp for cells, mtp in wanted if cells == n_kv):
                    report(f"{network}: {n_kv} cells, MTP {'on' if mtp else 'off'}")
                    progress.add(_measure(plan, heads, network, n_kv, mtp))
    return progress.rows


def _measure(plan: Plan, heads: dict[str, _Head], network: str, n_kv: int, mtp: bool) -> list[Row]:
    width = WIDTHS[mtp]
    ways = list(heads)
    # The first steps of a new width or filling build new graphs, at both ends of each way: they are not of the many.
    expected = {way: heads[way].ask({"steps": 5, "width": width}) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    counted = {way: heads[way].counters() for way in ways}
    for turn in range(plan.turns):
        for way in ways if turn % 2 == 0 else reversed(ways):
            answer = heads[way].ask({"steps": plan.steps, "width": width})
            times[way].append(statistics.median(answer["ms"]))
            expected[way]["tokens"] += answer["tokens"]
            expected[way]["logits"] += answer["logits"]
    steps = plan.turns * plan.steps
    per_step = {
        way: {key: (value - counted[way][key]) / steps for key, value in heads[way].counters().items()} for way in ways
    }
    first = ways[0]
    linked = next((way for way in ways if per_step[way]), None)
    rows = []
    for way in ways:
        carried = per_step[way] or (per_step[linked] if linked else {})
        kind = "wire" if per_step[way] else "plain"
        up, down = carried.get(f"{kind}_bytes_up", 0.0), carried.get(f"{kind}_bytes_down", 0.0)
        sends = carried.get("wire_sends" if per_step[way] else "plain_messages", 0.0)
        step_ms = statistics.median(times[way])
        hop = 1e3 * statistics.median(
            own - direct for own, direct in zip(times[way], times.get("hydra", times[way]), strict=True)
        )
        ratios = [base / own for base, own in zip(times[first], times[way], strict=True)]
        error = max(
            abs(a - b)
            for ours, theirs in zip(expected[way]["logits"], expected[first]["logits"], strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        rows.append(
            Row(network, way, n_kv, mtp, round(up + down), round(up), round(sends, 2), round(step_ms, 3),
                round(1e3 / step_ms * tokens_per_step(mtp), 2), round(statistics.median(ratios), 4), round(hop, 1),
                expected[way]["tokens"] == expected[first]["tokens"] and error == 0, error)
        )  # fmt: skip
    return rows


class _Head:
    """A head process, and the link that it goes through where it does."""

    def __init__(self, child: Any, link: LinkProcess | None) -> None:
        self._child = child
        self._link = link
        self._answer()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin = self._child.process.stdin
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as exc:
            raise HydraError(f"The head ended:\n{self._child.log_tail()}") from exc
        return self._answer()

    def counters(self) -> dict[str, int]:
        """What the link has carried so far; empty where there is none."""
        if self._link is None:
            return {}
        return {key: value for key, value in self._link.stats().items() if key.startswith(("plain_", "wire_"))}

    def _answer(self) -> dict[str, Any]:
        limit = threading.Timer(START_S, self._child.process.kill)
        limit.daemon = True
        limit.start()
        try:
            for line in self._child.process.stdout:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if "error" in answer:
                        raise HydraError(f"The head failed: {answer['error']}", answer.get("hint", ""))
                    return answer
        finally:
            limit.cancel()
        raise HydraError(f"The head ended:\n{self._child.log_tail()}")


@contextlib.contextmanager
def _head(way: str, plan: Plan, shaped: Link | None) -> Iterator[_Head]:
    from hydra.bench.linkhead import LinkHeadSpec
    from hydra.bench.process import Child, worker_command

    with contextlib.ExitStack() as stack:
        endpoint, link = _route(way, plan, shaped, stack)
        spec = LinkHeadSpec(str(plan.model), endpoint, max(plan.n_kv), plan.threads)
        netns = shaped.head_netns if shaped else None
        child = Child(worker_command("linkhead", [spec.to_json()]), netns=netns, pipe=True, take_input=True)
        yield _Head(stack.enter_context(child), link)


def _route(way: str, plan: Plan, shaped: Link | None, stack: contextlib.ExitStack) -> tuple[str, LinkProcess | None]:
    """Starts the peer of a way, and its link; what the head connects to."""
    from hydra.bench.stock import StockServer
    from hydra.link.process import start_link
    from hydra.link.settings import LinkSettings
    from hydra.peer.launch import start_peer

    host = shaped.peer_address if shaped else "127.0.0.1"
    netns = shaped.peer_netns if shaped else None
    certificates = ""
    if way == "stock":
        port = stack.enter_context(StockServer(host, device=plan.device, threads=plan.threads, netns=netns)).port
    else:
        if way == "tls":
            from hydra.security import init_certs

            certificates = stack.enter_context(tempfile.TemporaryDirectory())
            init_certs(Path(certificates), [_HEAD_NAME, _PEER_NAME])
        port = stack.enter_context(
            start_peer(
                host, device=plan.device, threads=plan.threads, name=_PEER_NAME, tls_dir=certificates,
                prefix=("ip", "netns", "exec", netns) if netns else (),
                allow=(shaped.head_address, shaped.peer_address) if shaped else (),  # the second: from a relay
            )
        ).port  # fmt: skip
    endpoint = stack.enter_context(shaped.relayed(host, port)) if shaped else f"{host}:{port}"
    if way in ("stock", "hydra"):
        return endpoint, None
    host, _, number = endpoint.rpartition(":")
    settings = LinkSettings(
        _PEER_NAME, host, int(number), node=_HEAD_NAME, tls_dir=certificates,
        activations="f16" if way == "f16" else "f32",
    )  # fmt: skip
    prefix: Sequence[str] = ("ip", "netns", "exec", shaped.head_netns) if shaped else ()
    link = stack.enter_context(start_link(settings, prefix=prefix, quiet=True))
    return link.endpoint, link


def command(
    model: Annotated[
        Path | None, typer.Option("--model", "-m", metavar="FILE", help="GGUF to measure with (else a synthetic one).")
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option("--link", metavar="RATE,DELAY", help="Network: loopback or such as 1gbit,0.2ms. May be repeated."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Loopback, and 100 Mbit/s, 1 and 10 Gbit/s with 0.2 and 1 ms.")
    ] = False,
    n_kv: Annotated[
        str, typer.Option("--n-kv", metavar="N,N", help="Cells of the cache in use.")
    ] = "1024,8192,32768,65536",
    mtp: Annotated[str, typer.Option("--mtp", metavar="WHICH", help="Steps of four tokens: on, off or both.")] = "both",
    ways: Annotated[
        str, typer.Option("--ways", metavar="A,B", help="stock, hydra, link; also tls and f16.")
    ] = "stock,hydra,link",
    turns: Annotated[int, typer.Option("--turns", metavar="N", min=1, help="Turns that each way takes.")] = 5,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps of a turn.")] = 6,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="The peer's ggml device.")] = "CPU",
    threads: Threads = HALF_OF_THE_CORES,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Keep each row in FILE as it is measured, and go on from there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object, last on stdout.")] = False,
) -> None:
    """Compare what a step sends and how long it takes: stock pair, our peer, and through the link."""
    from hydra import console
    from hydra.bench import synthetic

    known = ("stock", "hydra", "link", "tls", "f16")
    chosen = tuple(part.strip() for part in ways.split(","))
    if unknown := [way for way in chosen if way not in known]:
        raise ConfigError(f"--ways has {unknown[0]!r}.", f"There are: {', '.join(known)}.")
    if mtp not in ("on", "off", "both"):
        raise ConfigError(f"--mtp is {mtp!r}.", "Write on, off or both.")
    if model is not None and not model.is_file():
        raise ConfigError(f"There is no file {model}.", "Give the path of a GGUF file.")
    try:
        cells = tuple(sorted(int(part) for part in n_kv.split(",")))
    except ValueError:
        raise ConfigError(f"--n-kv is {n_kv!r}.", "Write numbers like 1024,65536.") from None
    everything = tuple(f"{rate},{delay}" for rate in ("100mbit", "1gbit", "10gbit") for delay in ("0.2ms", "1ms"))
    networks = ("loopback", *everything) if full else tuple(links or ("loopback", "1gbit,0.2ms"))
    plan = Plan(
        model.resolve() if model else synthetic.model("link"),
        networks, cells, {"on": (True,), "off": (False,), "both": (False, True)}[mtp], chosen, turns, steps, device,
        threads,
    )  # fmt: skip
    rows = run(plan, console.note, resume)
    console.table(
        ("network", "way", "n_kv", "MTP", "bytes/step", "messages", "ms/step", "tok/s", "to stock", "hop", "exact"),
        [
            (r.network, r.way, r.n_kv, "on" if r.mtp else "off", f"{r.bytes_per_step:,.0f}", f"{r.messages_per_step:g}",
             f"{r.step_ms:.2f}", f"{r.tps:.1f}", f"{r.ratio_to_stock:.3f}", f"{r.hop_us:+.0f} µs",
             "yes" if r.exact else f"logits ±{r.logit_error:.2g}")
            for r in rows
        ],
    )  # fmt: skip
    if as_json:
        console.result_json({"rows": [asdict(row) for row in rows]})
