"""Prompt lookup in the engine: the same answers on every architecture, and drafts that are right where text repeats."""

from __future__ import annotations

import dataclasses

import pytest

from hydra.head.engine import Engine
from hydra.head.spec import DraftSpec
from tests.engine_support import PROMPTS, answers_of, ask, first_difference, toy, toy_spec


@pytest.mark.parametrize("name", ["toy", "toy-llama", "toy-gemma"])
@pytest.mark.parametrize("slots", [1, 4])
def test_answers_are_the_same(name: str, slots: int) -> None:
    path = toy(name, exact=False)
    plain = answers_of(toy_spec(path), max_tokens=150)
    drafted = answers_of(toy_spec(path, "lookup", 4, parallel=slots), max_tokens=150)
    for one, other in zip(plain, drafted, strict=True):
        assert first_difference(one.tokens, other.tokens) is None
    assert sum(a.stats["drafted"] for a in drafted) > 0


def test_what_repeats_is_guessed() -> None:
    """The exact model's cycle of 96 tokens: from the second time round nearly every guess is right."""
    with Engine(toy_spec(toy("toy-llama"), "lookup", 4)) as engine:
        (answer,) = ask(engine, PROMPTS[:1], max_tokens=400)
    assert answer.stats["acceptance_rate"] > 0.9
    assert answer.stats["steps"] < 200


def test_the_choice_of_length_stops_useless_guessing() -> None:
    """Adaptive lookup on a text whose guesses are always wrong drafts little."""
    path = toy("toy-llama")
    with Engine(toy_spec(path, "lookup", 4, adaptive=True)) as engine:
        # Each pair is followed by what never comes.
        prompt = [token for i in range(33, 120) for token in (i, i + 1, 10)]
        (answer,) = ask(engine, [prompt], max_tokens=90)
    assert answer.stats["drafted"] <= 90


def test_it_takes_over_where_there_is_no_mtp() -> None:
    """`[mtp] lookup = true` is for models without an MTP block; one that has it drafts with it."""
    for name, expected in (("toy-llama", "lookup"), ("toy", "mtp")):
        spec = dataclasses.replace(toy_spec(toy(name)), draft=DraftSpec("auto", 3, lookup=True))
        with Engine(spec) as engine:
            assert engine.info["drafter"] == expected
            assert len(engine.info["notes"]) == (name == "toy-llama")
