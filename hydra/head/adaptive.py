"""Chooses how many tokens to draft: expected tokens over measured time, re-judged each round.

Pure arithmetic over what it is told; knows no clock, context or slot. A draft of ``n`` gives ``1 + p1 + p1·p2 + …``
tokens and costs the draft's steps and a verification of width ``n + 1``. All four are measured: acceptance by place in
the draft (with a memory of some tens of rounds, lent from one request to the next), the draft by its length, the
verification by its width. What was not measured yet is interpolated; what was dropped for being too dear is tried
again, ever more rarely while it stays so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.98  # of acceptance, per round: about 50 rounds
TIME_MEMORY = 0.8
SWITCH_GAIN = 1.02  # a change of width makes new graphs, so it must promise something
FIRST_PROBE, LAST_PROBE = 48, 384  # rounds between two tries while drafting does not pay
WARM_UP = 2  # steps of a width before its time counts
REMEASURE = 256  # rounds after which a step without a draft is timed again


@dataclass
class _Rate:
    """A decaying mean of 0/1 outcomes with a prior."""

    good: float = 1.4
    seen: float = 2.0

    def add(self, outcome: bool) -> None:
        self.good = self.good * MEMORY + outcome
        self.seen = self.seen * MEMORY + 1

    @property
    def value(self) -> float:
        return self.good / self.seen


class Acceptance:
    """How often each place of a draft is accepted."""

    def __init__(self, n_max: int) -> None:
        self.rates = [_Rate() for _ in range(n_max)]

    def add(self, drafted: int, accepted: int) -> None:
        """One verified draft: places after the first refusal were not tried."""
        for k in range(min(drafted, accepted + 1)):
            self.rates[k].add(k < accepted)

    def expected(self, n: int) -> float:
        """Tokens that a draft of ``n`` is expected to give, verification's own included."""
        total, chain = 1.0, 1.0
        for rate in self.rates[:n]:
            chain *= rate.value
            total += chain
        return total

    def copy(self) -> Acceptance:
        """A new request's beginning: the same rates, held lightly."""
        fresh = Acceptance(len(self.rates))
        fresh.rates = [_Rate(2 * rate.value, 2.0) for rate in self.rates]
        return fresh


class StepCost:
    """Seconds by size (draft length or verify width): running means, a line between and beyond them."""

    def __init__(self, stepwise: bool = False) -> None:
        self.stepwise = stepwise
        self.seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def add(self, size: int, seconds: float) -> None:
        before = self.seconds.get(size)
        self._seen[size] = self._seen.get(size, 0) + 1
        if before is not None and self._seen[size] <= WARM_UP:
            self.seconds[size] = min(before, seconds)  # the first of a width makes its graphs, and tells nothing
            return
        # A step that made new graphs, or met a busy machine, is no measure of the next: take at most twice the mean
        # from it.
        value = seconds if before is None else min(seconds, 2 * before)
        self.seconds[size] = value if before is None else TIME_MEMORY * before + (1 - TIME_MEMORY) * value

    def estimate(self, size: int) -> float | None:
        """Seconds for ``size``; None when nothing was measured."""
        if not self.seconds:
            return None
        if size in self.seconds:
            return self.seconds[size]
        sizes = sorted(self.seconds)
        if len(sizes) == 1:
            known = sizes[0]
            # One point tells no slope. A draft is made step by step; a verification is bound by memory, so that a token
            # more costs little.
            slope = 1 / known if self.stepwise else 0.1 if size > known else 0.0
            return self.seconds[known] * (1 + slope * (size - known))
        low = max((s for s in sizes if s < size), default=sizes[0])
        high = min((s for s in sizes if s > size), default=sizes[-1])
        if low == high or high < size:
            low, high = sizes[-2], sizes[-1]
        elif low > size:
            low, high = sizes[0], sizes[1]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return max(self.seconds[low] + slope * (size - low), min(self.seconds.values()) * 0.5)


class PieceSize:
    """How many tokens of prompts to decode at once: as many as take no longer than is allowed.

    Sizes are few: ``least``, half as much again, the double, and so on (16, 24, 32, 48, 64, …). One that was not
    measured yet is taken to cost what the one before it does, which is so wherever reading weights takes the time; once
    tried, it is known.
    """

    def __init__(self, least: int, most: int) -> None:
        self._sizes = [min(least, most)]
        while (more := self._sizes[-1] * 3 // 2 if len(self._sizes) % 2 else self._sizes[-2] * 2) <= most:
            self._sizes.append(more)
        self._cost = StepCost()

    def measured(self, size: int, seconds: float) -> None:
        """Counted for the largest of our sizes that it reaches."""
        reached = [known for known in self._sizes if known <= size]
        if reached:
            self._cost.add(reached[-1], seconds * reached[-1] / size)

    def choose(self, limit_s: float, least: int = 0) -> int:
        """The size that still takes no longer than ``limit_s``; never below ``least``, as far as there is one."""
        start = next((i for i, size in enumerate(self._sizes) if size >= least), len(self._sizes) - 1)
        size, known = self._sizes[start], self._cost.seconds
        for more in self._sizes[start + 1:]:
            if size not in known or known.get(more, known[size]) > limit_s:
                break
            size = more
        return size


@dataclass
class DraftLength:
    """The draft length for the coming round; 0 = none. With ``adaptive`` off, always ``n_max``."""

    n_max: int
    adaptive: bool = True
    draft: StepCost = field(default_factory=lambda: StepCost(stepwise=True))
    verify: StepCost = field(default_factory=StepCost)
    current: int = field(init=False)
    _until_probe: int = field(init=False, default=FIRST_PROBE)
    _probe_gap: int = field(init=False, default=FIRST_PROBE)
    _rounds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.current = self.n_max

    def choose(self, acceptances: list[Acceptance]) -> int:
        """The length for a round with these slots."""
        if not self.adaptive or not acceptances:
            return self.n_max
        self._rounds += 1
        if self._rounds in (2, 3) or self._rounds % REMEASURE == 0:
            return 0  # what a step without a draft costs
        best = self._best(acceptances)
        if best == 0:
            self._until_probe -= 1
            if self._until_probe <= 0:
                self._probe_gap = min(2 * self._probe_gap, LAST_PROBE)
                self._until_probe = self._probe_gap
                self.current = 0
                return 1
        else:
            self._probe_gap = self._until_probe = FIRST_PROBE
        self.current = best
        return best

    def steady(self, acceptances: list[Acceptance]) -> int:
        """The length for a round that tells nothing about costs, since more than these slots' tokens goes with it."""
        return self._best(acceptances) if self.adaptive and acceptances else self.n_max

    def _best(self, acceptances: list[Acceptance]) -> int:
        rates = [self._tokens_per_s(n, acceptances) for n in range(self.n_max + 1)]
        if rates[0] is None or any(rate is None for rate in rates):
            return self.n_max
        known = [rate for rate in rates if rate is not None]
        best = max(range(len(known)), key=known.__getitem__)
        return best if known[best] > known[self.current] * SWITCH_GAIN else self.current

    def _tokens_per_s(self, n: int, acceptances: list[Acceptance]) -> float | None:
        verify = self.verify.estimate(n + 1)
        draft = self.draft.estimate(n) if n else 0.0
        if verify is None or draft is None:
            return None
        return sum(a.expected(n) for a in acceptances) / (verify + draft)

    def measured(self, n: int, draft_s: float, verify_s: float) -> None:
        """What the round that was just made cost."""
        if n:
            self.draft.add(n, draft_s)
        self.verify.add(n + 1, verify_s)
