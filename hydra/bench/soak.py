"""`hydra bench soak`: random load and random faults for some minutes, every answer checked against what it had to be.

A peer, a relay in place of the cable and a head, all real processes of this program (`hydra up`), with a toy model
whose answers are known in advance: a token that was lost, doubled or computed from a wrong state is seen at once,
without a second run to compare with. Clients ask, some hang up, one fault after the other strikes; in the end nothing
may be wrong, nobody may wait, and nothing may be left open. Knows the HTTP API and processes; nothing of engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra.bench.process import Child, free_port, memory_of, process_tree, start_hydra, worker_command
from hydra.errors import EngineError, HydraError

START_S = 180.0
RECOVER_S = 120.0
ANSWER_S = 180.0
# Longer than the head's patience with a silent peer (three seconds until it looks, then silence_s), and shorter.
SILENCE_S = 2.0
LONG_S, SHORT_S = 9.0, 0.8

_TOML = """\
[model]
path = {model}
ctx_size = 4096
batch_size = 64
ubatch_size = 32
parallel = 3
threads = 1
use_extra_bufts = false
[head]
api_port = {api_port}
queue_max = 4
step_deadline_s = 30.0
restart_limit = 1000000
[link]
silence_s = {silence_s}
[[nodes]]
name = "head"
role = "head"
host = "127.0.0.1"
layers = 2
device = "CPU"
[[nodes]]
name = "peer"
role = "peer"
host = "127.0.0.1"
port = {peer_port}
layers = 2
device = "CPU"
threads = 1
"""


class Rig:
    """Peer, relay and head as processes. The head reaches the peer through the relay, so that the cable can be cut."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.peer_port, self.relay_port, self.api_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.api_port}"
        # A path as TOML is a JSON string.
        settings = {"model": json.dumps(str(model)), "api_port": self.api_port, "silence_s": SILENCE_S}
        (folder / "peer.toml").write_text(_TOML.format(peer_port=self.peer_port, **settings))
        (folder / "head.toml").write_text(_TOML.format(peer_port=self.relay_port, **settings))
        self._children: list[Child] = []
        self.peer = self._up("peer")
        relay = ["--listen", f"127.0.0.1:{self.relay_port}", "--forward", f"127.0.0.1:{self.peer_port}", "--delay", "0"]
        self.relay = self._kept(Child(worker_command("relay", relay)))
        self.head = self._up("head")

    def _up(self, node: str) -> Child:
        return self._kept(start_hydra(["up", "--config", str(self.folder / f"{node}.toml"), "--node", node]))

    def _kept(self, child: Child) -> Child:
        self._children.append(child)
        return child

    def restart_peer(self) -> None:
        self.peer = self._up("peer")

    def restart_head(self) -> None:
        self.head = self._up("head")

    def status(self) -> dict[str, Any]:
        """The head's own account. Raises: EngineError when it does not answer: its port must never be closed."""
        import httpx

        try:
            return dict(httpx.get(f"{self.url}/hydra/status", timeout=10, trust_env=False).json())
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(f"The head does not answer ({error!r}).", self.head.log_tail()) from error

    def peer_health(self) -> dict[str, Any]:
        import httpx

        try:
            url = f"http://127.0.0.1:{self.peer_port}/health"
            return dict(httpx.get(url, timeout=5, trust_env=False).json())
        except (httpx.HTTPError, ValueError):
            return {}

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds until the head is ready. Raises: EngineError with its log when it is not in time."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            with contextlib.suppress(EngineError):
                if self.status()["state"] == "ready":
                    return time.monotonic() - begin
            if self.head.process.poll() is not None:
                break
            time.sleep(0.05)
        raise EngineError(f"The head was not ready within {timeout_s:g} s.", self.head.log_tail())

    def close(self) -> None:
        for child in reversed(self._children):
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGCONT)
            child.close()


def _signal(pid: int | None, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_worker(rig: Rig) -> None:
    _signal(rig.peer_health().get("worker_pid"), signal.SIGKILL)


def _kill_peer(rig: Rig) -> None:
    rig.peer.process.kill()
    rig.peer.process.wait()
    time.sleep(0.5)
    rig.restart_peer()


def _kill_engine(rig: Rig) -> None:
    _signal(rig.status().get("engine_pid"), signal.SIGKILL)


def _hold(pids: list[int], seconds: float) -> None:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def _stop_peer(rig: Rig) -> None:
    _hold(process_tree(rig.peer.pid), LONG_S)


def _stop_peer_briefly(rig: Rig) -> None:
    _hold(process_tree(rig.peer.pid), SHORT_S)


def _cut_cable(rig: Rig) -> None:
    _hold([rig.relay.pid], LONG_S)


def _cut_cable_briefly(rig: Rig) -> None:
    _hold([rig.relay.pid], SHORT_S)


def _stop_engine(rig: Rig) -> None:
    # Never continued: the head has to notice by itself that it is silent.
    _signal(rig.status().get("engine_pid"), signal.SIGSTOP)
    time.sleep(12.0)


def _reload(rig: Rig) -> None:
    rig.head.process.send_signal(signal.SIGHUP)


FAULTS: dict[str, Callable[[Rig], None]] = {
    "worker killed": _kill_worker,
    "peer killed": _kill_peer,
    "engine killed": _kill_engine,
    "engine stopped": _stop_engine,
    "peer stopped, long": _stop_peer,
    "peer stopped, briefly": _stop_peer_briefly,
    "cable cut, long": _cut_cable,
    "cable cut, briefly": _cut_cable_briefly,
    "settings reloaded": _reload,
}


@dataclass
class Account:
    """What happened, for all threads; `wrong` has the first differences in words."""

    answers: int = 0
    tokens: int = 0
    hung_up: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    faults: dict[str, list[float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_rows(self) -> list[list[str]]:
        return [
            [name, str(len(times)), f"{statistics.median(times):.1f}", f"{max(times):.1f}"]
            for name, times in self.faults.items()
            if times
        ]


class Client(threading.Thread):
    """One caller after the other: random beginnings, lengths, greedy and seeded, some that hang up."""

    def __init__(
        self, url: str, say: Callable[[int, int], list[int]], account: Account, stop: threading.Event, seed: int
    ) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._say = say
        self._account = account
        self._stopped = stop
        self._random = random.Random(seed)

    def run(self) -> None:
        import httpx

        timeout = httpx.Timeout(ANSWER_S, connect=10.0)
        with httpx.Client(base_url=self._url, timeout=timeout, trust_env=False) as http:
            while not self._stopped.is_set():
                try:
                    self._ask(http)
                except (httpx.HTTPError, ValueError) as error:
                    self._wrong(f"the connection ended: {error!r}")

    def _ask(self, http: Any) -> None:
        chance = self._random
        first, count = chance.randrange(33, 127), chance.randrange(10, 250)
        body: dict[str, Any] = {"prompt": chr(first), "max_tokens": count, "return_tokens": True, "stream": True}
        body |= {"temperature": 0} if chance.random() < 0.5 else {"temperature": 0.8, "seed": chance.randrange(1 << 31)}
        leave_after = chance.randrange(1, count) if chance.random() < 0.1 else None
        tokens: list[int] = []
        last = time.monotonic()
        with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                self._refusal(reply.status_code, reply.json().get("error", {}))
                return
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._refusal(0, event["error"])
                    return
                new = [token for choice in event["choices"] for token in choice.get("tokens", ())]
                now = time.monotonic()
                if new and tokens and now - last > 0.5:
                    with self._account.lock:
                        self._account.pauses.append(now - last)
                last = now
                tokens += new
                if leave_after is not None and len(tokens) >= leave_after:
                    break
        self._check(first, tokens, count, leave_after is not None)

    def _check(self, first: int, tokens: list[int], count: int, left: bool) -> None:
        wanted = self._say(first, count)
        if left:
            wanted = wanted[: len(tokens)]
        if tokens != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), count)
            )
            self._wrong(f"{len(tokens)} of {count} tokens after {chr(first)!r}, different from token {at + 1} on")
            return
        with self._account.lock:
            self._account.answers += 1
            self._account.tokens += len(tokens)
            self._account.hung_up += left

    def _refusal(self, status: int, error: dict[str, Any]) -> None:
        """A full queue is an honest answer; anything else is not."""
        if error.get("code") == "overloaded":
            with self._account.lock:
                self._account.refused["queue full"] += 1
            self._stopped.wait(0.2)
        else:
            self._wrong(f"refused ({status}): {error.get('message')}")

    def _wrong(self, words: str) -> None:
        with self._account.lock:
            self._account.wrong.append(words)
        self._stopped.wait(0.5)


@dataclass(frozen=True)
class Outcome:
    """The end of a soak. `ok`: nothing wrong, nothing left open."""

    seconds: float
    account: Account
    restarts: int
    resumed: int
    left_open: int
    rss_begin_bytes: int
    rss_end_bytes: int
    seed: int

    @property
    def ok(self) -> bool:
        return not self.account.wrong and not self.left_open and self.account.answers > 0

    def to_dict(self) -> dict[str, Any]:
        account = self.account
        faults = {
            name: {
                "count": len(times),
                "recovery_s_median": round(statistics.median(times), 2),
                "recovery_s_max": round(max(times), 2),
            }
            for name, times in account.faults.items()
            if times
        }
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "answers": account.answers,
            "tokens": account.tokens,
            "hung_up": account.hung_up,
            "refused": dict(account.refused),
            "wrong": account.wrong[:20],
            "faults": faults,
            "restarts": self.restarts,
            "resumed": self.resumed,
            "left_open": self.left_open,
            "pause_s_max": round(max(account.pauses, default=0.0), 2),
            "rss_begin_bytes": self.rss_begin_bytes,
            "rss_end_bytes": self.rss_end_bytes,
            "seed": self.seed,
        }


def soak(
    minutes: float,
    *,
    streams: int = 4,
    seed: int = 1,
    mtp: bool = True,
    quiet_s: float = 1.5,
    report: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run it. streams: clients at once. quiet_s: mean time between a recovery and the next fault.

    Raises: EngineError when the head does not come up, does not come back, or its port is closed.
    """
    from hydra.bench import synthetic

    shape = "toy" if mtp else "toy-llama"
    model, language = synthetic.model(shape), synthetic.language(synthetic.SHAPES[shape], 0.7)
    chance, account, stop = random.Random(seed), Account(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="hydra-soak-") as folder:
        rig = Rig(Path(folder), model)
        try:
            report(f"ready after {rig.wait_ready(START_S):.1f} s; seed {seed}")
            rss_begin = memory_of([rig.head.pid]).rss_bytes
            clients = [Client(rig.url, language.say, account, stop, seed * 1000 + n) for n in range(streams)]
            for client in clients:
                client.start()
            begin = time.monotonic()
            # Every fault once before chance takes over, so that a short soak has seen them all.
            order = chance.sample(list(FAULTS), len(FAULTS))
            while time.monotonic() - begin < minutes * 60 and len(account.wrong) < 20:
                time.sleep(chance.uniform(0.5, 1.5) * quiet_s)
                _strike(rig, order.pop() if order else chance.choice(list(FAULTS)), account, report)
            seconds = time.monotonic() - begin
            stop.set()
            for client in clients:
                client.join(ANSWER_S)
            rig.wait_ready(RECOVER_S)
            status = _settled(rig)
            rss_end = memory_of([rig.head.pid]).rss_bytes
            return Outcome(
                seconds,
                account,
                status["restarts"],
                status["totals"]["resumed_streams"],
                len(status["requests"]) + sum(client.is_alive() for client in clients),
                rss_begin,
                rss_end,
                seed,
            )
        finally:
            rig.close()


def _strike(rig: Rig, name: str, account: Account, report: Callable[[str], None]) -> None:
    before = rig.status()["restarts"]
    begin = time.monotonic()
    FAULTS[name](rig)
    # A fault is not always seen at once: give it the time to show before its end is waited for.
    time.sleep(0.3)
    rig.wait_ready(RECOVER_S)
    took = time.monotonic() - begin
    account.faults.setdefault(name, []).append(took)
    restarts = rig.status()["restarts"] - before
    report(
        f"{name}: ready again after {took:.1f} s, {restarts} restart{'s' if restarts != 1 else ''}; "
        f"{account.answers} answers, {account.tokens} tokens so far, {len(account.wrong)} wrong"
    )


def _settled(rig: Rig) -> dict[str, Any]:
    """The status once those who hung up are off the engine, which takes a step."""
    for _ in range(50):
        status = rig.status()
        if not status["requests"]:
            break
        time.sleep(0.1)
    return status


def command(
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", min=0.1, help="How long.")] = 10.0,
    streams: Annotated[int, typer.Option("--streams", metavar="N", min=1, help="Callers at once.")] = 4,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of load and faults; 0 = a new one.")] = 1,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="A toy model with an MTP block, or a plain one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, the last line of stdout.")] = False,
) -> None:
    """Random load and random faults; every answer is checked token by token."""
    from hydra import console

    seed = seed or random.SystemRandom().randrange(1, 1 << 31)
    outcome = soak(minutes, streams=streams, seed=seed, mtp=mtp, report=console.note)
    console.table(["FAULT", "TIMES", "MEDIAN S", "WORST S"], outcome.account.fault_rows())
    account = outcome.account
    console.result(
        f"{account.answers} answers, {account.tokens} tokens, {account.hung_up} hung up, "
        f"{sum(account.refused.values())} turned away from a full queue"
    )
    console.result(
        f"{outcome.restarts} engine restarts, {outcome.resumed} answers continued, longest pause "
        f"{max(account.pauses, default=0.0):.1f} s"
    )
    for words in account.wrong[:20]:
        console.result(f"WRONG: {words}")
    console.result("nothing lost, doubled or left open" if outcome.ok else "FAILED")
    if as_json:
        console.result_json(outcome.to_dict())
    if not outcome.ok:
        raise HydraError(
            f"The soak found {len(account.wrong)} wrong answers and {outcome.left_open} left open.",
            f"Repeat it with --seed {seed}.",
        )
