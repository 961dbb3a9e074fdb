"""What is not OpenAI's: keys, limits, origins, states, metrics, and clients that hang up."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hydra.api.settings import ApiSettings
from hydra.head.spec import EngineSpec
from tests.api_support import Head, running_head
from tests.fake_engine import say


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running_head(
        tmp_path_factory.mktemp("head"), spec=EngineSpec("fake.gguf", parallel=2), queue_max=1
    ) as running:
        yield running


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def get(head: Head, path: str, **headers: str) -> httpx.Response:
    return httpx.get(head.url + path, headers=headers, timeout=10)


def post(head: Head, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(head.url + path, json=body, headers=headers, timeout=20)


def events(response: httpx.Response) -> list[str]:
    return [line for line in response.text.split("\n\n") if line]


# ---- keys, origins, sizes


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    api = ApiSettings(api_key="schlüssel", cors_origins=("https://good.example",), max_request_bytes=2000)
    with running_head(tmp_path_factory.mktemp("locked"), api=api) as running:
        yield running


def test_key(locked: Head) -> None:
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic schluessel"}):
        refused = get(locked, "/v1/models", **header)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    for name, value in (("Authorization", "Bearer schlüssel"), ("X-API-Key", "schlüssel")):
        right = httpx.get(f"{locked.url}/v1/models", headers={name.encode(): value.encode()}, timeout=10)
        assert right.status_code == 200
    assert get(locked, "/health").status_code == 200
    assert get(locked, "/metrics").status_code == 401


def test_origins(head: Head, locked: Head) -> None:
    refused = get(head, "/v1/models", Origin="https://evil.example")
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    preflight = httpx.options(
        f"{locked.url}/v1/chat/completions",
        timeout=10,
        headers={
            "Origin": "https://good.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert (
        get(locked, "/health", Origin="https://good.example").headers["access-control-allow-origin"]
        == "https://good.example"
    )
    assert get(locked, "/health", Origin="https://evil.example").status_code == 403


def test_size(tmp_path: Path) -> None:
    with running_head(tmp_path, api=ApiSettings(max_request_bytes=2000)) as running:
        assert post(running, chat("x" * 3000)).status_code == 413

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        chunked = httpx.post(f"{running.url}/v1/chat/completions", content=pieces(), timeout=10)
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "request_too_large"
        assert post(running, chat(say("ok"))).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405)],
)
def test_refusals_have_openais_shape(head: Head, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, head.url + path, timeout=10)
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": "x"}', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_none(head: Head, body: bytes) -> None:
    answer = httpx.post(f"{head.url}/v1/chat/completions", content=body, timeout=10)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


# ---- states


def test_health_while_it_loads(tmp_path: Path) -> None:
    with running_head(tmp_path, env={"FAKE_ENGINE_LOAD_S": "1.5"}, ready=False) as running:
        running.until(lambda: running.supervisor.progress.get("layers_done") == 5)
        loading = get(running, "/health")
        body = loading.json()
        assert loading.status_code == 503 and int(loading.headers["retry-after"]) >= 1
        assert (body["state"], body["node"], body["percent"], body["eta_s"]) == ("loading", "mini", 50.0, 1.0)
        assert body["error"]["type"] == "unavailable_error" and body["error"]["message"].startswith("Loading model")
        # A request that comes now waits, and says so in comments.
        waiting = post(running, chat(say("at last"), stream=True))
        assert waiting.status_code == 200 and "at" in waiting.text
        assert get(running, "/health").json()["status"] == "ok"


def test_a_pause_is_a_comment_and_the_answer_whole(tmp_path: Path) -> None:
    faults = [{"life": 1, "after": 20, "do": "stall"}]
    with running_head(tmp_path, faults=faults, step_deadline_s=0.5, env={"FAKE_ENGINE_LOAD_S": "0.6"}) as running:
        answer = post(running, chat("q", max_tokens=60, temperature=0, stream=True))
        comments = [json.loads(line.removeprefix(": hydra ")) for line in events(answer) if line.startswith(":")]
        assert any(comment["recovering"] and "stalled" in comment["reason"] for comment in comments)
        text = "".join(
            choice["delta"].get("content", "")
            for line in events(answer)
            if line.startswith("data: {")
            for choice in json.loads(line[6:])["choices"]
        )
        calm = post(running, chat("q", max_tokens=60, temperature=0)).json()
        assert text == calm["choices"][0]["message"]["content"] and len(text.encode()) == 60
        status = get(running, "/hydra/status").json()
        assert status["restarts"] == 1 and status["totals"]["resumed_streams"] == 1


def test_full_is_503_with_retry_after(head: Head) -> None:
    slow = chat("[[delay:50]]", max_tokens=1000, stream=True)
    with httpx.Client(timeout=20) as client:
        open_ones = [client.stream("POST", f"{head.url}/v1/chat/completions", json=slow) for _ in range(3)]
        entered = [each.__enter__() for each in open_ones]
        try:
            head.until(lambda: len(head.supervisor.board.active) == 2 and len(head.supervisor.board.waiting) == 1)
            full = post(head, chat("one more"))
            assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["code"] == "overloaded"
            slots = get(head, "/slots").json()
            assert [slot["is_processing"] for slot in slots] == [True, True]
            assert get(head, "/slots?fail_on_no_slot=1").status_code == 503
            rows = get(head, "/hydra/status").json()["requests"]
            assert sorted(row["state"] for row in rows)[-1] == "waiting" and len(rows) == 3
        finally:
            for each in open_ones:
                each.__exit__(None, None, None)
    assert all(response.status_code == 200 for response in entered)
    head.until(lambda: not head.supervisor.board.open())


def test_a_request_says_how_long_it_waits(head: Head) -> None:
    slow = chat("[[delay:50]]", max_tokens=1000, stream=True)
    with (
        httpx.stream("POST", f"{head.url}/v1/chat/completions", json=slow, timeout=20),
        httpx.stream("POST", f"{head.url}/v1/chat/completions", json=slow, timeout=20),
    ):
        head.until(lambda: len(head.supervisor.board.active) == 2)
        late = post(head, chat("x", max_wait_s=0.3))
        assert late.status_code == 503 and late.json()["error"]["code"] == "waited_too_long"
        streamed = post(head, chat("x", max_wait_s=0.3, stream=True))
        last = [json.loads(line[6:]) for line in events(streamed) if line.startswith("data: {")][-1]
        assert last["error"]["code"] == "waited_too_long" and streamed.text.endswith("data: [DONE]\n\n")
    head.until(lambda: not head.supervisor.board.open())


def test_a_model_that_cannot_load(tmp_path: Path) -> None:
    with running_head(tmp_path, spec=EngineSpec("missing.gguf"), ready=False) as running:
        running.until(lambda: running.supervisor.state == "failed")
        health = get(running, "/health")
        assert health.status_code == 503 and "missing.gguf does not exist" in health.json()["error"]["message"]
        refused = post(running, chat("q"))
        assert refused.status_code == 500 and "missing.gguf" in refused.json()["error"]["message"]


# ---- who hangs up


def abandon(head: Head, body: dict[str, Any]) -> None:
    """Send a request and close the connection once the engine works on it."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", head.port)) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        head.until(lambda: len(head.supervisor.board.active) == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["[[delay:20]]", "[[delay:5000]]"], ids=["answering", "reading"])
def test_hanging_up_frees_the_slot(head: Head, stream: bool, prompt: str) -> None:
    cancelled = head.supervisor.totals.requests.get("cancelled", 0)
    abandon(head, chat(prompt, max_tokens=100_000, stream=stream))
    head.until(lambda: not head.supervisor.board.open(), 5)
    assert head.supervisor.totals.requests["cancelled"] == cancelled + 1


def test_hanging_up_while_it_loads(tmp_path: Path) -> None:
    with running_head(tmp_path, env={"FAKE_ENGINE_LOAD_S": "1"}, ready=False) as running:
        data = json.dumps(chat("q", stream=True)).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            time.sleep(0.2)
        running.until_ready()
        assert not running.supervisor.board.open() and not running.supervisor.totals.requests


# ---- figures


def test_metrics(head: Head) -> None:
    post(head, chat(say("count me")))
    families = {family.name: family for family in text_string_to_metric_families(get(head, "/metrics").text)}
    assert families["hydra_generated_tokens"].samples[0].value >= 8
    assert families["hydra_acceptance_ratio"].samples[0].value == pytest.approx(0.75)
    for name in ("hydra_acceptance_length_mean", "hydra_draft_seconds", "hydra_verify_seconds"):
        assert families[name].samples[0].value >= 0
    states = {sample.labels["state"]: sample.value for sample in families["hydra_state"].samples}
    assert states["ready"] == 1 and sum(states.values()) == 1
    assert any(
        sample.labels == {"outcome": "stop"} and sample.value >= 1 for sample in families["hydra_requests"].samples
    )


def test_props_and_status(head: Head) -> None:
    props = get(head, "/props").json()
    assert props["total_slots"] == 2 and props["chat_template_own"] and props["tool_format"] == "hermes"
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["eos_token"] == "<|im_end|>"
    status = get(head, "/hydra/status").json()
    (node,) = status["nodes"]
    assert node["role"] == "head" and node["state"] == "ready" and node["layers"] == 6 and node["memory_total"] > 0


def test_timings(head: Head) -> None:
    timings = post(head, chat(say("abc"))).json()["timings"]
    assert timings["predicted_n"] == 3 and timings["prompt_per_second"] == 100.0 and timings["draft_n_accepted"] == 3
    assert timings["context_n"] == timings["prompt_n"] + 3


def test_tokens_there_and_back(head: Head) -> None:
    tokens = post(head, {"content": "hé"}, "/tokenize").json()["tokens"]
    assert tokens == list("hé".encode())
    assert post(head, {"tokens": tokens}, "/detokenize").json()["content"] == "hé"
    done = post(head, {"prompt": say("ab"), "return_tokens": True}, "/v1/completions").json()
    assert done["choices"][0]["tokens"] == [97, 98]


def test_reload_keeps_the_port(tmp_path: Path) -> None:
    with running_head(tmp_path) as running:
        answers: list[int] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answers.append(post(running, chat(say("hi"))).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        running.until(lambda: len(answers) > 3)
        running.on_loop(running.supervisor.reload(EngineSpec("other.gguf", parallel=1)))
        running.until(lambda: running.supervisor.ready and running.supervisor.info["model"] == "other.gguf")
        count = len(answers)
        running.until(lambda: len(answers) > count + 3)
        stop.set()
        asking.join(20)
        # 503 where a request waited with the other model's tokens; never a refused connection.
        assert set(answers) <= {200, 503} and answers[-1] == 200
        assert get(running, "/v1/models").json()["data"][0]["id"] == "other"
