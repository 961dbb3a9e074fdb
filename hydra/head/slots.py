"""What the engine keeps for each request and each slot: plain state, no decisions and no llama.cpp calls.

A **request** is one answer being made. A **slot** is one sequence of the target context's memory, with the tokens that
lie in it; they stay after a request ends, so that the next prompt with the same beginning need not be computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .sampling import Sampler, SamplingParams
from .streaming import TextStream


@dataclass(frozen=True)
class Chunk:
    """Tokens that were sampled in one step, and the text they complete."""

    id: str
    tokens: list[int]
    text: str
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Done:
    """The end of an answer: ``reason`` is stop, length, cancelled or error."""

    id: str
    reason: str
    stats: dict[str, Any]
    stop: str | None = None


@dataclass(frozen=True)
class Failed:
    """One request that cannot be served."""

    id: str
    kind: str
    message: str
    hint: str


Event = Chunk | Done | Failed


@dataclass
class DraftStats:
    """What drafting did; ``tried_at[k]`` and ``accepted_at[k]`` count the draft's token k.

    ``draft_s`` and ``verify_s`` are spent in llama.cpp, ``other_s`` outside it while decoding: sampling and Python.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """One verified draft. A token after the first refusal was not tried."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.tried_at) < drafted:
            self.tried_at.append(0)
            self.accepted_at.append(0)
        for k in range(min(drafted, accepted + 1)):
            self.tried_at[k] += 1
            self.accepted_at[k] += k < accepted

    def to_dict(self) -> dict[str, Any]:
        """``mean_acceptance_length`` includes the token that verification itself gives."""
        return {"drafted": self.drafted, "accepted": self.accepted,
                "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else None,
                "mean_acceptance_length": round(1 + self.accepted / self.rounds, 4) if self.rounds else None,
                "draft_rounds": self.rounds, "draft_s": round(self.draft_s, 6), "verify_s": round(self.verify_s, 6),
                "other_s": round(self.other_s, 6),
                "tried_at": list(self.tried_at), "accepted_at": list(self.accepted_at)}


class Request:
    """One answer in the making. ``resume`` = tokens of it that the caller already has: they are not sent again.

    ``exact``: these are taken one step after the other, as they were the first time, because a kernel rounds
    differently for a wider batch and a near tie may then fall otherwise. Else they are read like a prompt, which is
    faster.
    """

    def __init__(self, id: str, prompt: Sequence[int], params: SamplingParams, resume: Sequence[int] = (),
                 exact: bool = True) -> None:
        self.id = id
        read = () if exact else resume
        self.prompt = [*prompt, *read]  # all that must be in the memory before the next token can be sampled
        self.n_prompt = len(prompt)
        self.params = params
        self.generated: list[int] = list(read)
        self.replay: deque[int] = deque(resume if exact else ())  # still to be taken instead of sampled
        self.n_resumed = len(resume)
        self.stream = TextStream(params.stop)
        self.sampler: Sampler | None = None
        self.preserved: frozenset[int] = frozenset()  # control tokens whose text is part of the answer
        self.n_cached = 0
        self.checkpoint_at = 0
        self.draft = DraftStats()
        self.steps = 0
        self.created_at = time.perf_counter()
        self.admitted_at = 0.0
        self.first_at = 0.0
        self.ended_at = 0.0

    def stats(self) -> dict[str, Any]:
        """Counts, times and speeds of this request; speeds are None where nothing was measured."""
        end = self.ended_at or time.perf_counter()
        fresh = len(self.prompt) - self.n_cached
        made = len(self.generated) - self.n_resumed
        prefill_s = (self.first_at or end) - self.admitted_at if self.admitted_at else 0.0
        decode_s = end - self.first_at if self.first_at else 0.0
        return {"prompt_tokens": self.n_prompt, "completion_tokens": len(self.generated),
                "cached_tokens": self.n_cached, "resumed_tokens": self.n_resumed,
                "queue_s": round((self.admitted_at or end) - self.created_at, 6),
                "prefill_s": round(prefill_s, 6), "decode_s": round(decode_s, 6), "steps": self.steps,
                "prefill_tps": round(fresh / prefill_s, 3) if prefill_s > 0 and fresh else None,
                # The first token comes out of the prefill, so it is not one of decode's.
                "decode_tps": round((made - 1) / decode_s, 3) if decode_s > 0 and made > 1 else None,
                "seed": self.params.seed, **self.draft.to_dict()}


class Slot:
    """One sequence of the memory.

    ``tokens`` lie in the memory at positions 0, 1, …; ``next_token`` was sampled and does not yet. ``rollback`` = how
    many of the last tokens a recurrent memory can still forget (its snapshots are overwritten by the next batch).
    ``checkpoint`` = a number of tokens whose state is kept beside (0: none); ``kept`` is what takes it back.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.tokens: list[int] = []
        self.request: Request | None = None
        self.next_token: int | None = None
        self.rollback = 0
        self.checkpoint = 0
        self.kept = b""
        self.used_at = 0.0

    @property
    def filling(self) -> bool:
        return self.request is not None and self.next_token is None

    @property
    def decoding(self) -> bool:
        return self.request is not None and self.next_token is not None

    def common_prefix(self, prompt: Sequence[int]) -> int:
        """How many tokens at the beginning of ``prompt`` already lie in this slot."""
        mine = self.tokens
        low, high = 0, min(len(mine), len(prompt))
        if mine[:high] == list(prompt[:high]):
            return high
        while low < high:  # slices are compared in C: much faster than a loop over 60,000 tokens
            middle = (low + high + 1) // 2
            if mine[low:middle] == list(prompt[low:middle]):
                low = middle
            else:
                high = middle - 1
        return low
