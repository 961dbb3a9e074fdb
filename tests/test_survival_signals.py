"""`hydra up` under signals, with an answer open: it ends cleanly, leaves nothing behind, and can be told to read
anew."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hydra.bench import soak, synthetic
from tests.engine_support import toy_language

pytestmark = pytest.mark.timeout(200)
BOUND_S = 30.0


class Stream(threading.Thread):
    """One open answer: its tokens and how it ended."""

    def __init__(self, rig: soak.Rig, n: int) -> None:
        super().__init__(daemon=True)
        self._rig = rig
        self._n = n
        self.tokens: list[int] = []
        self.error: dict[str, Any] = {}
        self.done = False
        self.start()
        deadline = time.monotonic() + BOUND_S
        while len(self.tokens) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def run(self) -> None:
        body = {"prompt": "a", "max_tokens": self._n, "temperature": 0, "stream": True, "return_tokens": True}
        try:
            with httpx.stream("POST", f"{self._rig.url}/v1/completions", json=body, timeout=BOUND_S * 2) as reply:
                for line in reply.iter_lines():
                    self.done = self.done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        self.error = event.get("error", self.error)
                        for choice in event.get("choices", ()):
                            self.tokens += choice.get("tokens", ())
        except httpx.HTTPError as error:
            self.error = {"connection": repr(error)}

    def exact(self) -> bool:
        return self.tokens == toy_language(name="toy-llama").say(97, len(self.tokens))


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[soak.Rig]:
    rig = soak.Rig(tmp_path_factory.mktemp("boxes"), synthetic.model("toy-llama"))
    yield rig
    rig.close()


@pytest.fixture
def rig(boxes: soak.Rig) -> Iterator[soak.Rig]:
    if boxes.head.process.poll() is not None:
        boxes.restart_head()
    if boxes.peer.process.poll() is not None:
        boxes.restart_peer()
    boxes.wait_ready(120)
    yield boxes


def ended(rig: soak.Rig, engine: psutil.Process) -> int:
    """The head's exit code; nothing of it may be left."""
    code = rig.head.process.wait(BOUND_S)
    engine.wait(BOUND_S)
    return code


def engine_of(rig: soak.Rig) -> psutil.Process:
    return psutil.Process(rig.status()["engine_pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_open_answers_finish_first(rig: soak.Rig, number: signal.Signals) -> None:
    engine, stream = engine_of(rig), Stream(rig, 200)
    rig.head.process.send_signal(number)
    assert ended(rig, engine) == 0
    stream.join(BOUND_S)
    assert len(stream.tokens) == 200 and stream.exact() and stream.done and not stream.error


def test_the_second_ends_it_at_once(rig: soak.Rig) -> None:
    engine, stream = engine_of(rig), Stream(rig, 3900)
    rig.head.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    rig.head.process.send_signal(signal.SIGINT)
    assert ended(rig, engine) == 0
    stream.join(BOUND_S)
    assert stream.exact() and len(stream.tokens) < 3900 and stream.error


def test_it_stops_though_the_peer_is_gone(rig: soak.Rig) -> None:
    engine, stream = engine_of(rig), Stream(rig, 3900)
    rig.peer.process.kill()
    rig.peer.process.wait(BOUND_S)
    rig.head.process.send_signal(signal.SIGTERM)
    assert ended(rig, engine) == 0
    stream.join(BOUND_S)
    assert stream.exact() and stream.error
    assert not list(Path.cwd().glob("core*"))


def test_no_engine_without_its_parent(rig: soak.Rig) -> None:
    engine = engine_of(rig)
    rig.head.process.kill()
    assert ended(rig, engine) == -signal.SIGKILL


def test_settings_change_under_the_open_port(rig: soak.Rig) -> None:
    engine, stream = engine_of(rig), Stream(rig, 300)
    file = rig.folder / "head.toml"
    text = file.read_text()
    try:
        file.write_text(text.replace("ctx_size = 4096", "ctx_size = 2048"))
        rig.head.process.send_signal(signal.SIGHUP)
        stream.join(BOUND_S)
        assert len(stream.tokens) == 300 and stream.exact() and not stream.error
        engine.wait(BOUND_S)
        rig.wait_ready(60)
        assert httpx.get(f"{rig.url}/props", timeout=10).json()["default_generation_settings"]["n_ctx"] == 2048
        file.write_text(text.replace("ctx_size", "ctx_syze"))
        rig.head.process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert rig.status()["state"] == "ready" and "ctx_syze" in rig.head.log_tail(20)
    finally:
        file.write_text(text)
