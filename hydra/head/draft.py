"""Guesses the next tokens cheaply: the model's own MTP block in a context of its own.

Knows the draft context and each slot's place in it. Does not know requests, samplers or acceptance: it is told what the
target has computed, and asked for guesses.

The draft context pairs each token with the target's hidden row of the token **before** it. It has to see every token of
the target; but not at once: pairs wait in ``queue`` and are decoded together with the first step of the next draft, so
that a verified draft costs no catch-up decode of its own, and rounds without a draft cost nothing at all.

Source: common/speculative.cpp (draft-mtp) of the pinned llama.cpp, which decodes the catch-up each round;
docs/engine.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hydra.errors import EngineError

from .llama import Batch, Context

Rows = npt.NDArray[np.float32]


class Drafter(Protocol):
    """What the engine asks of any way of drafting."""

    name: str
    n_max: int
    needs_hidden: bool

    def filled(self, slot: int, tokens: Sequence[int], first: int) -> None:
        """The target decoded prompt tokens; the first is number ``first`` of its batch."""

    def flush(self) -> None:
        """The target batch that ``filled`` spoke of ends here."""

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        """The target decoded and kept these tokens of a decoding slot."""

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        """Up to ``n`` guesses for each (slot, its tokens in memory, its next token), fewer where it has none."""

    def rewind(self, slot: int, n_tokens: int) -> None:
        """The target's slot now holds its first ``n_tokens`` tokens only."""

    def close(self) -> None: ...


class _Seat:
    """One slot's place in the draft context.

    Positions below ``fed`` are final. The ``n`` queued (token, row) pairs follow them; ``pending`` is the row that the
    token after those pairs with. ``ahead``: the last draft has already fed the slot's next token.
    """

    def __init__(self, n_embd: int, capacity: int) -> None:
        self.fed = 0
        self.n = 0
        self.ahead = False
        self.tokens = np.zeros(capacity, np.int32)
        self.rows: Rows = np.zeros((capacity, n_embd), np.float32)
        self.pending: Rows = np.zeros(n_embd, np.float32)


class MtpDrafter:
    """Drafts with the MTP block in ``context`` (made with ``mtp_of=target``), for ``n_slots`` slots.

    ``context`` must take batches of ``batch_capacity`` tokens.
    """

    name = "mtp"
    needs_hidden = True

    def __init__(self, target: Context, context: Context, *, n_slots: int, n_batch: int, n_max: int,
                 p_min: float) -> None:
        self.n_max = n_max
        self._p_min = p_min
        self._target = target
        self._context = context
        n_embd = target.model.n_embd
        self._capacity = queue_capacity(n_max)
        self._batch = Batch(batch_capacity(n_slots, n_batch, n_max), n_embd)
        self._seats = [_Seat(n_embd, self._capacity) for _ in range(n_slots)]
        target.use_nextn(masked=False)
        context.use_nextn(masked=True)

    def filled(self, slot: int, tokens: Sequence[int], first: int) -> None:
        seat = self._seats[slot]
        self._drain(slot)
        batch, count = self._batch, len(tokens)
        at = batch.add(tokens, seat.fed, slot, output="none")
        batch.embd[at] = seat.pending
        if count > 1:
            self._target.copy_hidden(first, count - 1, batch.embd[at + 1:at + count])
        self._target.copy_hidden(first + count - 1, 1, seat.pending)
        seat.fed += count

    def flush(self) -> None:
        if self._batch.n:
            self._decode()
            self._batch.clear()

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        seat = self._seats[slot]
        count = len(tokens)
        if seat.ahead:
            # draft() fed tokens[0] with the right row; the guesses after it had rows of the draft's own, and go again.
            fresh, rows_from = tokens[1:], 0
            seat.ahead = False
        else:
            fresh, rows_from = tokens, -1
        if seat.n + len(fresh) > self._capacity:
            self._drain(slot)
            self.flush()
        at, end = seat.n, seat.n + len(fresh)
        seat.tokens[at:end] = fresh
        if rows_from < 0:
            seat.rows[at] = seat.pending
            at += 1
        if end > at:
            self._target.copy_hidden(first, end - at, seat.rows[at:end])
        seat.n = end
        self._target.copy_hidden(first + count - 1, 1, seat.pending)

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        context, batch = self._context, self._batch
        guesses: dict[int, list[int]] = {}
        active: list[tuple[int, int]] = []
        batch.clear()
        for slot, _tokens, token in jobs:
            seat = self._seats[slot]
            context.remove(slot, seat.fed)  # the last draft's guesses
            if seat.n:
                at = batch.add(seat.tokens[:seat.n], seat.fed, slot, output="none")
                batch.embd[at:at + seat.n] = seat.rows[:seat.n]
            last = batch.add_one(token, seat.fed + seat.n, slot)
            batch.embd[last] = seat.pending
            seat.fed += seat.n + 1
            seat.n = 0
            seat.ahead = True
            guesses[slot] = []
            active.append((slot, last))
        for step in range(n):
            self._decode()
            found: list[tuple[int, int, Rows]] = []
            for slot, index in active:
                logits = context.logits(index)
                guess = int(logits.argmax())
                if self._p_min > 0 and _probability(logits, guess) < self._p_min:
                    continue
                guesses[slot].append(guess)
                found.append((slot, guess, context.hidden(index)))
            if not found or step + 1 == n:
                break
            batch.clear()
            active = []
            for slot, guess, row in found:
                at = batch.add_one(guess, self._seats[slot].fed + step, slot)
                batch.embd[at] = row
                active.append((slot, at))
        batch.clear()
        return guesses

    def rewind(self, slot: int, n_tokens: int) -> None:
        seat = self._seats[slot]
        if n_tokens == seat.fed + seat.n and not seat.ahead:
            return
        seat.ahead = False
        if n_tokens >= seat.fed:
            keep = min(seat.n, n_tokens - seat.fed)
            if keep < seat.n:
                seat.pending[:] = seat.rows[keep]
            seat.n = keep
            return
        self._context.remove(slot, n_tokens)
        seat.fed, seat.n = n_tokens, 0
        # The row before this point is gone. One pair with a row of zeros makes one guess worse, never an answer.
        seat.pending[:] = 0

    def _drain(self, slot: int) -> None:
        """Move a slot's queue into the batch, without outputs."""
        seat = self._seats[slot]
        self._context.remove(slot, seat.fed)
        if seat.n:
            at = self._batch.add(seat.tokens[:seat.n], seat.fed, slot, output="none")
            self._batch.embd[at:at + seat.n] = seat.rows[:seat.n]
            seat.fed += seat.n
            seat.n = 0

    def _decode(self) -> None:
        if self._context.decode(self._batch) != 0:
            raise EngineError(f"The draft context has no room for {self._batch.n} tokens.",
                              "This is a fault in hydra: the target context should have been full first.")

    def close(self) -> None:
        self._context.close()


def queue_capacity(n_max: int) -> int:
    """How many pairs may wait in one slot's queue: rounds without a draft add one each."""
    return max(64, 2 * (n_max + 1))


def batch_capacity(n_slots: int, n_batch: int, n_max: int) -> int:
    """The largest batch a draft context must take: a whole target batch, and every slot's queue."""
    return n_batch + n_slots * (queue_capacity(n_max) + 1)


def _probability(logits: Rows, token: int) -> float:
    shifted = np.exp(logits - logits[token])
    return 1.0 / float(shifted.sum(dtype=np.float64)) if math.isfinite(float(logits[token])) else 0.0
