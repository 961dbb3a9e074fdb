"""Slots, queue, prefix reuse, context limits, cancellation and continuation of the engine, on toy models."""

from __future__ import annotations

from typing import Any

import pytest

from hydra.errors import EngineError, ModelError, RequestError
from hydra.head.cells import CHECKPOINT_TAIL
from hydra.head.engine import Engine
from hydra.head.sampling import SamplingParams
from hydra.head.spec import DraftSpec, EngineSpec
from tests.engine_support import PROMPTS, Answer, answers_of, ask, drain, take, toy, toy_language, toy_spec

ARCHITECTURES = ("toy", "toy-llama", "toy-gemma")


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0, "max_tokens": 20, **more})


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_answers_do_not_depend_on_who_else_is_served(name: str, slots: int) -> None:
    words = toy_language(name=name)
    with Engine(toy_spec(toy(name), parallel=slots)) as engine:
        for prompt, answer in zip(PROMPTS * 2, ask(engine, PROMPTS * 2), strict=True):
            assert answer.tokens == words.say(engine.vocab.tokenize(prompt)[-1], 60)
            assert answer.reason == "length"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_common_beginning_is_not_read_again(name: str) -> None:
    """A second turn that begins with the first turn and its answer pays for its new tokens only."""
    with Engine(toy_spec(toy(name, exact=False))) as engine:
        prompt = engine.vocab.tokenize(PROMPTS[3])
        (first,) = ask(engine, [prompt], max_tokens=12)
        turn = [*prompt, *first.tokens, *engine.vocab.tokenize("And then?")]
        (second,) = ask(engine, [turn], max_tokens=12)
        assert second.stats["cached_tokens"] == len(prompt) + len(first.tokens) - 1  # the last one was never computed
    assert second.tokens == answers_of(toy_spec(toy(name, exact=False)), [turn], max_tokens=12)[0].tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_a_shorter_or_other_prompt_after_a_longer_one(name: str, kind: str) -> None:
    """Whatever is kept or forgotten of the slot, the answer is that of a fresh engine."""
    path = toy(name, exact=False)
    texts = [PROMPTS[3], PROMPTS[3][:40], PROMPTS[3][:40] + "another end", PROMPTS[3], "abc", "abc"]
    with Engine(toy_spec(path, kind)) as engine:
        for text in texts:
            (warm,) = ask(engine, [text], max_tokens=15)
            assert warm.tokens == answers_of(toy_spec(path, kind), [text], max_tokens=15)[0].tokens


def test_the_same_prompt_again_costs_one_token() -> None:
    """A memory that can be cut back keeps all of the prompt but the token whose logits are needed."""
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        for expected in (0, len(PROMPTS[3]) - 1, len(PROMPTS[3]) - 1):
            (answer,) = ask(engine, [PROMPTS[3]])
            assert answer.stats["cached_tokens"] == expected


def test_the_slot_with_most_of_the_prompt_is_chosen() -> None:
    with Engine(toy_spec(toy("toy-llama"), parallel=2)) as engine:
        a, b = [97] * 40, [98] * 40
        ask(engine, [a, b], max_tokens=2)
        for prompt in (a, b, a):
            (answer,) = ask(engine, [[*prompt, 99]], max_tokens=2)
            assert answer.stats["cached_tokens"] == 40


def test_requests_beyond_the_slots_wait_in_order() -> None:
    with Engine(toy_spec(toy("toy-llama"), parallel=2)) as engine:
        for i in range(6):
            engine.submit(str(i), [97 + i] * 5, greedy())
        order: list[str] = []
        while engine.busy:
            order += [event.id for event in engine.step() if hasattr(event, "reason")]
        assert order == [str(i) for i in range(6)]


def test_reading_a_prompt_does_not_stop_a_running_answer() -> None:
    """While one slot reads 600 tokens, the other one gets a token in every step."""
    with Engine(toy_spec(toy("toy-llama"), parallel=2, ctx_size=2048)) as engine:
        engine.submit("runs", [97, 98], greedy(max_tokens=500))
        for _ in range(5):
            engine.step()
        engine.submit("reads", [97] * 600, greedy())
        steps = with_token = 0
        while not any(slot.decoding and slot.request and slot.request.id == "reads" for slot in engine.slots):
            events = engine.step()
            steps += 1
            with_token += any(getattr(e, "tokens", None) and e.id == "runs" for e in events)
        assert steps >= 3
        assert with_token == steps


def test_cancelled_within_one_step() -> None:
    with Engine(toy_spec(toy("toy-llama"), parallel=1)) as engine:
        engine.submit("runs", [97], greedy(max_tokens=500))
        engine.submit("waits", [98], greedy())
        engine.step()
        for id in ("waits", "runs"):
            engine.cancel(id)
            events = engine.step()
            assert [e.reason for e in events if hasattr(e, "reason") and e.id == id] == ["cancelled"]
        assert not engine.busy
        engine.cancel("unknown")
        engine.step()
        (answer,) = ask(engine, ["abc"])
    assert answer.tokens == toy_language(name="toy-llama").say(ord("c"), 60)


def test_a_prompt_that_does_not_fit_is_refused_with_numbers() -> None:
    with Engine(toy_spec(toy("toy-llama"), ctx_size=256)) as engine:
        with pytest.raises(RequestError, match=r"256 tokens; the context holds 256"):
            engine.submit("long", [97] * 256, greedy())
        with pytest.raises(RequestError, match="empty"):
            engine.submit("empty", [], greedy())
        with pytest.raises(RequestError, match="Token 512"):
            engine.submit("odd", [512], greedy())
        (answer,) = ask(engine, [[97] * 255])
        assert (len(answer.tokens), answer.reason) == (2, "length")


def test_slots_share_the_context_and_idle_ones_make_room() -> None:
    """Four slots in 512 cells: what idle slots remember is forgotten when running requests need the cells."""
    with Engine(toy_spec(toy("toy-llama"), ctx_size=512, parallel=4)) as engine:
        ask(engine, [[97 + i] * 100 for i in range(4)], max_tokens=5)
        (answer,) = ask(engine, [[120] * 400], max_tokens=100)
        assert answer.tokens == toy_language(name="toy-llama").say(120, 100)
        both = ask(engine, [[97] * 300, [98] * 300], max_tokens=10)  # together too many: the second waits
        assert [len(a.tokens) for a in both] == [10, 10]


def test_shifting_when_asked() -> None:
    """With context_shift an answer outlives the context on a memory that allows it; without, it ends there."""
    prompt = [97] * 100
    for shift, expected in ((False, 157), (True, 400)):
        spec = toy_spec(toy("toy-llama"), ctx_size=256, context_shift=shift)
        (answer,) = answers_of(spec, [prompt], max_tokens=400)
        assert answer.tokens == toy_language(name="toy-llama").say(97, expected)


@pytest.mark.parametrize("kind", ["none", "mtp"])
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("cut", [1, 7, 13])
@pytest.mark.parametrize("exact", [True, False])
def test_an_answer_continued_elsewhere_is_the_same_answer(kind: str, temperature: float, cut: int, exact: bool) -> None:
    """Tokens already sent are retaken (or read), not sampled; the rest is what it would have been."""
    params = {"temperature": temperature, "max_tokens": 30, "seed": 11, "repeat_penalty": 1.1, "stop": ["\x00never"]}
    path = toy(exact=False)
    (whole,) = answers_of(toy_spec(path, kind), PROMPTS[:1], **params)
    with Engine(toy_spec(path, kind, exact_resume=exact)) as engine:
        prompt = engine.vocab.tokenize(PROMPTS[0])
        engine.submit("again", prompt, SamplingParams.from_dict(params), resume=whole.tokens[:cut])
        rest = drain(engine)["again"]
    assert rest.tokens == whole.tokens[cut:]
    assert whole.text.endswith(rest.text)
    assert rest.stats["completion_tokens"] == whole.stats["completion_tokens"]


@pytest.mark.parametrize("exact", [True, False])
def test_continuing_an_answer_that_was_complete(exact: bool) -> None:
    said = toy_language(name="toy-llama").say(97, 3)
    with Engine(toy_spec(toy("toy-llama"), exact_resume=exact)) as engine:
        engine.submit("x", [97], greedy(max_tokens=3), resume=said)
        engine.submit("y", [97], greedy(max_tokens=9), resume=[*said, engine.vocab.eos])
        engine.submit("z", [97], greedy(max_tokens=9, stop=[engine.vocab.detokenize(said[1:])]), resume=said)
        answers = drain(engine)
    assert [(answers[name].tokens, answers[name].reason) for name in "xyz"] == [
        ([], "length"), ([], "stop"), ([], "stop")]


def test_end_of_text_ends_the_answer() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        eos = engine.vocab.eos
        (answer,) = ask(engine, ["abc"], logit_bias={eos: 1000.0})
        assert (answer.tokens, answer.text, answer.reason) == ([eos], "", "stop")
        (answer,) = ask(engine, ["abc"], logit_bias={eos: 1000.0}, ignore_eos=True, max_tokens=5)
        assert (len(answer.tokens), answer.reason) == (5, "length")


def test_no_answer_wanted() -> None:
    with Engine(toy_spec(toy("toy-llama"))) as engine:
        (answer,) = ask(engine, ["abc"], max_tokens=0)
    assert (answer.tokens, answer.reason) == ([], "length")


def test_embeddings_of_equal_texts_are_equal() -> None:
    with Engine(toy_spec(toy("toy-llama", exact=False))) as engine:
        a, b, c = (engine.embed(engine.vocab.tokenize(text)) for text in ("one text", "one text", "another"))
        assert len(a) == 256
        assert a == b != c
        with pytest.raises(RequestError):
            engine.embed([])


def test_statistics_of_a_request() -> None:
    (answer,) = answers_of(toy_spec(toy(), "mtp", 3), ["abc"], max_tokens=40)
    stats = answer.stats
    assert stats["prompt_tokens"] == 3
    assert stats["completion_tokens"] == 40
    assert stats["drafted"] >= stats["accepted"] > 0
    assert stats["acceptance_rate"] == pytest.approx(stats["accepted"] / stats["drafted"], abs=1e-3)
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["accepted"] / stats["draft_rounds"], abs=1e-3)
    assert stats["draft_s"] > 0
    assert stats["verify_s"] > 0
    # The first token comes from reading the prompt, each step gives what it accepted and one more.
    assert 1 + stats["steps"] + stats["accepted"] == 40


def test_specs_that_cannot_be() -> None:
    for change, match in (({"layers": {"nobody": 3}}, "nobody"), ({"parallel": 0}, "parallel"),
                          ({"flash_attn": "maybe"}, "maybe"), ({"draft": DraftSpec(kind="magic")}, "magic")):
        with pytest.raises(EngineError, match=match):
            toy_spec("x.gguf", **change).check()
    with pytest.raises(EngineError, match="does not know"):
        EngineSpec.from_dict({"model_path": "x", "unheard_of": 1})
    with pytest.raises(ModelError, match="cannot be loaded"):
        Engine(toy_spec("/nonexistent/model.gguf"))


def test_cancelling_does_not_disturb_the_others() -> None:
    words = toy_language()
    with Engine(toy_spec(toy(), parallel=3)) as engine:
        answers: dict[str, Answer] = {}
        for i in range(3):
            engine.submit(str(i), [97 + i], greedy(max_tokens=40))
        for _ in range(4):
            take(answers, engine.step())
        engine.cancel("1")
        drain(engine, answers)
    assert [answers[i].reason for i in "012"] == ["length", "cancelled", "length"]
    assert answers["2"].tokens == words.say(99, 40)


LONG = "A long prompt, longer than what a checkpoint is made for, with many words in it. " * 3


@pytest.mark.parametrize("kind", ["none", "mtp"])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_recurrent_state_is_kept_for_another_ending(kind: str, slots: int) -> None:
    """The hybrid model cannot cut its state back, but goes on from the checkpoint some tokens before the prompt's
    end.
    """
    path = toy(exact=False)
    turns = [LONG + "Assistant:", LONG + "Assistant:", LONG + "Answer: yes. And then?", LONG + "Assistant:",
             LONG[:-1] + "Assistant:", "Something else entirely, and short."]
    kept = len(LONG + "Assistant:") - CHECKPOINT_TAIL
    cached = []
    with Engine(toy_spec(path, kind, parallel=slots)) as engine:
        for text in turns:
            (warm,) = ask(engine, [text], max_tokens=15)
            assert warm.tokens == answers_of(toy_spec(path, kind), [text], max_tokens=15)[0].tokens, text[-20:]
            cached.append(warm.stats["cached_tokens"])
    assert cached == [0, kept, kept, kept, kept, 0]


@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_no_room_ends_one_request_and_not_the_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should llama.cpp refuse a batch for want of cells, the longest request fails; the others are answered rightly."""
    words = toy_language()
    with Engine(toy_spec(toy(), kind, parallel=3)) as engine:
        answers: dict[str, Answer] = {}
        for i in range(3):
            engine.submit(str(i), [97 + i] * (3 if i != 1 else 9), greedy(max_tokens=40))
        for _ in range(4):
            take(answers, engine.step())
        real = engine._target.decode
        monkeypatch.setattr(engine._target, "decode", lambda _batch: 1)
        take(answers, engine.step())
        monkeypatch.setattr(engine._target, "decode", real)
        drain(engine, answers)
    assert answers["1"].error is not None
    assert "no room" in answers["1"].error.message
    for id, last in (("0", 97), ("2", 99)):
        assert answers[id].tokens == words.say(last, 40)
        assert answers[id].stats["drafted"] == 0 or answers[id].stats["acceptance_rate"] > 0.2


@pytest.mark.parametrize("kind", ["none", "mtp", "lookup"])
def test_everything_is_used_once_at_the_start_and_leaves_nothing(kind: str) -> None:
    """The warm-up reads and drafts in every slot; the first answers are those of an engine that never did."""
    with Engine(toy_spec(toy(exact=False), kind, parallel=2)) as engine:
        assert [slot.tokens for slot in engine.slots] == [[], []]
        assert all(slot.kept for slot in engine.slots)
        assert engine.stats.drafted == 0
        engine._cells.warm_up(engine._batch, 32)  # as on a GPU: a whole ubatch
        answers = ask(engine, PROMPTS[:2], logprobs=1)
    plain = answers_of(toy_spec(toy(exact=False)), PROMPTS[:2], logprobs=1)
    assert [a.tokens for a in answers] == [p.tokens for p in plain]


def test_a_model_whose_logits_are_no_numbers_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from hydra.head.llama import Context

    monkeypatch.setattr(Context, "logits", lambda self, _index: np.full(512, np.nan, np.float32))
    with pytest.raises(EngineError, match="not finite"):
        Engine(toy_spec(toy("toy-llama")))
