"""The parent's side of a head that stays (engine_head.py), and llama-server driven the same way.

Both answer ``run(engine, prompt, tokens, seed)`` with speeds and tokens, so that a comparison does not care which it
asks. Knows how to start them and what to ask; not what is compared.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hydra.bench.pairs import Peer, PeerScale, Weighed
from hydra.bench.process import Child, free_port, worker_command
from hydra.bench.run_head import HeadSpec
from hydra.errors import HydraError


@dataclass
class Run:
    """One answer: prefill and decode in tokens per second, what was drafted and accepted, and the tokens."""

    prefill_tps: float
    decode_tps: float
    drafted: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)


class StayingProcess:
    """A child that loads, says ``ready``, and answers one line for each line; the peer is weighed during its load.

    Raises: HydraError with the child's own words.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        peer: Peer | None = None,
        netns: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.weighed = Weighed()
        self._scale = PeerScale(peer.pid, self.weighed) if peer else None
        self._child = Child(worker_command(name, arguments), netns=netns, pipe=True, take_input=True)
        try:
            self.ready = self._wait("ready", timeout_s)
        except BaseException:
            self.close()
            raise
        finally:
            if self._scale is not None:
                self._scale.close()

    def ask(self, timeout_s: float = 600.0, **request: Any) -> dict[str, Any]:
        """One request line, one result."""
        stdin = self._child.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise HydraError(f"The head has ended:\n{self._child.log_tail()}") from None
        return self._wait("result", timeout_s)

    def close(self) -> None:
        """Ask it to end, and end it."""
        stdin = self._child.process.stdin
        if stdin is not None and self._child.process.poll() is None:
            with contextlib.suppress(OSError):
                stdin.write(b'{"do": "quit"}\n')
                stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(20)
        self._child.close()

    def _wait(self, what: str, timeout_s: float) -> dict[str, Any]:
        stdout = self._child.process.stdout
        assert stdout is not None
        deadline = threading.Timer(timeout_s, self._child.process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            for line in stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if what in message:
                        return dict(message[what])
                    if "error" in message:
                        raise HydraError(f"The head failed: {message['error']}", message.get("hint", ""))
                    if self._scale is not None and "phase" in message:
                        self._scale.edge(message["phase"], message["edge"])
        finally:
            deadline.cancel()
        self._child.process.wait(10)
        raise HydraError(f"The head ended with status {self._child.process.returncode}:\n{self._child.log_tail()}")


class SpeedHead(StayingProcess):
    """run_head.py that stays: raw prefill, decode and verify in turns."""

    def __init__(self, spec: HeadSpec, peer: Peer | None = None, netns: str | None = None) -> None:
        if peer is not None:
            spec = replace(spec, peer=peer.endpoint)
        super().__init__("run_head", [spec.to_json(), "--stay"], peer, netns)

    def __enter__(self) -> SpeedHead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ResidentHead(StayingProcess):
    """engine_head.py with ``spec`` (an EngineSpec as a dict); ``load_s`` is the weights', as the client saw it."""

    def __init__(self, spec: dict[str, Any], peer: Peer | None = None) -> None:
        super().__init__("engine_head", [json.dumps({"spec": spec})], peer)
        self.load_s = float(self.ready["model_s"])

    def run(self, engine: str, prompt: int, tokens: int, seed: int, alphabet: tuple[int, int] | None = None) -> Run:
        """``prompt`` tokens made from ``seed``, then ``tokens`` greedy ones."""
        result = self.ask(do="run", engine=engine, prompt=prompt, tokens=tokens, seed=seed, alphabet=alphabet)
        return Run(
            float(result["prefill_tps"] or 0.0),
            float(result["decode_tps"] or 0.0),
            int(result["drafted"]),
            int(result["accepted"]),
            result["tokens"],
        )

    def __enter__(self) -> ResidentHead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LlamaServer:
    """llama-server with the same model and split, asked over HTTP.

    ``arguments`` are its own; ``load_s`` is from its start to its first healthy answer. ``wait=False`` returns at
    once; then ``wait_ready`` is for the caller.

    Raises: HydraError when it ends or is not ready in time.
    """

    def __init__(self, program: str, arguments: list[str], *, wait: bool = True) -> None:
        self.port = free_port()
        self._began = time.perf_counter()
        self.load_s = 0.0
        self._child = Child([program, "--host", "127.0.0.1", "--port", str(self.port), *arguments])
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        while time.perf_counter() - self._began < timeout_s:
            if self._child.process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        self.load_s = self.load_s or time.perf_counter() - self._began
                        return
            time.sleep(0.1)
        tail = self._child.log_tail(30)
        self.close()
        raise HydraError(f"llama-server did not become ready:\n{tail}")

    def run(self, engine: str, prompt: int, tokens: int, seed: int, alphabet: tuple[int, int] | None = None) -> Run:
        """As ``ResidentHead.run``; ``engine`` is what it was started as."""
        low, high = alphabet or (32, 127)
        rng = np.random.default_rng(1000 * seed)
        body = {
            "prompt": [int(token) for token in rng.integers(low, high, prompt)],
            "n_predict": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                result = json.load(answer)
        except OSError as error:
            raise HydraError(f"llama-server failed: {error}.\n{self._child.log_tail()}") from error
        timings = result["timings"]
        return Run(
            float(timings["prompt_per_second"]),
            float(timings["predicted_per_second"]),
            int(timings.get("draft_n", 0)),
            int(timings.get("draft_n_accepted", 0)),
            list(result.get("tokens", [])),
        )

    def close(self) -> None:
        self._child.close(timeout_s=10)

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_llama_server() -> Path | None:
    """llama-server on the PATH or beside the libraries, None where there is none."""
    import shutil

    from hydra.ggml.library import library_dir

    found = shutil.which("llama-server")
    if found:
        return Path(found)
    beside = library_dir() / "llama-server"
    return beside if beside.exists() else None
