"""Which pieces of which prompts are read in a step: as much as lets the running answers keep their pace.

Knows slots, and what steps have cost. Does not know batches, contexts or sampling.

Where the memory is attention's alone, llama.cpp takes any batch of up to n_ubatch tokens in one pass
(llama_batch_allocr::split_simple, the cache being unified): the answers' tokens and a piece of a prompt go together, so
that weights are read once for both. A recurrent memory takes sequences of one length in one pass (split_equal):
answers with a piece would be two passes, as apart, and two prompts go together where their pieces are of one length.

Source: docs/engine.md; src/llama-batch.cpp, llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-hybrid.cpp of
the pinned llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .adaptive import PieceSize, StepCost
from .slots import Slot

# However dear they are. Where time goes by tokens (a CPU) this is what decides: with 16 a running answer's steps are
# half as far apart, and four requests take a tenth longer in all.
LEAST = 32
LEAST_BESIDE = 28  # beside answers' tokens: with up to four of these it is a pass of 32
SLACK = 1.25  # reading may take so many times as long as a step of the answers that go on meanwhile


@dataclass
class Part:
    """A piece of one slot's prompt; ``last``: the prompt ends with it. ``first``: its place in the batch."""

    slot: Slot
    tokens: list[int]
    last: bool
    first: int = 0

    @property
    def following(self) -> int | None:
        """The prompt's token after this piece."""
        request = self.slot.request
        after = len(self.slot.tokens) + len(self.tokens)
        return request.prompt[after] if request is not None and not self.last else None


def parts(slots: Sequence[Slot], budget: int, *, equal: bool) -> list[Part]:
    """The next ``budget`` tokens of these slots' prompts, first come first served. ``equal``: of one length each."""
    found: list[Part] = []
    left = budget
    for slot in slots:
        request = slot.request
        if request is None or left <= 0:
            break
        at = len(slot.tokens)
        end = at + left
        if equal and found:
            end = at + len(found[0].tokens)
            if len(found[0].tokens) > left:
                break
        if at < request.checkpoint_at < end:
            end = request.checkpoint_at
        tokens = request.prompt[at:end]
        if equal and found and len(tokens) < len(found[0].tokens):
            continue
        found.append(Part(slot, tokens, at + len(tokens) == len(request.prompt)))
        left -= len(tokens)
    return found


class Pace:
    """How much to read in a step, by what steps took.

    ``together``: answers and pieces go in one pass, of at most ``most`` tokens; sizes are then those of the whole pass,
    of which there are few, so that its graph is often one that a peer has.
    """

    def __init__(self, most: int, *, together: bool) -> None:
        self.together = together
        self._sizes = PieceSize(LEAST, most)
        self._alone = StepCost()  # of the answers' steps by their tokens, drafts included
        self._most = most

    def decoded(self, n: int, seconds: float) -> None:
        """A step of answers alone, with ``n`` tokens verified; the draft's time is in it."""
        self._alone.add(n, seconds)

    def read(self, n: int, seconds: float) -> None:
        """A pass that read prompts took so long, in which ``n`` tokens were decoded (answers' too when together)."""
        self._sizes.measured(n, seconds)

    def beside(self, n: int, draft_s: float) -> int:
        """How many prompt tokens to decode in one pass with ``n`` tokens of answers; 0: let them go apart."""
        alone_s = self._alone.estimate(n)
        if not self.together or alone_s is None or n + LEAST_BESIDE > self._most:
            return 0
        return self._sizes.choose((1 + SLACK) * alone_s - draft_s, n + LEAST_BESIDE) - n

    def between(self, n: int) -> int:
        """How many prompt tokens to decode between two steps of ``n`` tokens of answers."""
        return self._sizes.choose(SLACK * (self._alone.estimate(n) or 0.0))
