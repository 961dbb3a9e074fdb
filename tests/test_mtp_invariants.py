"""Drafting ahead changes speed and nothing else: with MTP an answer is the answer without, token for token.

The architecture is the hybrid one (gated delta nets and attention), whose state cannot simply be cut back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hydra.head import draft, loading
from hydra.head.adaptive import DraftLength
from hydra.head.draft import MtpDrafter
from hydra.head.engine import Engine
from hydra.head.llama import Model
from hydra.head.sampling import SamplingParams
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

NEAR_TIE = 0.02  # in log-probability: two kernels round differently by less than this on these models


def assert_same_or_near_tie(plain: Answer, drafted: Answer) -> None:
    """Equal tokens; where they part, the two candidates' log-probabilities must have been a near tie in both runs."""
    at = first_difference(plain.tokens, drafted.tokens)
    if at is None:
        return
    for answer, other in ((plain, drafted), (drafted, plain)):
        top = {item["token"]: item["logprob"] for item in answer.logprobs[at]["top"]}
        mine, theirs = answer.tokens[at], other.tokens[at]
        assert theirs in top, f"token {at}: {theirs} was not among the likeliest beside {mine}"
        assert abs(top[mine] - top[theirs]) < NEAR_TIE, f"token {at} differs and was no near tie"


@pytest.fixture(scope="module")
def plain_exact() -> list[Answer]:
    return answers_of(toy_spec(toy()))


@pytest.fixture(scope="module")
def plain_mixed() -> list[Answer]:
    return answers_of(toy_spec(toy(exact=False)), logprobs=5)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 5, 6])
def test_what_is_said_is_known_whatever_is_drafted(acceptance: float, n_max: int) -> None:
    """The exact model says its successor table; the drafts' acceptance is the one that was built in."""
    words = toy_language(acceptance)
    with Engine(toy_spec(toy(acceptance=acceptance), "mtp", n_max)) as engine:
        for prompt, answer in zip(PROMPTS, ask(engine, PROMPTS), strict=True):
            assert answer.tokens == words.say(engine.vocab.tokenize(prompt)[-1], 60)
        stats = engine.stats
    assert stats.drafted > 0
    first_place = stats.accepted_at[0] / stats.tried_at[0]
    assert first_place == pytest.approx(acceptance, abs=0.25 if 0 < acceptance < 1 else 0)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 5, 6])
def test_with_every_weight_in_play(plain_mixed: list[Answer], n_max: int, slots: int) -> None:
    """Nothing zeroed: the recurrent state, the cache and the hidden rows all decide what is said."""
    drafted = answers_of(toy_spec(toy(exact=False), "mtp", n_max, parallel=slots), logprobs=5)
    assert any(0 < answer.stats["accepted"] < answer.stats["drafted"] for answer in drafted)  # something was taken back
    for plain, answer in zip(plain_mixed, drafted, strict=True):
        assert_same_or_near_tie(plain, answer)


@pytest.mark.parametrize("n_max", [1, 3, 6])
def test_with_the_width_held_equal_the_tokens_are_equal(monkeypatch: pytest.MonkeyPatch, n_max: int) -> None:
    """Every round verifies ``n_max`` guesses, right ones or none that is: no near tie is left to explain a difference.

    Answers are longer than what is compared, for a draft is cut short before the end.
    """
    spec, long, compared = toy_spec(toy(exact=False), "mtp", n_max), 100, 80
    drafted = answers_of(spec, max_tokens=long, draft_n=n_max)
    guess = MtpDrafter.draft

    def wrong(self: MtpDrafter, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        return {slot: [(token + 7) % 512 for token in tokens] for slot, tokens in guess(self, jobs, n).items()}

    monkeypatch.setattr(MtpDrafter, "draft", wrong)
    refused = answers_of(spec, max_tokens=long, draft_n=n_max)
    assert sum(a.stats["accepted"] for a in refused) < 0.2 * sum(a.stats["accepted"] for a in drafted)
    assert [a.tokens[:compared] for a in drafted] == [a.tokens[:compared] for a in refused]


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_drafting_again_after_a_long_time_without(leaves_out: bool, exact: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of what the block has not seen fills several times; then it is decoded, or its older part left out."""
    monkeypatch.setattr(draft, "IDLE_SHARE", -1.0 if leaves_out else 1e9)
    plain = answers_of(toy_spec(toy(exact=exact), ctx_size=2048), max_tokens=300, logprobs=5)
    with Engine(toy_spec(toy(exact=exact), "mtp", 3, ctx_size=2048)) as engine:
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 300, "logprobs": 5, "draft_n": 0})
        lively = dataclasses.replace(params, draft_n=3)
        for number, prompt in enumerate(PROMPTS):
            answers: dict[str, Answer] = {}
            engine.submit("a", engine.vocab.tokenize(prompt), params)
            while len(answers.get("a", Answer()).tokens) < 200:
                take(answers, engine.step())
            request = engine.slots[0].request
            assert request is not None
            request.params = lively
            drain(engine, answers)
            assert_same_or_near_tie(plain[number], answers["a"])
            stats = answers["a"].stats
            assert stats["drafted"] > 30
            if exact:  # its block looks at the last token only
                assert stats["acceptance_rate"] > 0.5
        drafter = engine._drafter
        assert isinstance(drafter, MtpDrafter)
        assert drafter._leaves_out == leaves_out


@pytest.mark.parametrize(("acceptance", "least", "most"), [(1.0, 0.9, 1.0), (0.0, 0.0, 0.06)])
def test_the_length_follows_what_is_accepted(monkeypatch: pytest.MonkeyPatch, acceptance: float, least: float,
                                             most: float) -> None:
    """Where all is accepted the whole of n_max is drafted, where nothing is next to nothing; costs as on a GPU."""
    measured = DraftLength.measured

    def steady(self: DraftLength, n: int, draft_s: float, verify_s: float) -> None:
        del draft_s, verify_s
        measured(self, n, 0.05 * n, 1 + 0.02 * n)

    monkeypatch.setattr(DraftLength, "measured", steady)
    with Engine(toy_spec(toy(acceptance=acceptance), "mtp", 5, adaptive=True)) as engine:
        answers = ask(engine, PROMPTS, max_tokens=200)
    for answer in answers:
        assert least * 5 <= answer.stats["drafted"] / answer.stats["steps"] <= most * 5


def test_rollback_leaves_no_trace_in_the_logits(plain_mixed: list[Answer]) -> None:
    """After thousands of refused drafts each log-probability is still what it is without drafting.

    The return code of llama_memory_seq_rm says nothing about this.
    """
    drafted = answers_of(toy_spec(toy(exact=False), "mtp", 5), logprobs=5)
    compared = 0
    for plain, answer in zip(plain_mixed, drafted, strict=True):
        same = first_difference(plain.tokens, answer.tokens)
        for ours, theirs in zip(answer.logprobs[:same], plain.logprobs[:same], strict=True):
            assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=2e-3)
            compared += 1
    assert compared > 100


def test_a_wrong_rollback_would_be_seen(monkeypatch: pytest.MonkeyPatch, plain_mixed: list[Answer]) -> None:
    """The test above is able to fail: with rollbacks one token short, tokens or log-probabilities differ."""
    from hydra.head.llama import Context

    real = Context.remove

    def short(self: Context, seq: int, first: int) -> bool:
        if self.n_rs_seq and first > 0 and self.pos_max(seq) > first:
            return real(self, seq, first + 1) and real(self, seq, first)
        return real(self, seq, first)

    monkeypatch.setattr(Context, "remove", short)
    try:
        drafted = answers_of(toy_spec(toy(exact=False), "mtp", 5), logprobs=5)
    except Exception:
        return  # llama.cpp itself refused: seen as well
    differs = [first_difference(p.tokens, d.tokens) is not None
               or any(abs(a["logprob"] - b["logprob"]) > 2e-3 for a, b in zip(p.logprobs, d.logprobs, strict=True))
               for p, d in zip(plain_mixed, drafted, strict=True)]
    assert any(differs)


@pytest.mark.parametrize("slots", [1, 4])
def test_stop_strings_in_the_middle_of_a_draft(slots: int) -> None:
    """The text ends before the stop string, though later tokens of the draft were already verified."""
    words = toy_language(1.0)
    path = toy(acceptance=1.0)
    with Engine(toy_spec(path, "mtp", 6, parallel=slots)) as engine:
        last = engine.vocab.tokenize(PROMPTS[0])[-1]
        said = engine.vocab.detokenize(words.say(last, 60))
        for at in range(5, 12):
            stop = said[at:at + 3]
            for answer in ask(engine, [PROMPTS[0]] * slots, stop=[stop]):
                assert (answer.text, answer.reason, answer.stop) == (said[:at], "stop", stop)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_in_the_middle_of_a_draft(max_tokens: int) -> None:
    words = toy_language(1.0)
    with Engine(toy_spec(toy(acceptance=1.0), "mtp", 6)) as engine:
        (answer,) = ask(engine, ["abc"], max_tokens=max_tokens)
    assert (answer.tokens, answer.reason) == (words.say(ord("c"), max_tokens), "length")


@pytest.mark.parametrize("n_max", [1, 4, 6])
def test_the_end_of_the_context(n_max: int) -> None:
    """Every cell is used, drafting or not, and the answer ends with `length`."""
    prompt = [97] * 200
    plain = answers_of(toy_spec(toy(), ctx_size=256), [prompt], max_tokens=None)[0]
    drafted = answers_of(toy_spec(toy(), "mtp", n_max, ctx_size=256), [prompt], max_tokens=None)[0]
    assert plain.reason == drafted.reason == "length"
    assert len(plain.tokens) == 256 - 200 + 1
    assert drafted.tokens == plain.tokens


def test_cancelled_in_the_middle_of_a_draft() -> None:
    """One of four is cancelled; the others' answers, and the next one in its slot, are untouched."""
    words = toy_language()
    params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 60})
    with Engine(toy_spec(toy(), "mtp", 4, parallel=4)) as engine:
        answers: dict[str, Answer] = {}
        prompts = {str(i): engine.vocab.tokenize(text) for i, text in enumerate(PROMPTS)}
        for id, tokens in prompts.items():
            engine.submit(id, tokens, params)
        for _ in range(6):
            take(answers, engine.step())
        engine.cancel("1")
        take(answers, engine.step())
        assert answers["1"].reason == "cancelled"
        engine.submit("again", prompts["1"], params)
        drain(engine, answers)
    prompts["again"] = prompts["1"]
    for id, tokens in prompts.items():
        expected = words.say(tokens[-1], 60)
        assert answers[id].tokens == (expected[:len(answers[id].tokens)] if id == "1" else expected)
    assert 0 < len(answers["1"].tokens) < 60


def test_probability_floor_shortens_drafts() -> None:
    """With draft_p_min the drafter stops where it is unsure; what is said stays the same."""
    plain = answers_of(toy_spec(toy(exact=False)), logprobs=5)
    floor = answers_of(toy_spec(toy(exact=False), "mtp", 6, p_min=0.995, parallel=4), logprobs=5)
    free = answers_of(toy_spec(toy(exact=False), "mtp", 6, parallel=4), logprobs=5)
    for p, f in zip(plain, floor, strict=True):
        assert_same_or_near_tie(p, f)
    rate = [sum(a.stats["accepted"] for a in run) / sum(a.stats["drafted"] for a in run) for run in (floor, free)]
    assert rate[0] > rate[1]


def test_a_model_without_mtp_says_so_once_and_goes_on() -> None:
    with Engine(toy_spec(toy("toy-llama"), "mtp")) as engine:
        assert [note for note in engine.info["notes"] if "no MTP block" in note]
        assert engine.info["drafter"] is None
        (answer,) = ask(engine, ["abc"])
    assert answer.tokens == toy_language(name="toy-llama").say(ord("c"), 60)
    assert answer.stats["drafted"] == 0


def test_sampled_answers_are_the_same_with_and_without_mtp() -> None:
    """The draw of each token is seeded by (seed, place), so the very same tokens come out, not only the same
    distribution.
    """
    params: dict[str, Any] = {"temperature": 4.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    plain = answers_of(toy_spec(toy()), **params)
    drafted = answers_of(toy_spec(toy(), "mtp", 4, parallel=4), **params)
    assert len({tuple(a.tokens) for a in plain}) > 1
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert math.isfinite(drafted[0].stats["draft_s"])


@pytest.mark.parametrize(("arch", "blocks", "kind", "said"), [
    ("qwen35", 1, "mtp", ""), ("glm4moe", 1, "mtp", ""), ("qwen35", 3, "none", "3 MTP blocks"),
    ("gemma4-assistant", 1, "none", "gemma4-assistant"), ("qwen35", 0, "none", "no MTP block")])
def test_blocks_that_are_not_supported_are_named(arch: str, blocks: int, kind: str, said: str) -> None:
    """Several heads, or a block that shares the target's cache: one line, and on without."""
    model = cast(Model, SimpleNamespace(n_layer_nextn=blocks, meta=lambda _key: arch))
    notes: list[str] = []
    assert loading._drafter_kind(toy_spec("x.gguf", "auto"), model, notes) == kind
    assert len(notes) == (kind == "none")
    assert said in "".join(notes)
