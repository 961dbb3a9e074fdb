"""Sampling: parameters checked, seeds that repeat, penalties, grammars, log-probabilities, and text that is never cut
in a character.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from hydra.errors import RequestError
from hydra.head.engine import Engine
from hydra.head.sampling import SamplingParams, draw_seed
from hydra.head.streaming import TextStream
from tests.engine_support import answers_of, ask, toy, toy_language, toy_spec

FLAT: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def distribution(path: str, prompt: list[int], temperature: float) -> dict[int, float]:
    """The target's own probabilities after a prompt, from its log-probabilities."""
    with Engine(toy_spec(path)) as engine:
        (answer,) = ask(engine, [prompt], max_tokens=1, logprobs=100)
    logits = {item["token"]: item["logprob"] / temperature for item in answer.logprobs[0]["top"]}
    total = sum(math.exp(value) for value in logits.values())
    return {token: math.exp(value) / total for token, value in logits.items()}


def chi_square(counts: dict[int, int], expected: dict[int, float], n: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare tokens pooled."""
    statistic, pooled_seen, pooled_expected, cells = 0.0, 0, 0.0, 0
    for token, p in expected.items():
        if p * n < 5:
            pooled_seen += counts.get(token, 0)
            pooled_expected += p * n
            continue
        statistic += (counts.get(token, 0) - p * n) ** 2 / (p * n)
        cells += 1
    if pooled_expected > 0:
        statistic += (pooled_seen - pooled_expected) ** 2 / pooled_expected
        cells += 1
    return statistic, cells - 1


@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_sampled_tokens_have_the_target_distribution(kind: str) -> None:
    """Chi-square over the third token of 1,000 short answers, with MTP verified in the middle of a draft."""
    path = toy(acceptance=1.0)
    temperature, top_k, n = 3.0, 20, 1000
    prompt = [ord("q")]
    with Engine(toy_spec(path, kind, 3, parallel=8)) as engine:
        counts: dict[int, int] = {}
        samples = 0
        for block in range(n // 8):
            for i in range(8):
                engine.submit(f"{block}.{i}", prompt, SamplingParams.from_dict(
                    {**FLAT, "temperature": temperature, "top_k": top_k, "seed": block * 8 + i, "max_tokens": 3}))
            made: dict[str, list[int]] = {}
            while engine.busy:
                for event in engine.step():
                    made.setdefault(event.id, []).extend(getattr(event, "tokens", []))
            said = toy_language(1.0).say(prompt[0], 2)
            for tokens in made.values():
                if tokens[:2] == said:  # the likeliest beginning: the third token's context is then the same
                    counts[tokens[2]] = counts.get(tokens[2], 0) + 1
                    samples += 1
        drafted = engine.stats.accepted
    assert samples > 200
    assert (drafted > 0) == (kind == "mtp")
    likely = distribution(path, [*prompt, *said], temperature)
    kept = dict(sorted(likely.items(), key=lambda item: -item[1])[:top_k])
    expected = {token: p / sum(kept.values()) for token, p in kept.items()}
    assert set(counts) <= set(expected)
    statistic, freedom = chi_square(counts, expected, samples)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # about one in 30,000 by chance, and the seeds are fixed


def test_seeds_repeat_and_differ() -> None:
    params = {**FLAT, "temperature": 3.0, "max_tokens": 20}
    runs = [answers_of(toy_spec(toy("toy-llama")), ["abc"], seed=seed, **params)[0].tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len({draw_seed(s, p, a) for s in range(20) for p in range(50) for a in (False, True)}) == 2000


def test_a_seed_is_drawn_and_told() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        first = ask(engine, ["abc"], **{**FLAT, "temperature": 3.0})[0]
        again = ask(engine, ["abc"], **{**FLAT, "temperature": 3.0, "seed": first.stats["seed"]})[0]
        other = ask(engine, ["abc"], **{**FLAT, "temperature": 3.0})[0]
    assert first.tokens == again.tokens != other.tokens


@pytest.mark.parametrize("params", [
    {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.001}])
def test_filters_that_leave_one_token_are_greedy(params: dict[str, Any]) -> None:
    settings = {**FLAT, "seed": 5, **params}
    (answer,) = answers_of(toy_spec(toy("toy-llama")), ["abc"], **settings)
    assert answer.tokens == toy_language(name="toy-llama").say(ord("c"), 60)


def test_penalties_forbid_what_was_said() -> None:
    """The cycle of 96 tokens cannot be said twice when each repetition costs more than the model's certainty."""
    settings: list[tuple[dict[str, Any], int]] = [
        ({"presence_penalty": 100.0}, 130), ({"frequency_penalty": 100.0}, 130),
        ({"repeat_penalty": 100.0}, 120)]  # a negative logit is multiplied: not a wall, but a slope
    for params, different in settings:
        (answer,) = answers_of(toy_spec(toy("toy-llama")), ["abc"], max_tokens=130, repeat_last_n=-1, **params)
        assert len(set(answer.tokens)) >= different
    (answer,) = answers_of(toy_spec(toy("toy-llama")), ["abc"], max_tokens=150)
    assert len(set(answer.tokens)) == 96


def test_dry_breaks_repetition() -> None:
    plain = answers_of(toy_spec(toy("toy-llama")), ["abc"], max_tokens=220)[0].tokens
    dry = answers_of(toy_spec(toy("toy-llama")), ["abc"], max_tokens=220, dry_multiplier=5.0,
                     dry_sequence_breakers=[])[0].tokens
    assert dry[:96] == plain[:96]
    assert dry != plain


def test_logit_bias() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        (answer,) = ask(engine, ["abc"], logit_bias={"65": 1000.0}, max_tokens=4)
        assert answer.text == "AAAA"
        (answer,) = ask(engine, ["abc"], logit_bias={999999: 1.0})
        assert answer.error is not None
        assert "999999" in answer.error.message


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_grammar(temperature: float, kind: str) -> None:
    """Every token obeys the grammar, and the answer ends where it ends."""
    grammar = 'root ::= "yes " [0-9] [0-9] | "no"'
    with Engine(toy_spec(toy(), kind, parallel=2)) as engine:
        for answer in ask(engine, ["abc", "xyz"], grammar=grammar, temperature=temperature, top_k=0, seed=3):
            assert answer.error is None
            assert answer.reason == "stop"
            assert answer.text == "no" or (answer.text[:4] == "yes " and answer.text[4:].isdigit())


def test_json_schema() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "name": {"enum": ["ann", "bob"]}},
              "required": ["ok", "name"], "additionalProperties": False}
    (answer,) = answers_of(toy_spec(toy(), "mtp"), ["abc"], json_schema=schema, temperature=1.0, seed=1, max_tokens=200)
    assert answer.reason == "stop"
    value = json.loads(answer.text)
    assert value["name"] in ("ann", "bob")
    assert isinstance(value["ok"], bool)


def test_broken_grammars_end_one_request_only() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        (answer,) = ask(engine, ["abc"], grammar="this is no grammar")
        assert answer.error is not None
        assert "grammar" in answer.error.message
        (answer,) = ask(engine, ["abc"])
        assert answer.reason == "length"


def test_log_probabilities() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        (answer,) = ask(engine, ["abc"], max_tokens=3, logprobs=4)
        (chosen_only,) = ask(engine, ["abc"], max_tokens=3, logprobs=0)
    assert len(answer.logprobs) == 3
    for item, token in zip(answer.logprobs, answer.tokens, strict=True):
        assert item["token"] == token == item["top"][0]["token"]
        values = [t["logprob"] for t in item["top"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.0001
        assert bytes(item["bytes"]).decode() == item["text"]
    assert [item["top"] for item in chosen_only.logprobs] == [[], [], []]


@pytest.mark.parametrize(("params", "match"), [
    ({"temperature": float("nan")}, "temperature"), ({"top_p": 2}, "top_p"), ({"max_tokens": -1}, "max_tokens"),
    ({"stop": [""]}, "stop"), ({"logprobs": 1000}, "logprobs"), ({"nonsense": 1}, "nonsense"),
    ({"top_k": "many"}, "type"), ({"grammar": "root ::= [a]", "json_schema": {}}, "both|Both"),
    ({"repeat_penalty": 0}, "repeat_penalty")])
def test_parameters_are_checked(params: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams.from_dict(params)


def test_text_is_sent_in_whole_characters_whatever_the_pieces() -> None:
    text = "aé€😀 ünïcødé \U0001F469‍\U0001F680 end"
    data = text.encode()
    rng = random.Random(1)
    for _ in range(50):
        stream, sent, at = TextStream(), [], 0
        while at < len(data):
            size = rng.randint(1, 5)
            sent.append(stream.push(data[at:at + size]))
            at += size
        sent.append(stream.finish())
        assert "".join(sent) == text
        assert "\ufffd" not in "".join(sent)
    broken = TextStream()
    assert broken.push(b"ok\xe2\x82") == "ok"
    assert broken.finish() == "\ufffd"


@pytest.mark.parametrize("stop", [["STOP"], ["OP", "STOP"], ["XX", "STO"], ["P"], ["\n\n", "S"]])
def test_stop_strings_across_pieces(stop: list[str]) -> None:
    """Whatever the pieces, what is sent is the text before the first stop string."""
    text = "before S ST STO\nSTOP after"
    cut = min((text.find(s) for s in stop if s in text), default=len(text))
    for size in (1, 2, 3, 7, 100):
        stream, sent = TextStream(stop), ""
        for at in range(0, len(text), size):
            sent += stream.push(text[at:at + size].encode())
            if stream.stopped is not None:
                break
        sent += stream.finish()
        assert sent == text[:cut]


def test_an_unfinished_stop_string_is_sent_at_the_end() -> None:
    stream = TextStream(["STOP"])
    assert stream.push(b"a ST") == "a "
    assert stream.finish() == "ST"
