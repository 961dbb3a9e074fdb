"""Guesses the next tokens from the text itself: what followed the last few tokens when they stood there before.

Knows nothing of models or devices: lists of tokens in, lists of tokens out. Good for models without an MTP block where
answers repeat their prompt (code edits, summaries, tables).

Source: Saxena, "Prompt Lookup Decoding" (2023); llama.cpp's ngram-simple in common/speculative.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM_MAX, NGRAM_MIN = 4, 2


class _Index:
    """Where each n-gram of one slot's tokens last ended, extended as tokens come."""

    def __init__(self) -> None:
        self.n = 0
        self.last: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that is followed by at least one token of ``tokens``."""
        for end in range(max(self.n, NGRAM_MIN), len(tokens)):
            for size in range(NGRAM_MIN, min(NGRAM_MAX, end) + 1):
                self.last[tuple(tokens[end - size:end])] = end
        self.n = max(self.n, len(tokens))


class LookupDrafter:
    """Prompt-lookup drafting with the interface of ``Drafter``."""

    name = "lookup"
    needs_hidden = False

    def __init__(self, *, n_slots: int, n_max: int) -> None:
        self.n_max = n_max
        self._index = [_Index() for _ in range(n_slots)]

    def filled(self, slot: int, tokens: Sequence[int], first: int, following: int | None) -> None:
        del slot, tokens, first, following  # draft() is given the tokens

    def flush(self) -> None:
        pass  # nothing is computed

    def verified(self, slot: int, tokens: Sequence[int], first: int) -> None:
        del slot, tokens, first

    def draft(self, jobs: Sequence[tuple[int, list[int], int]], n: int) -> dict[int, list[int]]:
        return {slot: self._guess(slot, [*tokens, token], n) for slot, tokens, token in jobs}

    def _guess(self, slot: int, text: list[int], n: int) -> list[int]:
        index = self._index[slot]
        index.extend(text)
        for size in range(min(NGRAM_MAX, len(text) - 1), NGRAM_MIN - 1, -1):
            at = index.last.get(tuple(text[-size:]))
            if at is not None:
                return text[at:at + n]
        return []

    def rewind(self, slot: int, n_tokens: int) -> None:
        if n_tokens < self._index[slot].n:
            self._index[slot] = _Index()

    def mark(self, slot: int, n_tokens: int) -> None:
        del slot, n_tokens  # the index is made anew from the tokens

    def close(self) -> None:
        pass  # nothing is owned
