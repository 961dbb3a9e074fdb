"""The engine process: frames in and out, an engine that answers, and an end that always comes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hydra.head import launch
from tests.engine_support import toy, toy_language, toy_spec

FRAMES_MAX = 3000


@pytest.fixture
def engine() -> Iterator[launch.EngineProcess]:
    process = launch.start()
    process.channel.settimeout(60)
    yield process
    process.close()


def until(engine: launch.EngineProcess, *types: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first frame of one of these types, and what came before it."""
    before: list[dict[str, Any]] = []
    for _ in range(FRAMES_MAX):
        frame = engine.channel.receive()
        assert frame is not None, f"the engine process ended with {engine.process.wait(10)}"
        if frame["type"] in types:
            return frame, before
        before.append(frame)
    raise AssertionError("no such frame came")


def loaded(engine: launch.EngineProcess) -> dict[str, Any]:
    engine.channel.send({"type": "load", "spec": toy_spec(toy(), "mtp", 3, parallel=2).to_dict()})
    frame, before = until(engine, "ready", "failed")
    assert frame["type"] == "ready", frame
    weights = [f for f in before if f["type"] == "progress" and f["stage"] == "weights"]
    assert [(weights[i]["bytes_done"], weights[i]["layers_done"]) for i in (0, -1)] == [
        (0, 0), (weights[-1]["bytes_total"], weights[-1]["layers_total"])]
    assert weights[-1]["bytes_total"] > 10_000_000
    return dict(frame["info"])


def test_a_conversation(engine: launch.EngineProcess) -> None:
    info = loaded(engine)
    assert info["n_layer"] == 4
    assert info["layers"] == {"head": 4}
    assert info["mtp"]["enabled"]
    assert "<|im_start|>" in info["chat_template"]
    engine.channel.send({"type": "tokenize", "id": "t", "text": "abc", "add_special": False})
    tokens = until(engine, "result")[0]["value"]
    assert tokens == [97, 98, 99]
    engine.channel.send({"type": "detokenize", "id": "d", "tokens": tokens})
    assert until(engine, "result")[0]["value"] == "abc"
    engine.channel.send({"type": "embed", "id": "e", "tokens": tokens})
    assert len(until(engine, "result")[0]["value"]) == 256
    engine.channel.send({"type": "generate", "id": "g", "prompt": tokens,
                         "params": {"temperature": 0, "max_tokens": 30}})
    done, before = until(engine, "done")
    said = [token for frame in before if frame["type"] == "chunk" for token in frame["tokens"]]
    assert said == toy_language().say(99, 30)
    assert (done["id"], done["reason"], done["stats"]["completion_tokens"]) == ("g", "length", 30)
    engine.channel.send({"type": "generate", "id": "r", "prompt": tokens, "resume": said[:10],
                         "params": {"temperature": 0, "max_tokens": 30}})
    _done, before = until(engine, "done")
    assert [t for f in before if f["type"] == "chunk" for t in f["tokens"]] == said[10:]
    assert engine.close() == 0


def test_cancel_and_heartbeats(engine: launch.EngineProcess) -> None:
    loaded(engine)
    engine.channel.send({"type": "generate", "id": "g", "prompt": [97], "params": {"temperature": 0}})
    beat, _ = until(engine, "heartbeat")
    assert set(beat) >= {"step", "busy", "slots"}
    engine.channel.send({"type": "cancel", "id": "g"})
    done, _ = until(engine, "done")
    assert done["reason"] in ("cancelled", "length")  # 1,000 tokens of the toy may have been made by then


def test_bad_requests_fail_alone(engine: launch.EngineProcess) -> None:
    loaded(engine)
    frames: list[dict[str, Any]] = [
        {"type": "generate", "prompt": []}, {"type": "generate", "prompt": [97], "params": {"top_p": 9}},
        {"type": "generate"}, {"type": "nonsense"}, {"type": "detokenize", "tokens": [99999]}, {"type": "embed"}]
    for i, frame in enumerate(frames):
        engine.channel.send({**frame, "id": str(i)})
        failed, _ = until(engine, "failed")
        assert failed["id"] == str(i)
        assert failed["error"]["message"]
    engine.channel.send({"type": "generate", "id": "g", "prompt": [97], "params": {"temperature": 0, "max_tokens": 2}})
    assert until(engine, "done")[0]["reason"] == "length"


def test_a_load_that_fails_is_told_and_ends_the_process(engine: launch.EngineProcess) -> None:
    engine.channel.send({"type": "load", "spec": toy_spec("/nonexistent.gguf").to_dict()})
    failed, _ = until(engine, "failed")
    assert "id" not in failed
    assert failed["error"]["kind"] == "ModelError"
    assert engine.process.wait(30) == 8


def test_it_ends_with_its_parent(engine: launch.EngineProcess) -> None:
    loaded(engine)
    engine.channel.send({"type": "generate", "id": "g", "prompt": [97], "params": {"temperature": 0}})
    engine.channel.close()
    assert engine.process.wait(30) == 0


def test_ctrl_c_is_the_parents_business(engine: launch.EngineProcess) -> None:
    loaded(engine)
    engine.process.send_signal(signal.SIGINT)
    engine.channel.send({"type": "tokenize", "id": "t", "text": "a", "add_special": False})
    assert until(engine, "result")[0]["value"] == [97]
