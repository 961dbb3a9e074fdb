"""Which tokens lie in which slot of the target's memory: reuse of what a prompt begins with, room, states kept beside.

Knows slots and the two contexts' memories. Does not know sampling, drafting or steps. All removals go through here, so
that the target, the drafter and the slot's own list of tokens agree.

A recurrent memory (gated delta nets) cannot be cut back but by a few snapshots of the last batch; so its state is kept
once per prompt, and gone back to.

Source: src/llama-memory-recurrent.cpp and llama-memory-hybrid.cpp of the pinned llama.cpp; docs/engine.md.
"""

from __future__ import annotations

import math

from hydra.errors import EngineError

from .draft import Drafter
from .llama import Batch, Context
from .slots import Request, Slot

# How far before a prompt's end its state is kept: the next turn often has the same prompt with another ending (a chat
# template's opening of the answer, a text without its reasoning). Shorter prompts are read again.
CHECKPOINT_TAIL, CHECKPOINT_MIN = 16, 128


class Cells:
    """The memory of all slots."""

    def __init__(self, target: Context, drafter: Drafter | None, slots: list[Slot]) -> None:
        self._target = target
        self._drafter = drafter
        self._model = target.model
        self.slots = slots
        self.n_ctx = target.n_ctx

    def warm_up(self, batch: Batch, n_tokens: int) -> None:
        """Use everything once: memory that is taken at first use, and what a device cannot do, show now and not at the
        first prompt. ``n_tokens`` are read in the first slot; each slot's recurrent state is kept, so that there is
        room for it.

        Raises: EngineError when a context cannot decode, or the logits are no numbers.
        """
        for slot in self.slots:
            batch.clear()
            tokens = [0] * (n_tokens if slot is self.slots[0] else 1)
            batch.add(tokens, 0, slot.id, output="last")
            if self._target.decode(batch) != 0:
                raise EngineError(f"The target context has no room for {len(tokens)} tokens at the start.")
            peak = float(self._target.logits(len(tokens) - 1).max())
            if not math.isfinite(peak):
                raise EngineError("The model's logits are not finite numbers.",
                                  "A device, the link or the file may be at fault: see `hydra doctor`.")
            slot.tokens = tokens
            if self._drafter is not None:
                self._drafter.filled(slot.id, tokens, 0, None)
                self._drafter.flush()
                self._drafter.draft([(slot.id, tokens, 0)], self._drafter.n_max)
            if self._model.recurrent:
                slot.kept = self._target.keep_state(slot.id)
            self.forget(slot, 0)

    def checkpoint_at(self, request: Request) -> int:
        """The number of the prompt's tokens at which to keep the state, 0 for none."""
        at = len(request.prompt) - CHECKPOINT_TAIL
        return at if self._model.recurrent and at - request.n_cached >= CHECKPOINT_MIN else 0

    def keep(self, slot: Slot) -> None:
        """Keep the slot's state of now, in place of the one kept before."""
        slot.kept = self._target.keep_state(slot.id)
        slot.checkpoint = len(slot.tokens)
        if self._drafter is not None:
            self._drafter.mark(slot.id, slot.checkpoint)

    def decoded(self) -> None:
        """A batch was decoded: snapshots of slots that were not in it may have moved, so none of theirs counts."""
        for slot in self.slots:
            slot.rollback = 0

    def wanted(self, request: Request) -> int:
        """Cells to be kept for a request: its prompt, and its answer as far as that is known or likely."""
        answer = request.params.max_tokens
        likely = self.n_ctx // (2 * len(self.slots)) if answer is None else answer
        return len(request.prompt) + max(1, min(likely, self.n_ctx - len(request.prompt)))

    def make_room(self, needed: int, spared: Slot) -> None:
        """Forget idle slots' tokens, those unused for longest first, until ``needed`` cells are free; not
        ``spared``'s.
        """
        running = sum(max(len(s.tokens), self.wanted(s.request)) for s in self.slots if s.request is not None)
        idle = sorted((s for s in self.slots if s.request is None and s is not spared), key=lambda s: s.used_at)
        for slot in idle:
            if running + needed + sum(len(other.tokens) for other in idle) <= self.n_ctx:
                return
            self.forget(slot, 0)

    def best_slot(self, request: Request, idle: list[Slot]) -> Slot:
        """The idle slot with most of the prompt in it, else the one unused for longest."""
        return max(idle, key=lambda slot: (self.reusable(slot, request.prompt), -slot.used_at))

    def reusable(self, slot: Slot, prompt: list[int]) -> int:
        """How many tokens of the prompt the slot can keep: all but its last at most, whose logits are needed."""
        keep = min(slot.common_prefix(prompt), len(prompt) - 1)
        if keep == len(slot.tokens):
            return keep
        if self._model.recurrent and len(slot.tokens) - keep > slot.rollback:
            # The return code of a removal would say yes, with a state that is another's.
            return slot.checkpoint if slot.checkpoint <= keep else 0
        if self._model.n_swa and keep and self._target.pos_min(slot.id) > max(0, keep - self._model.n_swa):
            return 0  # the window before this point is overwritten
        return keep

    def reuse(self, slot: Slot, prompt: list[int]) -> int:
        """Keep of the slot what the prompt begins with; forget the rest. Returns how many tokens were kept."""
        keep = self.reusable(slot, prompt)
        if keep == len(slot.tokens):
            return keep
        if keep and keep == slot.checkpoint and self._model.recurrent and len(slot.tokens) - keep > slot.rollback and (
                not self._target.go_back(slot.id, slot.kept)):
            keep = 0
        return self.forget(slot, keep)

    def forget(self, slot: Slot, keep: int) -> int:
        """Keep the slot's first ``keep`` tokens; returns how many were really kept."""
        if keep and not self._target.remove(slot.id, keep):
            keep = 0
        if not keep:
            self._target.remove(slot.id, -1)
        if self._drafter is not None:
            self._drafter.rewind(slot.id, keep)
        del slot.tokens[keep:]
        slot.rollback = 0
        if keep < slot.checkpoint:
            slot.checkpoint = 0
        return keep

    def used(self) -> int:
        return sum(len(slot.tokens) for slot in self.slots)

    def free_idle(self) -> bool:
        idle = [slot for slot in self.slots if slot.request is None and slot.tokens]
        if not idle:
            return False
        self.forget(min(idle, key=lambda slot: slot.used_at), 0)
        return True

    def shift(self, slot: Slot) -> bool:
        """Forget the older half of what follows the prompt's first quarter, and move the rest down."""
        if self._model.recurrent or self._drafter is not None or not self._target.can_shift():
            return False
        keep = len(slot.tokens) // 4
        drop = (len(slot.tokens) - keep) // 2
        if not drop or not self._target.shift(slot.id, keep, drop, len(slot.tokens)):
            return False
        del slot.tokens[keep:keep + drop]
        return True
