"""Guesses the next tokens with a small model of the same vocabulary, in a context of its own on the head.

Knows the draft model's context and each slot's place in it. Does not know the target, requests or acceptance. Tokens
that the target verified wait until the next draft and are decoded with its first step, as in draft.py: rounds without a
draft cost nothing.

Source: common/speculative.cpp (draft-simple) of the pinned llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.errors import EngineError, ModelError

from .draft import likeliest
from .llama import Batch, Context, Model

_SAMPLE_EVERY = 997  # of the vocabulary: a prime, so that no regular table slips through


class ModelDrafter:
    """Drafts with ``model`` in ``context``, which it owns both, for ``n_slots`` slots.

    ``context`` takes batches of ``piece`` tokens and more. With ``p_min`` 0 it must have been made ``greedy``.
    """

    name = "model"
    needs_hidden = False

    def __init__(self, model: Model, context: Context, *, n_slots: int, piece: int, n_max: int, p_min: float) -> None:
        self.n_max = n_max
        self._p_min = p_min
        self._piece = piece
        self._model = model
        self._context = context
        self._batch = Batch(piece + n_slots)
        self._fed = [0] * n_slots  # verified tokens of a slot that are in the context
        self._ahead: list[list[int]] = [[] for _ in range(n_slots)]  # in it after those, and not verified yet
        self._queue: list[list[int]] = [[] for _ in range(n_slots)]  # verified, and not in it yet
        context.wait_here_only()

    def filled(self, slot: int, tokens: Sequence[int], first: int, following: int | None) -> None:
        del first, following
        self.verified(slot, tokens, 0)
        self._catch_up(slot, self._piece)

    def flush(self) -> None:
        pass  # filled() decodes at once

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        del first
        ahead = self._ahead[slot]
        same = 0
        if ahead and not self._queue[slot]:
            same = next((i for i, (a, b) in enumerate(zip(ahead, tokens, strict=False)) if a != b),
                        min(len(ahead), len(tokens)))
        self._fed[slot] += same
        if same < len(ahead):
            self._context.remove(slot, self._fed[slot])
        ahead.clear()
        self._queue[slot] += tokens[same:]

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        batch = self._batch
        guesses: dict[int, list[int]] = {slot: [] for slot, _tokens, _token in jobs}
        for slot, _tokens, _token in jobs:
            self._catch_up(slot, self._piece // len(jobs))
        batch.clear()
        active: list[tuple[int, int]] = []
        for slot, _tokens, token in jobs:
            waiting = self._queue[slot]
            batch.add(waiting, self._fed[slot], slot, output="none")
            self._fed[slot] += len(waiting)
            waiting.clear()
            active.append((slot, batch.add_one(token, self._fed[slot], slot)))
            self._ahead[slot].append(token)
        for step in range(n):
            self._decode()
            found: list[tuple[int, int]] = []
            for slot, index in active:
                guess = likeliest(self._context, index, self._p_min)
                if guess is not None:
                    guesses[slot].append(guess)
                    found.append((slot, guess))
            if not found or step + 1 == n:
                break
            batch.clear()
            active = []
            for slot, guess in found:
                ahead = self._ahead[slot]
                active.append((slot, batch.add_one(guess, self._fed[slot] + len(ahead), slot)))
                ahead.append(guess)
        batch.clear()
        return guesses

    def rewind(self, slot: int, n_tokens: int) -> None:
        fed = self._fed[slot]
        if n_tokens < fed or self._ahead[slot]:
            self._fed[slot] = min(fed, n_tokens)
            self._context.remove(slot, self._fed[slot])
            self._ahead[slot].clear()
        del self._queue[slot][max(0, n_tokens - self._fed[slot]):]

    def mark(self, slot: int, n_tokens: int) -> None:
        del slot, n_tokens  # nothing is lost by going back

    def _catch_up(self, slot: int, most: int) -> None:
        """Decode what waits, but for the last ``most`` tokens at the most, which go with the next draft."""
        waiting = self._queue[slot]
        while len(waiting) > most:
            part = waiting[:self._piece]
            self._batch.clear()
            self._batch.add(part, self._fed[slot], slot, output="none")
            self._decode()
            self._fed[slot] += len(part)
            del waiting[:len(part)]

    def _decode(self) -> None:
        if self._context.decode(self._batch) == 0:
            return
        in_use = set(self._batch.seq[:self._batch.n].tolist())
        for slot, ahead in enumerate(self._ahead):  # guesses of answers that were cancelled
            if ahead and slot not in in_use:
                self._context.remove(slot, self._fed[slot])
                ahead.clear()
        if self._context.decode(self._batch) != 0:
            raise EngineError(f"The draft model's context has no room for {self._batch.n} tokens.",
                              "This is a fault in hydra: the target context should have been full first.")

    def close(self) -> None:
        self._context.close()
        self._model.close()


def check_fit(target: Model, draft: Model, path: str) -> None:
    """Whether the draft model can guess for the target. Raises: ModelError saying what is different."""
    mine, theirs = target.vocab, draft.vocab
    hint = "Use a draft model of the same family as the model, or leave [mtp] draft_model out."
    if mine.n_tokens != theirs.n_tokens:
        raise ModelError(f"The draft model {path} has {theirs.n_tokens} tokens, the model {mine.n_tokens}.", hint)
    special = {mine.bos, mine.eos, mine.eot, theirs.bos, theirs.eos, theirs.eot}
    for token in (*range(0, mine.n_tokens, _SAMPLE_EVERY), *(t for t in special if t >= 0)):
        if mine.piece(token, special=True) != theirs.piece(token, special=True):
            raise ModelError(f"Token {token} of the draft model {path} is another text than the model's.", hint)
    if draft.recurrent:
        raise ModelError(f"The draft model {path} is recurrent: refused guesses cannot be taken back from it.", hint)
