"""Each fault of docs/reliability.md against hydra and against the stock pair, with three answers open: what is left?

The stock pair is llama-server with ggml-rpc-server of the same llama.cpp (build/stock-server.sh makes them; their
folder is given). Same model, same split, same requests, same fault. Run as `python -m hydra.bench.survive [FOLDER]`: a
table on stdout. Not part of `hydra bench`: it needs the stock programs, and what it finds changes only with a release
of either.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import console
from hydra.bench import soak, synthetic
from hydra.bench.process import Child, free_port, process_tree, worker_command
from hydra.errors import HydraError

STARTS = "aA0"
TOKENS = 400
FAULT_AFTER = 60
WAIT_S = 60.0


class Stock:
    """llama-server and ggml-rpc-server, with the relay between; nothing starts them again when they die."""

    def __init__(self, programs: Path, model: Path) -> None:
        self.programs = programs
        self.peer_port, self.relay_port, self.api_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        self.children: list[Child] = []
        self.peer = self.start_peer()
        relay = ["--listen", f"127.0.0.1:{self.relay_port}", "--forward", f"127.0.0.1:{self.peer_port}", "--delay", "0"]
        self.relay = self._start(worker_command("relay", relay))
        self.relay.wait_listening(self.relay_port)
        arguments = [
            "-m",
            str(model),
            "--rpc",
            f"127.0.0.1:{self.relay_port}",
            "-ngl",
            "99",
            "-c",
            "4096",
            "-np",
            "3",
            "-t",
            "1",
            "--port",
            str(self.api_port),
            "--no-warmup",
            "--no-webui",
            "-fit",
            "off",
        ]
        self.head = self._start([str(programs / "llama-server"), *arguments])

    def start_peer(self) -> Child:
        peer = self._start([str(self.programs / "ggml-rpc-server"), "-p", str(self.peer_port), "-t", "1"])
        peer.wait_listening(self.peer_port)
        return peer

    def _start(self, command: list[str]) -> Child:
        child = Child(command, env={"GGML_NO_BACKTRACE": "1"})
        self.children.append(child)
        return child

    def wait_ready(self, timeout_s: float) -> float:
        import httpx

        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200:
                    return time.monotonic() - begin
            if self.head.process.poll() is not None:
                break
            time.sleep(0.1)
        raise HydraError("llama-server is not ready.", self.head.log_tail())

    def close(self) -> None:
        for child in reversed(self.children):
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGCONT)
            child.close()


def _stock_kill_peer(rig: Stock) -> None:
    rig.peer.process.kill()
    rig.peer.process.wait()
    time.sleep(0.5)
    rig.peer = rig.start_peer()


def _stock_kill_head(rig: Stock) -> None:
    rig.head.process.kill()


STOCK_FAULTS: dict[str, Callable[[Any], None]] = {
    # The stock server is one process: worker and peer are the same thing, and so are engine and head.
    "worker killed": _stock_kill_peer,
    "peer killed": _stock_kill_peer,
    "engine killed": _stock_kill_head,
    "peer stopped, long": lambda rig: soak._hold(process_tree(rig.peer.pid), soak.LONG_S),
    "cable cut, long": lambda rig: soak._hold([rig.relay.pid], 20.0),
}
HYDRA_FAULTS = {
    **{name: soak.FAULTS[name] for name in STOCK_FAULTS},
    "cable cut, long": STOCK_FAULTS["cable cut, long"],
}


@dataclasses.dataclass
class Answer:
    tokens: list[int] = dataclasses.field(default_factory=list)
    end: str = "no end within the time"
    pause_s: float = 0.0


def _ask(url: str, first: str, answer: Answer) -> None:
    """One streamed answer; llama-server's own route where there is one, as its OpenAI route has no token ids."""
    import httpx

    body = {
        "prompt": first,
        "n_predict": TOKENS,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "return_tokens": True,
        "ignore_eos": True,
    }
    last = time.monotonic()
    try:
        with httpx.stream("POST", url, json=body, timeout=WAIT_S * 2, trust_env=False) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    answer.end = "whole"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.end = "an error in the stream"
                    return
                new = event.get("tokens") or [
                    t for choice in event.get("choices", ()) for t in choice.get("tokens", ())
                ]
                now = time.monotonic()
                if new:
                    answer.pause_s = max(answer.pause_s, now - last if answer.tokens else 0.0)
                    last = now
                answer.tokens += new
                if event.get("stop") is True:
                    answer.end = "whole"
    except httpx.HTTPError as error:
        answer.end = f"connection lost ({type(error).__name__})"


@contextmanager
def _rig(kind: str, programs: Path | None, model: Path) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="hydra-survive-") as folder:
        rig: Any = soak.Rig(Path(folder), model) if kind == "hydra" else Stock(programs or Path(), model)
        try:
            rig.wait_ready(120.0)
            yield rig
        finally:
            rig.close()


def strike(kind: str, programs: Path | None, name: str) -> dict[str, Any]:
    """One fault against one of the two, on fresh processes."""
    model = synthetic.model("toy-llama")
    language = synthetic.language(synthetic.SHAPES["toy-llama"], 0.7)
    with _rig(kind, programs, model) as rig:
        path = "/v1/completions" if kind == "hydra" else "/completion"
        answers = {first: Answer() for first in STARTS}
        threads = [
            threading.Thread(target=_ask, args=(rig.url + path, first, answer), daemon=True)
            for first, answer in answers.items()
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WAIT_S
        while sum(len(a.tokens) for a in answers.values()) < FAULT_AFTER and time.monotonic() < deadline:
            time.sleep(0.005)
        begin = time.monotonic()
        (HYDRA_FAULTS if kind == "hydra" else STOCK_FAULTS)[name](rig)
        for thread in threads:
            thread.join(max(0.1, begin + WAIT_S - time.monotonic()))
        exact = sum(a.tokens == language.say(ord(first), TOKENS) for first, a in answers.items())
        alive = rig.head.process.poll() is None
        again = "no"
        if alive:
            with contextlib.suppress(HydraError):
                rig.wait_ready(20.0)
                late = Answer()
                thread = threading.Thread(target=_ask, args=(rig.url + path, "z", late), daemon=True)
                thread.start()
                thread.join(20.0)
                again = "yes" if late.tokens == language.say(ord("z"), TOKENS) else "no"
        code = rig.head.process.poll()
        return {
            "fault": name,
            "who": kind,
            "exact": exact,
            "ends": sorted({a.end for a in answers.values()}),
            "pause_s": round(max(a.pause_s for a in answers.values()), 1),
            "serves_again": again,
            "head": "alive" if code is None else f"ended ({signal.Signals(-code).name if code < 0 else code})",
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hydra.bench.survive")
    parser.add_argument("programs", nargs="?", help="the folder that build/stock-server.sh printed")
    parser.add_argument("--fault", action="append", choices=list(STOCK_FAULTS))
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith("HYDRA_")]:
        del os.environ[name]
    rows = []
    for name in options.fault or STOCK_FAULTS:
        for kind in ["hydra", *(["stock"] if options.programs else [])]:
            found = strike(kind, Path(options.programs) if options.programs else None, name)
            console.note(json.dumps(found))
            rows.append(
                [
                    name,
                    kind,
                    f"{found['exact']}/{len(STARTS)}",
                    "; ".join(found["ends"]),
                    str(found["pause_s"]),
                    found["head"],
                    found["serves_again"],
                ]
            )
    console.table(["FAULT", "WHO", "EXACT", "HOW THEY ENDED", "PAUSE S", "HEAD", "SERVES AGAIN"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
