"""The API over the real engine and the embedded model, half of it on a peer: real templates, grammars, restarts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hydra.embedded import embedded_model
from hydra.head.spec import Endpoint, EngineSpec
from tests.api_support import Head, running_head
from tests.survival_support import Peer

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def head(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    spec = EngineSpec(
        str(embedded_model().path),
        endpoints=(Endpoint("mini", peer.target.endpoint),),
        layers={"mini": 6},
        devices=("CPU",),
        ctx_size=1024,
        ubatch_size=64,
        threads=1,
        use_extra_bufts=False,
    )
    patience: dict[str, Any] = {
        "step_deadline_s": 60.0,
        "silence_s": 10.0,
        "suspect_s": 3.0,
        "probe_timeout_s": 2.0,
        "probe_s": 0.5,
    }
    with running_head(
        tmp_path_factory.mktemp("real"), spec=spec, peers=[peer.target], real=True, **patience
    ) as running:
        yield running


@pytest.fixture
def client(head: Head) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": text}]


def test_an_answer_with_logprobs(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="x", prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=3
    )
    choice = done.choices[0]
    assert "capital" in choice.text and choice.logprobs is not None
    tokens, values, tops = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert tokens is not None and values is not None and tops is not None
    assert "".join(tokens) == choice.text and all(value <= 0 for value in values)
    for token, value, top in zip(tokens, values, tops, strict=True):
        assert len(top) == 3 and max(top, key=lambda name: top[name]) == token and top[token] == pytest.approx(value)
    # Six words and the beginning of the text, once.
    assert done.usage is not None and done.usage.prompt_tokens == 6


class Place(pydantic.BaseModel):
    country: str
    capital: str


def test_structured_output_and_tools_are_held_to(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="x", messages=ask("France"), response_format=Place, temperature=0, max_tokens=60
    )
    assert parsed.choices[0].message.parsed is not None
    tool: Any = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place", "days"],
                "additionalProperties": False,
            },
        },
    }
    called = client.chat.completions.create(
        model="x",
        messages=ask("Weather in Paris for 3 days?"),
        tools=[tool],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
    )
    calls = called.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.name == "weather"
    assert set(json.loads(calls[0].function.arguments)) == {"place", "days"}
    free = client.chat.completions.create(model="x", messages=ask("Hello"), tools=[tool], temperature=0, max_tokens=80)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls


def test_embeddings_tell_texts_apart(client: openai.OpenAI) -> None:
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on the couch.", "Interest rates rose by one percent."]
    cat, couch, rates = (entry.embedding for entry in client.embeddings.create(model="x", input=texts).data)

    def alike(one: list[float], other: list[float]) -> float:
        return sum(x * y for x, y in zip(one, other, strict=True))

    assert alike(cat, couch) > alike(cat, rates)


def test_the_peer_in_metrics_and_status(head: Head, client: openai.OpenAI) -> None:
    client.completions.create(model="x", prompt="One two three", max_tokens=4)
    head.until(lambda: bool((head.supervisor.peers.rows()[0].get("stats") or {}).get("commands")))
    families = {
        family.name: family
        for family in text_string_to_metric_families(httpx.get(f"{head.url}/metrics", timeout=10).text)
    }
    assert families["hydra_peer_up"].samples[0].value == 1
    assert 0 < families["hydra_peer_round_trip_seconds"].samples[0].value < 10
    moved = {sample.labels["direction"]: sample.value for sample in families["hydra_peer_bytes"].samples}
    assert moved["to_peer"] > 1 << 20 and moved["from_peer"] > 0
    mine, peer = httpx.get(f"{head.url}/hydra/status", timeout=10).json()["nodes"]
    assert (mine["layers"], peer["layers"]) == (12, 6) and peer["state"] == "up" and peer["name"] == "mini"
    assert peer["memory_total"] > peer["memory_used"] >= 0 and peer["device"] and peer["uptime_s"] > 0


def test_too_long_a_prompt_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        client.chat.completions.create(model="x", messages=ask("word " * 1500))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("params", "victim"),
    [({"temperature": 0}, "worker"), ({"temperature": 0.9, "seed": 7}, "engine")],
    ids=["greedy", "seeded"],
)
def test_continued_byte_for_byte(head: Head, peer: Peer, params: dict[str, Any], victim: str) -> None:
    """Alone on a fresh engine, killed in the middle or not: the same bytes."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True, **params}

    def answer(disturb: bool) -> str:
        fresh = head.supervisor.ledger.total + 1
        os.kill(head.supervisor.status()["engine_pid"], signal.SIGKILL)
        head.until(lambda: head.supervisor.ledger.total >= fresh and head.supervisor.ready)
        text = ""
        with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                if disturb and len(text) > 40:
                    disturb = False
                    health = httpx.get(f"http://{peer.target.endpoint}/health", timeout=10).json()
                    os.kill(
                        head.supervisor.status()["engine_pid"] if victim == "engine" else health["worker_pid"],
                        signal.SIGKILL,
                    )
        assert head.supervisor.ledger.total > fresh or not disturb
        return text

    calm = answer(False)
    assert answer(True) == calm and len(calm) > 100
