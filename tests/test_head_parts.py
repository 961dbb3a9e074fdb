"""The head's pure parts: frames, specs, placement, llama.cpp's log, prompt lookup, and the choice of the draft
length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from hydra.errors import EngineError, ModelError
from hydra.head import placement
from hydra.head.adaptive import FIRST_PROBE, Acceptance, DraftLength, PieceSize, StepCost
from hydra.head.channel import FrameReader, encode
from hydra.head.loadlog import LoadLog
from hydra.head.lookup import LookupDrafter
from hydra.head.report import Totals
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec


def test_frames_in_any_pieces() -> None:
    frames: list[dict[str, Any]] = [
        {"type": "a", "text": "ü€\U0001F680", "n": [1, 2]}, {"type": "b"}, {"type": "c", "x": "y" * 70000},
    ]
    data = b"".join(encode(frame) for frame in frames)
    rng = random.Random(3)
    for _ in range(20):
        reader, got, at = FrameReader(), [], 0
        while at < len(data):
            size = rng.choice([1, 2, 5, 1000, 100000])
            got += reader.feed(data[at:at + size])
            at += size
        assert got == frames


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x02\0\0\0{}", b"\x01\0\0\0{",
                                  b"\x02\0\0\0\xff\xfe"])
def test_broken_frames_are_refused(data: bytes) -> None:
    with pytest.raises(EngineError):
        FrameReader().feed(data)


def test_specs_survive_json() -> None:
    spec = EngineSpec("m.gguf", endpoints=(Endpoint("mini", "10.0.0.2:50052", 1),), layers={"mini": 3},
                      devices=("CUDA0",), draft=DraftSpec("lookup", 5, 0.5, False), parallel=3)
    assert EngineSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def simulate(split: list[float], n_all: int) -> list[int]:
    """llama.cpp's own rule: layer il goes to the first device whose cumulated share exceeds il / n."""
    import numpy as np

    total, sums = np.float32(0), []
    for share in split:
        total = np.float32(total + np.float32(share))
        sums.append(total)
    shares = [np.float32(s / total) for s in sums]
    return [next(i for i, s in enumerate(shares) if np.float32(il) / np.float32(n_all) < s) for il in range(n_all)]


@pytest.mark.parametrize(("n_layer", "extra"), [(64, 2), (40, 1), (18, 1), (33, 2), (4, 2)])
def test_layers_lie_where_they_were_asked(n_layer: int, extra: int) -> None:
    """For every split of one and of two peers, by llama.cpp's float arithmetic; MTP and output on the last device."""
    for first in range(n_layer + 1):
        for second in (0, 1, (n_layer - first) // 2):
            if first + second > n_layer:
                continue
            counts = [first, second, n_layer - first - second]
            where = simulate(placement.tensor_split(counts, extra), n_layer + extra)
            assert [where[:n_layer].count(i) for i in range(3)] == counts
            assert where[n_layer:] == [2] * extra


def test_splits_that_do_not_add_up() -> None:
    ok = placement.layers_by_node(40, ["mini"], "big", {"mini": 25})
    assert ok == {"mini": 25, "big": 15}
    assert placement.layers_by_node(40, ["mini"], "big", {"mini": 25, "big": 15}) == ok
    for layers, match in (({"mini": 25, "big": 14}, "39 layers; the model has 40"), ({"mini": 41}, "40"),
                          ({"big": 3}, "mini")):
        with pytest.raises(ModelError, match=match):
            placement.layers_by_node(40, ["mini"], "big", layers)
    with pytest.raises(ModelError, match="there is no peer"):
        placement.layers_by_node(40, [], "big", {"big": 39})
    by_memory = placement.layers_by_node(40, ["mini"], "big", {}, {"mini": 12, "big": 16})
    assert sum(by_memory.values()) == 40
    assert by_memory["mini"] in (17, 18)


def test_what_was_asked_is_verified() -> None:
    names = {"RPC0": "mini", "CUDA0": "big"}
    asked = {"mini": 1, "big": 1}
    assert placement.verify(asked, {0: "RPC0", 1: "CUDA0", 2: "CUDA0"}, names, 2, "big") == asked
    with pytest.raises(ModelError, match="placed the layers"):
        placement.verify(asked, {0: "CUDA0", 1: "CUDA0", 2: "CUDA0"}, names, 2, "big")
    with pytest.raises(ModelError, match="not on the head"):
        placement.verify(asked, {0: "RPC0", 1: "CUDA0", 2: "RPC0"}, names, 2, "big")


def test_the_load_log_is_understood() -> None:
    """Lines as the pinned llama.cpp prints them."""
    log = LoadLog()
    for line in ("load_tensors: layer   3 assigned to device RPC0, is_swa = 0\n",
                 "load_tensors:   CPU_Mapped model buffer size =   100.50 MiB\n",
                 "load_tensors: RPC0[127.0.0.1:50052] model buffer size =    20.00 MiB\n",
                 "llama_kv_cache: RPC0[127.0.0.1:50052] KV buffer size =     4.00 MiB\n",
                 "llama_memory_recurrent:        CPU RS buffer size =     0.25 MiB\n",
                 "sched_reserve:        CPU compute buffer size =     9.00 MiB\n",
                 "sched_reserve: reserve took 1.5 ms, sched copies = 4\n"):
        log.feed(2, line)
    log.feed(4, "llama_model_load: error loading model: tensor 'x' is missing\n")
    log.feed(4, "llama_model_load_from_file_impl: failed to load model\n")
    assert log.layers == {3: "RPC0"}
    assert log.by_device()["RPC0[127.0.0.1:50052]"] == 24 << 20
    assert log.by_device(("RS",)) == {"CPU": 1 << 18}
    assert log.sched_copies == 4
    assert log.why() == "error loading model: tensor 'x' is missing"


def test_sums_over_requests() -> None:
    """What /metrics says of drafting since the start."""
    fresh = Totals()
    assert (fresh.acceptance_rate, fresh.mean_acceptance_length) == (None, None)
    totals = Totals()
    for accepted in (2, 4):
        totals.add({"drafted": 6, "accepted": accepted, "draft_rounds": 2, "draft_s": 0.5, "verify_s": 1.5})
    assert (totals.drafted, totals.accepted, totals.draft_s, totals.verify_s) == (12, 6, 1.0, 3.0)
    assert totals.acceptance_rate == 0.5
    assert totals.mean_acceptance_length == 1 + 6 / 4


def test_lookup_says_what_followed_before() -> None:
    drafter = LookupDrafter(n_slots=1, n_max=4)
    text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2]
    assert drafter.draft([(0, text, 3)], 4) == {0: [4, 5, 6, 7]}
    assert drafter.draft([(0, text, 3)], 2) == {0: [4, 5]}
    assert drafter.draft([(0, text, 8)], 4) == {0: []}
    # The latest place counts, and a longer match before a shorter one.
    again = [1, 2, 3, 7, 8, 2, 3, 5, 5, 1, 2]
    drafter.rewind(0, 0)
    assert drafter.draft([(0, again, 3)], 2) == {0: [7, 8]}
    drafter.rewind(0, 2)
    assert drafter.draft([(0, [1, 2], 1)], 2) == {0: []}


def run_rounds(length: DraftLength, acceptance: float, rounds: int, draft_s: float, base_s: float, token_s: float,
               seed: int = 1) -> tuple[float, float, list[int]]:
    """A simulated request: tokens made, seconds spent, and the lengths chosen."""
    rng = random.Random(seed)
    rates = Acceptance(length.n_max)
    tokens, seconds, chosen = 0.0, 0.0, []
    for _ in range(rounds):
        n = length.choose([rates])
        accepted = 0
        while accepted < n and rng.random() < acceptance:
            accepted += 1
        if n:
            rates.add(n, accepted)
        verify = base_s + token_s * (n + 1)
        length.measured(n, n * draft_s, verify)
        tokens += 1 + accepted
        seconds += n * draft_s + verify
        chosen.append(n)
    return tokens, seconds, chosen


@pytest.mark.parametrize(("draft_s", "token_s"), [(0.5, 0.2), (1.0, 3.0), (0.1, 0.05)])
def test_where_nothing_is_accepted_it_costs_next_to_nothing(draft_s: float, token_s: float) -> None:
    """Over a long answer, at most 3 % against not drafting, whatever drafting costs."""
    tokens, seconds, _chosen = run_rounds(DraftLength(3), 0.0, 1000, draft_s, 20.0, token_s)
    plain = tokens * (20.0 + token_s)
    assert seconds / plain < 1.03


def test_where_all_is_accepted_it_uses_the_whole_length() -> None:
    _tokens, _seconds, chosen = run_rounds(DraftLength(5), 1.0, 200, 0.5, 20.0, 0.2)
    assert chosen[-100:] == [5] * 100


@pytest.mark.parametrize(("acceptance", "draft_s", "token_s", "best"), [(0.7, 2.0, 0.5, 3), (0.5, 4.0, 2.0, 1)])
def test_in_between_it_comes_near_the_best_fixed_length(acceptance: float, draft_s: float, token_s: float,
                                                       best: int) -> None:
    def speed(length: DraftLength) -> float:
        tokens, seconds, _ = run_rounds(length, acceptance, 3000, draft_s, 20.0, token_s)
        return tokens / seconds

    fixed = {n: speed(DraftLength(n, adaptive=False)) for n in range(1, 7)}
    assert abs(max(fixed, key=fixed.__getitem__) - best) <= 1
    assert speed(DraftLength(6)) > 0.96 * max(fixed.values())


def test_it_comes_back_when_the_text_changes() -> None:
    length = DraftLength(4)
    _, _, first = run_rounds(length, 0.0, 300, 2.0, 20.0, 0.5)
    assert first[-1] == 0
    rates = Acceptance(4)
    for _ in range(40):
        rates.add(4, 0)
    chosen = []
    for _ in range(40 * FIRST_PROBE):
        n = length.choose([rates])
        rates.add(n, n)
        length.measured(n, 2.0 * n, 20.5 + 0.5 * n)
        chosen.append(n)
    assert chosen[-1] == 4


def test_pieces_of_a_prompt_take_about_as_long_as_a_step() -> None:
    def settled(cost: Callable[[int], float], limit_s: float, least: int = 0) -> int:
        piece = PieceSize(32, 2048)
        piece.measured(2048, cost(2048))
        for _ in range(20):
            size = piece.choose(limit_s, least)
            piece.measured(size, cost(size))
        return piece.choose(limit_s, least)

    assert PieceSize(32, 2048).choose(1.0) == 32
    assert PieceSize(32, 2048).choose(1.0, 40) == 48
    assert PieceSize(32, 16).choose(1.0) == 16
    assert settled(lambda size: 0.005 * size, 0.02) == 32  # a CPU: the least there is
    assert settled(lambda size: 0.005 * size, 0.02, 50) == 64  # what goes with it wants more
    assert settled(lambda size: max(0.02, 0.0003 * size), 0.025) == 64  # a GPU: what costs no more than one token
    assert settled(lambda size: 0.0001 * size, 0.025) == 192  # fast at reading: by time
    assert settled(lambda _size: 0.001, 0.02) == 2048


def test_costs_between_measured_sizes() -> None:
    cost = StepCost()
    assert cost.estimate(3) is None
    cost.add(1, 10.0)
    assert cost.estimate(1) == 10.0
    cost.add(5, 14.0)
    assert cost.estimate(3) == pytest.approx(12.0)
    assert cost.estimate(7) == pytest.approx(16.0)
    cost.add(1, 1000.0)  # a hiccup
    assert (cost.estimate(1) or 0) < 13
