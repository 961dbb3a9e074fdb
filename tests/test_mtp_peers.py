"""A split changes neither tokens nor drafts.

The hybrid model over a hydra peer and over the stock server, with and without MTP.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hydra.bench.stock import StockServer
from hydra.head.cells import CHECKPOINT_TAIL
from hydra.head.engine import Engine
from hydra.head.sampling import SamplingParams
from hydra.head.spec import Endpoint
from hydra.peer.launch import start_peer
from tests.engine_support import (
    PROMPTS,
    Answer,
    answers_of,
    ask,
    drain,
    first_difference,
    take,
    toy,
    toy_language,
    toy_spec,
)


@pytest.fixture(scope="module", params=["hydra", "stock"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """A peer on loopback with one CPU thread, as the local runs have."""
    if request.param == "stock":
        with StockServer(threads=1) as server:
            yield server.endpoint
    else:
        with start_peer(device="CPU", threads=1) as peer:
            yield f"127.0.0.1:{peer.port}"


@pytest.fixture(scope="module")
def local() -> list[Answer]:
    return answers_of(toy_spec(toy(exact=False)))


@pytest.mark.parametrize(("kind", "n_max", "slots"), [("none", 1, 1), ("mtp", 1, 1), ("mtp", 3, 1), ("mtp", 6, 1),
                                                     ("mtp", 3, 4), ("none", 1, 4)])
def test_split_answers_are_local_answers(address: str, local: list[Answer], kind: str, n_max: int, slots: int) -> None:
    spec = toy_spec(toy(exact=False), kind, n_max, parallel=slots, endpoints=(Endpoint("mini", address),),
                    layers={"mini": 2})
    with Engine(spec) as engine:
        assert engine.info["layers"] == {"mini": 2, "head": 2}
        assert engine.info["memory"]["mini"]["model"] > 0
        answers = ask(engine, PROMPTS)
    assert [first_difference(a.tokens, b.tokens) for a, b in zip(local, answers, strict=True)] == [None] * len(PROMPTS)


@pytest.mark.parametrize("on_peer", [0, 1, 4])
def test_any_split_by_name(address: str, local: list[Answer], on_peer: int) -> None:
    """Also none and all of the layers on the peer; the MTP block and the output stay on the head."""
    spec = toy_spec(toy(exact=False), "mtp", 3, endpoints=(Endpoint("mini", address),), layers={"mini": on_peer})
    with Engine(spec) as engine:
        assert engine.info["layers"] == {"mini": on_peer, "head": 4 - on_peer}
        (answer,) = ask(engine, PROMPTS[:1])
    assert answer.tokens == local[0].tokens


@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_a_kept_state_on_the_peer_is_gone_back_to(address: str, kind: str) -> None:
    """A prompt with another ending goes on from the checkpoint; the peer's layers have theirs on the peer."""
    beginning = "A long prompt, longer than what a checkpoint is made for, with many words in it. " * 2
    path = toy(exact=False)
    spec = toy_spec(path, kind, endpoints=(Endpoint("mini", address),), layers={"mini": 3})
    with Engine(spec) as engine:
        for ending in ("Assistant:", "Answer: no."):
            (answer,) = ask(engine, [beginning + ending], max_tokens=20)
            assert answer.tokens == answers_of(toy_spec(path, kind), [beginning + ending], max_tokens=20)[0].tokens
        assert answer.stats["cached_tokens"] == len(beginning) + len("Assistant:") - CHECKPOINT_TAIL


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("slots", [1, 4])
def test_what_is_said_over_a_peer_is_known_whatever_is_drafted(address: str, acceptance: float, slots: int) -> None:
    """Draft lengths 1 to 6 in one engine, on the model whose answers are known."""
    words = toy_language(acceptance)
    spec = toy_spec(toy(acceptance=acceptance), "mtp", 6, parallel=slots, endpoints=(Endpoint("mini", address),),
                    layers={"mini": 2})
    with Engine(spec) as engine:
        for n in range(1, 7):
            for prompt, answer in zip(PROMPTS, ask(engine, PROMPTS, draft_n=n, max_tokens=30), strict=True):
                assert answer.tokens == words.say(engine.vocab.tokenize(prompt)[-1], 30)
                assert answer.stats["drafted"] > 0
                assert len(answer.stats["tried_at"]) == n


@pytest.mark.parametrize("slots", [1, 4])
def test_ends_in_the_middle_of_a_draft_over_a_peer(address: str, slots: int) -> None:
    """A stop string, a cancellation and the end of the context, where the rest of the draft lies on the peer."""
    words = toy_language(1.0)
    spec = toy_spec(toy(acceptance=1.0), "mtp", 6, parallel=slots, endpoints=(Endpoint("mini", address),),
                    layers={"mini": 2}, ctx_size=256)
    with Engine(spec) as engine:
        said = engine.vocab.detokenize(words.say(ord("c"), 40))
        for at in range(5, 12):
            for answer in ask(engine, ["abc"] * slots, stop=[said[at:at + 3]], max_tokens=40):
                assert (answer.text, answer.reason) == (said[:at], "stop")

        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 40})
        answers: dict[str, Answer] = {}
        for i in range(slots):
            engine.submit(str(i), engine.vocab.tokenize("abc"), params)
        for _ in range(4):
            take(answers, engine.step())
        engine.cancel("0")
        drain(engine, answers)
        assert answers["0"].reason == "cancelled"
        for id, answer in answers.items():
            assert answer.tokens == words.say(ord("c"), 40)[:len(answer.tokens) if id == "0" else 40]

        (answer,) = ask(engine, [[ord("c")] * 200], max_tokens=None)
        assert (answer.tokens, answer.reason) == (words.say(ord("c"), 57), "length")
