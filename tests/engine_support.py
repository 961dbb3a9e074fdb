"""What the engine's tests share: toy models made once, an engine's answers collected, and peers as processes.

Not a test. The models are tiny and made by hydra.bench.synthetic; everything runs on the CPU with one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.bench import synthetic
from hydra.head.engine import Engine
from hydra.head.sampling import SamplingParams
from hydra.head.slots import Chunk, Done, Failed
from hydra.head.spec import DraftSpec, EngineSpec

PROMPTS = ("Hello you, this is a prompt\n", "abc", "What?",
           "Another one that is longer than one ubatch of 32 tokens, so that it takes more than one of them.")
MAX_STEPS = 5000


@cache
def toy(name: str = "toy", *, acceptance: float = 0.7, exact: bool = True) -> str:
    """The path of a toy model, made once per machine."""
    return str(synthetic.model(name, acceptance=acceptance, exact=exact))


def toy_language(acceptance: float = 0.7, name: str = "toy") -> synthetic.Language:
    return synthetic.language(synthetic.SHAPES[name], acceptance)


def toy_spec(path: str, kind: str = "none", n_max: int = 3, *, adaptive: bool = False, p_min: float = 0.0,
             **changes: Any) -> EngineSpec:
    """A small engine; plain CPU buffers, so that a peer rounds as the head does."""
    base = EngineSpec(path, ctx_size=1024, batch_size=64, ubatch_size=32, threads=1, use_extra_bufts=False,
                      draft=DraftSpec(kind=kind, n_max=n_max, p_min=p_min, adaptive=adaptive))
    return dataclasses.replace(base, **changes)


@dataclasses.dataclass
class Answer:
    """Everything that came out for one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    chunks: int = 0
    reason: str = ""
    stop: str | None = None
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: Failed | None = None


def take(answers: dict[str, Answer], events: Sequence[Any]) -> None:
    """Book events to their answers."""
    for event in events:
        answer = answers.setdefault(event.id, Answer())
        if isinstance(event, Chunk):
            answer.tokens += event.tokens
            answer.text += event.text
            answer.logprobs += event.logprobs or []
            answer.chunks += 1
        elif isinstance(event, Done):
            answer.reason, answer.stats, answer.stop = event.reason, event.stats, event.stop
        else:
            answer.error = event


def drain(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Step until nothing is left to do."""
    answers = {} if answers is None else answers
    for _ in range(MAX_STEPS):
        if not engine.busy:
            return answers
        take(answers, engine.step())
    raise AssertionError(f"still busy after {MAX_STEPS} steps")


def ask(engine: Engine, prompts: Sequence[str | Sequence[int]], **params: Any) -> list[Answer]:
    """Answers to prompts that are sent together, in their order."""
    params.setdefault("temperature", 0)
    params.setdefault("max_tokens", 60)
    for i, prompt in enumerate(prompts):
        tokens = engine.vocab.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        engine.submit(str(i), tokens, SamplingParams.from_dict(params))
    answers = drain(engine)
    return [answers[str(i)] for i in range(len(prompts))]


def answers_of(spec: EngineSpec, prompts: Sequence[str | Sequence[int]] = PROMPTS, **params: Any) -> list[Answer]:
    """The same from an engine made for it."""
    with Engine(spec) as engine:
        return ask(engine, prompts, **params)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers part, None where they do not."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def model_file(path: str) -> Path:
    return Path(path)
