"""`hydra demo`: the whole path on one box. A peer and a head as two processes on loopback, the embedded model split
between them, the answer streamed, the wire counted; then the same prompt without a peer: are the tokens the same?

Both boxes are this one and run `hydra up` from a generated hydra.toml, as real boxes would. Knows nothing of how they
do it: what is said here comes from the API and from the peer's own counters.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import console
from ..embedded import embedded_model
from ..errors import EngineError, HydraError, PeerError
from .child import NodeProcess, free_ports

START_S = 180.0
COUNTERS = ("count", "bytes_in", "bytes_out")
PROMPT = "The three most important inventions of the nineteenth century were"

TOML = """\
# Written by `hydra demo`: two boxes that are one.
[model]
path = {path}
ctx_size = {ctx_size}
threads = {threads}
# A CPU that repacks its weights rounds differently from a peer, and the two answers are to be compared.
use_extra_bufts = false

[head]
api_port = {api_port}

[[nodes]]
name = "head"
role = "head"
host = "127.0.0.1"
layers = {head_layers}
device = "{device}"
"""
PEER = """
[[nodes]]
name = "peer"
role = "peer"
host = "127.0.0.1"
port = {peer_port}
layers = {peer_layers}
device = "{device}"
threads = {threads}
"""


@dataclass(frozen=True)
class Answer:
    """One prompt answered. `tokens`: ids, in order. `wire`: what the answer cost, by command as the peer counts it, and
    `load` the same of loading the model; {} without a peer."""

    text: str
    tokens: list[int]
    prefill_tps: float
    decode_tps: float
    layers: dict[str, int]
    wire: dict[str, dict[str, int]]
    load: dict[str, dict[str, int]]


def run(prompt: str, n_tokens: int, peer_layers: int, model: str, device: str, *, as_json: bool) -> int:
    """Returns 0 when the two runs gave the same tokens, else 1."""
    from ..model_file import read_model_file

    if model:
        path = Path(model)
    else:
        embedded = embedded_model()
        path = embedded.path
        if embedded.notice:
            console.note(embedded.notice)
    about = read_model_file(path)
    on_peer = about.n_layer // 2 if peer_layers < 0 else peer_layers
    if on_peer > about.n_layer:
        raise HydraError(f"{about.name} has {about.n_layer} layers, {on_peer} are asked for on the peer.",
                         f"Use --peer-layers 0 to {about.n_layer}.")
    prompt = prompt or PROMPT
    on_head = about.n_layer - on_peer
    console.note(f"{about.name} ({console.bytes_text(about.size_bytes)}, {about.n_layer} layers): {on_peer} on the "
                 f"peer, {on_head} on the head, over loopback.")
    with tempfile.TemporaryDirectory(prefix="hydra-demo-") as folder:
        peer_port, api_port = free_ports(2)
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        values = {"path": json.dumps(str(path.absolute())), "ctx_size": 2048, "threads": threads, "api_port": api_port,
                  "device": device, "peer_port": peer_port, "peer_layers": on_peer}
        split, local = Path(folder) / "hydra.toml", Path(folder) / "local.toml"
        split.write_text(TOML.format(**values, head_layers=on_head) + PEER.format(**values))
        local.write_text(TOML.format(**values, head_layers=about.n_layer))
        with NodeProcess(split, "peer") as peer, NodeProcess(split, "head") as head:
            answer = _ask(head, [peer, head], api_port, prompt, n_tokens, _stream(as_json), peer_port)
        console.note("The same prompt without a peer …")
        with NodeProcess(local, "head") as alone:
            alone_answer = _ask(alone, [alone], api_port, prompt, n_tokens, lambda _: None, None)
    identical = answer.tokens == alone_answer.tokens
    report(answer, alone_answer, identical)
    if as_json:
        console.result_json({"text": answer.text, "tokens": answer.tokens, "identical_to_local": identical,
                             "prefill_tps": answer.prefill_tps, "decode_tps": answer.decode_tps,
                             "layers": answer.layers,
                             "wire": {**wire_totals(answer.wire), "commands": answer.wire,
                                      "load": wire_totals(answer.load)},
                             "local": {"prefill_tps": alone_answer.prefill_tps, "decode_tps": alone_answer.decode_tps}})
    return 0 if identical else 1


def _stream(as_json: bool) -> Callable[[str], None]:
    """Where the answer's text goes as it comes: stdout, but with --json stderr, so that stdout is the report alone."""
    return console.write_note if as_json else console.write


def _ask(head: NodeProcess, nodes: list[NodeProcess], api_port: int, prompt: str, n_tokens: int,
         show: Callable[[str], None], peer_port: int | None) -> Answer:
    """Wait until the head serves, ask it, and read the counters of the peer around the answer."""
    import httpx

    with httpx.Client(base_url=f"http://127.0.0.1:{api_port}", timeout=httpx.Timeout(START_S, connect=5.0),
                      trust_env=False) as http:
        _wait_ready(http, nodes)
        before = _counters(peer_port)
        text = ""
        tokens: list[int] = []
        final: dict[str, Any] = {}
        show(prompt)
        request = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                   "return_tokens": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/completions", json=request) as reply:
            if reply.status_code != 200:
                words = reply.read().decode(errors="replace")[:300]
                raise EngineError(f"The head answered {reply.status_code}: {words}.")
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise EngineError(f"The head gave up: {event['error'].get('message')}", "See the log above.")
                for choice in event.get("choices", ()):
                    text += choice.get("text", "")
                    tokens += choice.get("tokens", ())
                    show(choice.get("text", ""))
                final = event.get("timings") or final
        show("\n")
        props = http.get("/props").json()
        after = _counters(peer_port)
    wire = {name: {key: row[key] - before.get(name, {}).get(key, 0) for key in COUNTERS} for name, row in after.items()}
    return Answer(text, tokens, float(final.get("prompt_per_second", 0.0)),
                  float(final.get("predicted_per_second", 0.0)), dict(props.get("layers", {})),
                  {name: row for name, row in wire.items() if row["count"]}, before)


def _wait_ready(http: Any, nodes: list[NodeProcess]) -> None:
    """Until /health says ready, with progress. Raises: HydraError as soon as one of the processes ends."""
    import httpx

    deadline = time.monotonic() + START_S
    with console.Loading(console.note) as loading:
        while time.monotonic() < deadline:
            for node in nodes:
                if not node.running:
                    raise PeerError(f"The {node.node} process ended with code {node.process.returncode}: "
                                    f"{node.last_words()}")
            try:
                reply = http.get("/health", timeout=2.0)
                if reply.status_code == 200:
                    return
                health = reply.json()
                state = str(health.get("stage") or health.get("state") or "loading")
                loading.update("starting" if state == "stopped" else state, node=str(health.get("node") or ""))
            except (httpx.HTTPError, ValueError):
                loading.update("starting")
            time.sleep(0.1)
    raise EngineError(f"The head was not ready after {START_S:.0f} s: {nodes[-1].last_words()}")


def _counters(peer_port: int | None) -> dict[str, dict[str, int]]:
    """The peer's messages and bytes by command so far; {} where there is no peer."""
    import httpx

    if peer_port is None:
        return {}
    reply = httpx.get(f"http://127.0.0.1:{peer_port}/stats", timeout=5.0, trust_env=False)
    return {name: {key: int(row[key]) for key in COUNTERS} for name, row in reply.json()["commands"].items()}


def wire_totals(wire: dict[str, dict[str, int]]) -> dict[str, int]:
    """Sums over the commands."""
    return {"messages": sum(row["count"] for row in wire.values()),
            "bytes_to_peer": sum(row["bytes_in"] for row in wire.values()),
            "bytes_from_peer": sum(row["bytes_out"] for row in wire.values())}


def report(split: Answer, local: Answer, identical: bool) -> None:
    """The table after the answer, on stderr."""
    total = wire_totals(split.wire)
    console.note("")
    console.table(["", "LAYERS", "PREFILL TOK/S", "DECODE TOK/S"], [
        [name, ", ".join(f"{count} on {node}" for node, count in answer.layers.items()), f"{answer.prefill_tps:.1f}",
         f"{answer.decode_tps:.1f}"] for name, answer in (("with a peer", split), ("without", local))], stderr=True)
    console.note("")
    rows = [[name, row["count"], console.bytes_text(row["bytes_in"]), console.bytes_text(row["bytes_out"])]
            for name, row in sorted(split.wire.items(), key=lambda item: -item[1]["count"])]
    for name, sums in (("together", total), ("(loading it)", wire_totals(split.load))):
        rows.append([name, sums["messages"], console.bytes_text(sums["bytes_to_peer"]),
                     console.bytes_text(sums["bytes_from_peer"])])
    console.table(["OVER THE WIRE", "MESSAGES", "TO THE PEER", "FROM IT"], rows, stderr=True)
    console.note("")
    if identical:
        console.note(f"The {len(split.tokens)} greedy tokens are identical with and without the peer.")
    else:
        at = next((i for i, (a, b) in enumerate(zip(split.tokens, local.tokens, strict=False)) if a != b),
                  min(len(split.tokens), len(local.tokens)))
        console.note(f"The greedy tokens DIFFER from token {at + 1} on: that is a fault (`hydra doctor` looks closer).")
