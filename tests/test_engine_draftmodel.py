"""A small draft model: the same answers whatever it guesses, its memory known, and none that does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hydra.errors import EngineError, ModelError
from hydra.head import loading
from hydra.head.draftmodel import ModelDrafter
from hydra.head.engine import Engine
from hydra.head.sampling import SamplingParams
from hydra.head.spec import DraftSpec, EngineSpec
from tests.engine_support import PROMPTS, Answer, answers_of, ask, drain, first_difference, take, toy, toy_spec


def with_draft(path: str, draft: str, n_max: int = 4, p_min: float = 0.0, **changes: Any) -> EngineSpec:
    spec = toy_spec(path, **changes)
    return dataclasses.replace(spec, draft=DraftSpec("model", n_max, p_min, False, model=draft))


@pytest.mark.parametrize("name", ["toy", "toy-llama", "toy-gemma"])
@pytest.mark.parametrize("slots", [1, 4])
def test_answers_are_the_same(name: str, slots: int) -> None:
    """Drafts of the exact model for one with everything in play: many are right and many are not."""
    path, draft = toy(name, exact=False), toy("toy-llama")
    plain = answers_of(toy_spec(path), max_tokens=80)
    with Engine(with_draft(path, draft, 6, parallel=slots)) as engine:
        assert engine.info["drafter"] == "model"
        for n in (1, 2, 3, 6):
            drafted = ask(engine, PROMPTS, max_tokens=80, draft_n=n)
            assert [first_difference(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)] == [None] * 4
            accepted, tried = (sum(a.stats[key] for a in drafted) for key in ("accepted", "drafted"))
            assert 0 < accepted < tried


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """So every token of it is in its place: prompt, accepted drafts, rounds without one, and after a refusal."""
    path = toy("toy-llama", exact=False)
    with Engine(with_draft(path, path, parallel=2)) as engine:
        for params in ({}, {"draft_n": 1}, {"draft_n": 0}, {}):
            answers = ask(engine, [*PROMPTS, PROMPTS[0] + "and more of it"], max_tokens=70, **params)
            if params.get("draft_n") != 0:
                assert all(answer.stats["acceptance_rate"] == 1 for answer in answers)


def test_drafting_again_after_a_long_time_without_and_after_a_cancellation() -> None:
    path = toy("toy-llama", exact=False)
    plain = answers_of(toy_spec(path), PROMPTS[:1], max_tokens=200)[0].tokens
    with Engine(with_draft(path, path)) as engine:
        prompt = engine.vocab.tokenize(PROMPTS[0])
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 200, "draft_n": 0})
        for cancelled in (True, False):
            answers: dict[str, Answer] = {}
            engine.submit("a", prompt, params)
            while len(answers.get("a", Answer()).tokens) < 120:
                take(answers, engine.step())
            request = engine.slots[0].request
            assert request is not None
            request.params = dataclasses.replace(params, draft_n=4)
            for _ in range(3):
                take(answers, engine.step())
            if cancelled:
                engine.cancel("a")
            drain(engine, answers)
            assert answers["a"].tokens == plain[:len(answers["a"].tokens)]
            assert answers["a"].stats["acceptance_rate"] == 1
        assert len(answers["a"].tokens) == 200


def test_a_probability_floor_shortens_drafts() -> None:
    path, draft = toy("toy-llama", exact=False), toy("toy-gemma", exact=False)
    runs = [answers_of(with_draft(path, draft, 6, p_min), max_tokens=80) for p_min in (0.0, 0.99)]
    assert [a.tokens for a in runs[0]] == [a.tokens for a in runs[1]]
    drafted = [sum(a.stats["drafted"] for a in run) for run in runs]
    assert drafted[0] > drafted[1]


@pytest.mark.parametrize(("draft", "said"), [("toy", "recurrent"), ("tiny", "4096 tokens")])
def test_models_that_cannot_draft_are_refused(draft: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Engine(with_draft(toy("toy-llama"), toy(draft)))
    with pytest.raises(ModelError, match="cannot be loaded"):
        Engine(with_draft(toy("toy-llama"), "/nonexistent/draft.gguf"))
    with pytest.raises(EngineError, match="names none"):
        with_draft(toy("toy-llama"), "").check()


def test_other_words_for_one_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.head.llama import Vocab

    real, handles = Vocab.piece, set()

    def piece(self: Vocab, token: int, *, special: bool = False) -> bytes:
        handles.add(self.handle)
        return b"?" if token == 0 and len(handles) > 1 and self.handle == max(handles) else real(
            self, token, special=special)

    monkeypatch.setattr(Vocab, "piece", piece)
    with pytest.raises(ModelError, match="Token 0 of the draft model"):
        Engine(with_draft(toy("toy-llama"), toy("toy-gemma")))


def test_its_memory_is_known_before_the_load() -> None:
    spec = with_draft(toy("toy-llama"), toy("toy-gemma"))
    place = loading.find_devices(spec, loading.read_shape(spec.model_path))
    expected = loading.estimate(spec, place).by_node["head"].to_dict()
    plain = toy_spec(toy("toy-llama"))
    alone = loading.estimate(plain, place).by_node["head"].to_dict()
    assert expected["model"] > 1.5 * alone["model"]
    assert expected["draft_context"] > 0 < expected["draft_compute"]
    with Engine(spec) as engine:
        real = engine.info["memory"]["head"]
    # Weights that are mapped from the file are counted by the file's pages.
    assert {key: real[key] for key in ("context", "draft_context", "draft_compute")} == {
        key: expected[key] for key in ("context", "draft_context", "draft_compute")}


def test_auto_takes_the_draft_model_that_is_given() -> None:
    spec = dataclasses.replace(toy_spec(toy()), draft=DraftSpec("auto", 3, model=toy("toy-llama")))
    with Engine(spec) as engine:
        assert isinstance(engine._drafter, ModelDrafter)
