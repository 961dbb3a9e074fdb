"""Guesses the next tokens cheaply: the model's own MTP block in a context of its own.

Knows the draft context and each slot's place in it. Does not know requests, samplers or acceptance: it is told what the
target has computed, and asked for guesses.

The draft context pairs each token with the target's hidden row of the token **before** it. It has to see every token of
the target; but not at once: pairs wait in ``queue`` and are decoded together with the first step of the next draft, so
that a verified draft costs no catch-up decode of its own. While nothing is drafted they only wait; when the queue is
full it is decoded, or, where that was seen to cost too much (a CPU) and the positions allow it, the older half is left
out: what the block never sees makes a guess worse, never an answer.

Source: common/speculative.cpp (draft-mtp) of the pinned llama.cpp, which decodes the catch-up each round;
docs/engine.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hydra.errors import EngineError

from .llama import Batch, Context

Rows = npt.NDArray[np.float32]
IDLE_SHARE = 0.005  # of the time, that keeping up may cost while nothing is drafted
IDLE_PAIRS = 16  # that are kept where it costs more


class Drafter(Protocol):
    """What the engine asks of any way of drafting."""

    name: str
    n_max: int
    needs_hidden: bool

    def filled(self, slot: int, tokens: Sequence[int], first: int, following: int | None) -> None:
        """The target decoded prompt tokens; the first is number ``first`` of its batch; ``following`` comes after
        them.
        """

    def flush(self) -> None:
        """The target batch that ``filled`` spoke of ends here."""

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        """The target decoded and kept these tokens of a decoding slot."""

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        """Up to ``n`` guesses for each (slot, its tokens in memory, its next token), fewer where it has none."""

    def rewind(self, slot: int, n_tokens: int) -> None:
        """The target's slot now holds its first ``n_tokens`` tokens only."""

    def mark(self, slot: int, n_tokens: int) -> None:
        """The target keeps the slot's state of now, at ``n_tokens`` tokens: ``rewind`` may go back to it."""

    def close(self) -> None: ...


class _Seat:
    """One slot's place in the draft context.

    Positions below ``fed`` are final. The ``n`` queued (token, row) pairs follow them; ``pending`` is the row that the
    token after those pairs with. ``ahead``: the last draft has already fed the slot's next token. ``kept_up_at``: when
    the queue was last empty.
    """

    def __init__(self, n_embd: int, capacity: int) -> None:
        self.kept_up_at = 0.0
        self.fed = 0
        self.n = 0
        self.ahead = False
        self.dirty = False
        self.tokens = np.zeros(capacity, np.int32)
        self.rows: Rows = np.zeros((capacity, n_embd), np.float32)
        self.pending: Rows = np.zeros(n_embd, np.float32)
        self.marked = 0
        self.marked_row: Rows = np.zeros(n_embd, np.float32)

    def leave_out(self, count: int) -> None:
        """Leave out the ``count`` oldest pairs: their positions stay empty."""
        kept = self.n - count
        self.tokens[:kept] = self.tokens[count:self.n]
        self.rows[:kept] = self.rows[count:self.n]
        self.fed += count
        self.n = kept


class MtpDrafter:
    """Drafts with the MTP block in ``context`` (made with ``mtp_of=target``), for ``n_slots`` slots.

    ``context`` must take batches of ``batch_capacity`` tokens. ``piece``: how many tokens it decodes at once when a
    prompt is read (the ubatch). With ``p_min`` 0 the context must have been made ``greedy``: guesses then come from the
    device.
    """

    name = "mtp"
    needs_hidden = True

    def __init__(self, target: Context, context: Context, *, n_slots: int, piece: int, n_max: int,
                 p_min: float) -> None:
        self.n_max = n_max
        self._p_min = p_min
        self._piece = piece
        self._target = target
        self._context = context
        n_embd = target.model.n_embd
        self._capacity = queue_capacity(n_max)
        self._batch = Batch(batch_capacity(n_slots, piece, n_max), n_embd)
        self._seats = [_Seat(n_embd, self._capacity) for _ in range(n_slots)]
        self._leaves_out = False
        target.use_nextn(masked=False)
        context.use_nextn(masked=True)
        context.wait_here_only()  # the block, its tables and the output lie on the head (placement.py)

    def filled(self, slot: int, tokens: Sequence[int], first: int, following: int | None) -> None:
        seat, batch, count = self._seats[slot], self._batch, len(tokens)
        if batch.n + seat.n + 1 + min(count, self._piece) > batch.capacity:
            self.flush()
        self._drain(slot)
        if not seat.ahead:
            at = batch.add(tokens[:1], seat.fed, slot, output="none")
            batch.embd[at] = seat.pending
            seat.fed += 1
        # Row i of the target pairs with token i + 1, and the token after a piece of a prompt is known but for the last.
        shifted = [*tokens[1:], following] if following is not None else tokens[1:]
        done = 0
        if batch.n or len(shifted) < self._piece:  # what waits, and what is short, goes together
            done = max(0, min(len(shifted), self._piece - batch.n))
            at = batch.add(shifted[:done], seat.fed, slot, output="none")
            if done:
                self._target.copy_hidden(first, done, batch.embd[at:at + done])
            seat.fed += done
        while done < len(shifted):
            self.flush()
            part = shifted[done:done + self._piece]
            batch.add(part, seat.fed, slot, output="none")
            batch.rows_at(self._target.hidden_address(first + done))  # megabytes: read where they are
            self._decode()
            batch.rows_at(None)
            batch.clear()
            seat.fed += len(part)
            done += len(part)
        seat.ahead = following is not None
        self._target.copy_hidden(first + count - 1, 1, seat.pending)

    def flush(self) -> None:
        if self._batch.n:
            self._decode()
            self._batch.clear()

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        seat = self._seats[slot]
        count = len(tokens)
        # Where draft() fed tokens[0], it did so with the right row; the guesses after it had the draft's own rows, and
        # go again with the target's.
        fresh = tokens[1:] if seat.ahead else tokens
        if seat.n + len(fresh) > self._capacity:
            self._keep_up(slot)
        at, end = seat.n, seat.n + len(fresh)
        seat.tokens[at:end] = fresh
        if not seat.ahead:
            seat.rows[at] = seat.pending
            at += 1
        seat.ahead = False
        if end > at:
            self._target.copy_hidden(first, end - at, seat.rows[at:end])
        seat.n = end
        self._target.copy_hidden(first + count - 1, 1, seat.pending)

    def _keep_up(self, slot: int) -> None:
        """The queue is full: nothing was drafted for long."""
        seat = self._seats[slot]
        if self._leaves_out:
            seat.leave_out(seat.n - IDLE_PAIRS)
            return
        began = time.perf_counter()
        idle_s = began - seat.kept_up_at
        self._drain(slot)
        self.flush()
        # A GPU goes on by itself meanwhile, and this takes next to no time.
        dear = time.perf_counter() - began > IDLE_SHARE * idle_s
        self._leaves_out = dear and self._target.model.may_skip_positions

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        context, batch = self._context, self._batch
        guesses: dict[int, list[int]] = {}
        active: list[tuple[int, int]] = []
        batch.clear()
        for slot, _tokens, token in jobs:
            seat = self._seats[slot]
            self._drain(slot)
            last = batch.add_one(token, seat.fed, slot)
            batch.embd[last] = seat.pending
            seat.fed += 1
            seat.ahead = True
            guesses[slot] = []
            active.append((slot, last))
        for step in range(n):
            self._decode()
            found: list[tuple[int, int, Rows]] = []
            more = step + 1 < n
            for slot, index in active:
                guess = likeliest(context, index, self._p_min)
                if guess is not None:
                    guesses[slot].append(guess)
                    if more:
                        found.append((slot, guess, context.hidden(index)))
            if not found:
                break
            batch.clear()
            active = []
            for slot, guess, row in found:
                seat = self._seats[slot]
                seat.dirty = True
                at = batch.add_one(guess, seat.fed + step, slot)
                batch.embd[at] = row
                active.append((slot, at))
        batch.clear()
        return guesses

    def rewind(self, slot: int, n_tokens: int) -> None:
        seat = self._seats[slot]
        if seat.ahead:
            # One token was fed that the target does not have (yet); its row is still the pending one.
            seat.ahead = False
            seat.dirty = True
            seat.fed -= 1
        if n_tokens == seat.fed + seat.n:
            return
        if n_tokens >= seat.fed:
            keep = min(seat.n, n_tokens - seat.fed)
            if keep < seat.n:
                seat.pending[:] = seat.rows[keep]
            seat.n = keep
            return
        seat.fed, seat.n, seat.dirty = n_tokens, 0, True
        # Elsewhere the row before this point is gone: a row of zeros makes one guess worse, never an answer.
        seat.pending[:] = seat.marked_row if n_tokens and n_tokens == seat.marked else 0

    def mark(self, slot: int, n_tokens: int) -> None:
        seat = self._seats[slot]
        seat.marked = n_tokens
        seat.marked_row[:] = seat.pending

    def _drain(self, slot: int) -> None:
        """Forget the slot's guesses, and move its queue into the batch, without outputs."""
        seat = self._seats[slot]
        if seat.dirty:
            self._context.remove(slot, seat.fed)  # goes through every cell of the cache, so only where there is need
            seat.dirty = False
        seat.kept_up_at = time.perf_counter()
        if self._leaves_out and seat.n > IDLE_PAIRS:
            seat.leave_out(seat.n - IDLE_PAIRS)
        if seat.n:
            at = self._batch.add(seat.tokens[:seat.n], seat.fed, slot, output="none")
            self._batch.embd[at:at + seat.n] = seat.rows[:seat.n]
            seat.fed += seat.n
            seat.n = 0

    def _decode(self) -> None:
        if self._context.decode(self._batch) == 0:
            return
        # What others left behind is only removed when they draft again; now the room is needed.
        in_use = set(self._batch.seq[:self._batch.n].tolist())
        for slot, seat in enumerate(self._seats):
            if seat.dirty and slot not in in_use:
                self._context.remove(slot, seat.fed)
                seat.dirty = False
        if self._context.decode(self._batch) != 0:
            raise EngineError(f"The draft context has no room for {self._batch.n} tokens.",
                              "This is a fault in hydra: the target context should have been full first.")

    def close(self) -> None:
        self._context.close()


def queue_capacity(n_max: int) -> int:
    """How many pairs may wait in one slot's queue: rounds without a draft add one each."""
    return max(64, 2 * (n_max + 1))


def batch_capacity(n_slots: int, piece: int, n_max: int) -> int:
    """The largest batch a draft context must take: a piece of a prompt, and every slot's queue."""
    return piece + n_slots * (queue_capacity(n_max) + 2)


def likeliest(context: Context, index: int, p_min: float) -> int | None:
    """The likeliest token after the batch's token ``index``, None where it is less likely than ``p_min``.

    With ``p_min`` 0 the device has chosen it (contexts made ``greedy``).
    """
    if p_min <= 0:
        return context.sampled(index)
    logits = context.logits(index)
    guess = int(logits.argmax())
    return guess if _probability(logits, guess) >= p_min else None


def _probability(logits: Rows, token: int) -> float:
    shifted = np.exp(logits - logits[token])
    return 1.0 / float(shifted.sum(dtype=np.float64)) if math.isfinite(float(logits[token])) else 0.0
