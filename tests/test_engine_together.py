"""Prompts that arrive in the middle of answers: read in the same pass as the answers' tokens, or beside them, they
change neither those answers nor their own.

Where a model's every weight is in play, widths are held equal or a first difference must be a near tie: a kernel may
round differently for another width.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hydra.head.engine import Engine
from hydra.head.llama import Batch, Context
from hydra.head.reading import Pace, parts
from hydra.head.sampling import SamplingParams
from hydra.head.slots import Request, Slot
from hydra.head.spec import Endpoint
from hydra.peer.launch import start_peer
from hydra.rpc.wire import Command
from tests.engine_support import PROMPTS, Answer, answers_of, drain, take, toy, toy_language, toy_spec
from tests.test_mtp_invariants import assert_same_or_near_tie

LONG = ("A prompt that takes several passes to be read while others are answered, since a pass has thirty-two tokens "
        "at the most. " * 2, "Another such prompt, which comes when the first is half read; " * 3)
ARRIVALS = ((0, PROMPTS[0]), (4, LONG[0]), (6, LONG[1]), (9, PROMPTS[2]), (11, LONG[0][:50]), (30, LONG[1][:77]))
ATTENTION = ("toy-llama", "toy-gemma")


class Watch:
    """What the target was given: for each decode, the tokens of each slot in it."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[dict[int, int]] = []
        self.outputs: list[int] = []
        self.together: list[int] = []  # sizes of those with both answers and a piece of a prompt
        real = Context.decode

        def decode(context: Context, batch: Batch) -> int:
            if context is engine._target:
                slots = batch.seq[:batch.n].tolist()
                self.passes.append({slot: slots.count(slot) for slot in set(slots)})
                self.outputs.append(batch.n_outputs)
                states = {slot.decoding for slot in engine.slots if slot.id in slots}
                if len(states) > 1:
                    self.together.append(batch.n)
            return real(context, batch)

        monkeypatch.setattr(Context, "decode", decode)


def staggered(engine: Engine, **params: Any) -> dict[str, Answer]:
    """Answers to ARRIVALS, each sent when so many steps are done."""
    chosen = SamplingParams.from_dict({"temperature": 0, "max_tokens": 60, **params})
    answers: dict[str, Answer] = {}
    for step in range(200):
        for number, (at, text) in enumerate(ARRIVALS):
            if at == step:
                engine.submit(str(number), engine.vocab.tokenize(text), chosen)
        take(answers, engine.step())
    return drain(engine, answers)


def force_together(engine: Engine, total: int = 32) -> None:
    """Every pass with answers has a piece of a prompt beside them, and so many tokens."""
    engine._pace.together = True
    engine._pace.beside = lambda n, draft_s: max(0, total - n)  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("kind", "slots"), [("none", 2), ("none", 4), ("lookup", 4)])
def test_what_is_said_is_known_whoever_arrives(name: str, kind: str, slots: int,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    words = toy_language(name=name)
    with Engine(toy_spec(toy(name), kind, parallel=slots)) as engine:
        watch = Watch(engine, monkeypatch)
        answers = staggered(engine)
        for number, (_at, text) in enumerate(ARRIVALS):
            assert answers[str(number)].tokens == words.say(engine.vocab.tokenize(text)[-1], 60)
        most = engine._target.n_ubatch
    assert len(watch.together) >= 8
    assert max(watch.together) <= most  # so that it is one pass


@pytest.mark.parametrize(("kind", "exact"), [("none", True), ("mtp", True), ("mtp", False)])
def test_a_recurrent_memory_reads_apart(kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hybrid model, as it is served: pieces in passes of their own, of one length each where there are two."""
    path = toy(exact=exact)
    alone = answers_of(toy_spec(path), [text for _at, text in ARRIVALS], logprobs=5)
    with Engine(toy_spec(path, kind, parallel=4)) as engine:
        watch = Watch(engine, monkeypatch)
        answers = staggered(engine, logprobs=5)
    assert not watch.together
    for number, plain in enumerate(alone):
        assert_same_or_near_tie(plain, answers[str(number)])
        assert not exact or answers[str(number)].tokens == plain.tokens


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("kind", ["none", "lookup"])
def test_with_every_weight_in_play(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toy(name, exact=False)
    alone = answers_of(toy_spec(path), [text for _at, text in ARRIVALS], logprobs=5)
    with Engine(toy_spec(path, kind, parallel=4)) as engine:
        watch = Watch(engine, monkeypatch)
        answers = staggered(engine, logprobs=5)
    assert len(watch.together) >= 8
    for number, plain in enumerate(alone):
        assert_same_or_near_tie(plain, answers[str(number)])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("n_max", [1, 3, 6])
def test_hidden_rows_of_answers_and_prompts_in_one_batch(n_max: int, exact: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The hybrid model takes such a batch in several passes; what is drafted and said must not know."""
    path = toy(acceptance=1.0, exact=exact)
    alone = answers_of(toy_spec(path), [text for _at, text in ARRIVALS], logprobs=5)
    with Engine(toy_spec(path, "mtp", n_max, parallel=4)) as engine:
        force_together(engine, 64)
        watch = Watch(engine, monkeypatch)
        answers = staggered(engine, logprobs=5)
        stats = engine.stats
    assert len(watch.together) >= 5
    for number, plain in enumerate(alone):
        assert_same_or_near_tie(plain, answers[str(number)])
        assert not exact or answers[str(number)].tokens == plain.tokens
    if exact:  # the block looks at the last token alone: with its row all guesses are right
        assert stats.accepted >= 0.9 * stats.drafted


@pytest.mark.parametrize(("name", "kind"), [("toy-llama", "none"), ("toy-gemma", "lookup"), ("toy", "mtp")])
def test_over_a_peer_tokens_are_those_without(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same widths, token for token."""
    path = toy(name, exact=False)
    said = []
    with start_peer(device="CPU", threads=1) as peer:
        for endpoints in ((), (Endpoint("mini", f"127.0.0.1:{peer.port}"),)):
            layers = {"mini": 2} if endpoints else {}
            with Engine(toy_spec(path, kind, parallel=4, endpoints=endpoints, layers=layers)) as engine:
                if name == "toy":
                    monkeypatch.setattr(engine._pace, "between", lambda _n: 16)
                else:
                    force_together(engine)
                watch = Watch(engine, monkeypatch)
                said.append({id: answer.tokens for id, answer in staggered(engine).items()})
            assert bool(watch.together) == (name != "toy")
    assert said[0] == said[1]
    assert len(said[0]) == len(ARRIVALS)


@contextmanager
def counting(port: int) -> Iterator[tuple[int, Counter[int]]]:
    """A relay to the peer: its port, and how many messages of each command went through."""
    counts: Counter[int] = Counter()

    def pump(source: socket.socket, target: socket.socket, messages: bool) -> None:
        head, left = b"", 0  # a message is its command, the length of what follows, and that
        while data := source.recv(1 << 16):
            target.sendall(data)
            while messages and data:
                if left:
                    skipped = min(left, len(data))
                    left, data = left - skipped, data[skipped:]
                    continue
                head, data = head + data[:9 - len(head)], data[9 - len(head):]
                if len(head) == 9:
                    counts[head[0]] += 1
                    head, left = b"", int.from_bytes(head[1:], "little")
        target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port), timeout=10)
            far.settimeout(None)
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((near, far, True), (far, near, False)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1], counts


@pytest.mark.parametrize("name", ATTENTION)
def test_answers_and_a_piece_are_one_graph_and_the_next_is_the_same(name: str) -> None:
    """One graph on the peer for each such pass: it is one ubatch; and with the width held it is one that it has."""
    with start_peer(device="CPU", threads=1) as peer, counting(peer.port) as (port, counts):
        spec = toy_spec(toy(name), parallel=3, endpoints=(Endpoint("mini", f"127.0.0.1:{port}"),), layers={"mini": 2})
        with Engine(spec) as engine:
            force_together(engine)
            params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 60})
            for id in ("one", "two"):
                engine.submit(id, [97, 98], params)
            engine.step()
            engine.submit("reads", [97] * 170, params)
            seen = []
            for _ in range(5):
                before = counts.copy()
                engine.step()
                made = counts - before
                seen.append((made[Command.GRAPH_COMPUTE], made[Command.GRAPH_RECOMPUTE]))
            drain(engine)
    assert seen == [(1, 0), *[(0, 1)] * 4]


def test_logits_for_those_rows_only_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(toy_spec(toy("toy-llama"), parallel=2)) as engine:
        force_together(engine)
        watch = Watch(engine, monkeypatch)
        engine.submit("runs", [97, 98], SamplingParams.from_dict({"temperature": 0, "max_tokens": 30}))
        engine.step()
        engine.submit("reads", [97] * 70, SamplingParams.from_dict({"temperature": 0, "max_tokens": 5}))
        drain(engine)
    assert [(sum(found.values()), outputs) for found, outputs in zip(watch.passes, watch.outputs, strict=True)][:5] == [
        (2, 1), (32, 1), (32, 1), (9, 2), (2, 2)]


@pytest.mark.parametrize("name", ["toy", "toy-llama"])
def test_a_running_answer_gets_a_token_in_every_step(name: str) -> None:
    with Engine(toy_spec(toy(name), parallel=3, ctx_size=2048)) as engine:
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 200})
        engine.submit("runs", [97, 98], params)
        for _ in range(3):
            engine.step()
        engine.submit("reads", [97] * 600, params)
        engine.submit("too", [97] * 300, params)
        for _ in range(500):
            events = engine.step()
            assert any(getattr(event, "tokens", None) and event.id == "runs" for event in events)
            if all(slot.decoding for slot in engine.slots):
                break
        assert all(slot.decoding for slot in engine.slots)


@pytest.mark.parametrize("gone", ["runs", "reads"])
def test_cancelled_while_both_are_in_one_pass(gone: str) -> None:
    words = toy_language(name="toy-llama")
    with Engine(toy_spec(toy("toy-llama"), parallel=2)) as engine:
        force_together(engine)
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 40})
        answers: dict[str, Answer] = {}
        engine.submit("runs", [97], params)
        take(answers, engine.step())
        engine.submit("reads", [98] * 100, params)
        for _ in range(2):
            take(answers, engine.step())
        assert 0 < len(engine.slots[1].tokens) < 100
        engine.cancel(gone)
        take(answers, engine.step())
        assert answers[gone].reason == "cancelled"
        engine.submit("again", [98] * 100, params)
        drain(engine, answers)
        assert answers["again"].stats["cached_tokens"] == (62 if gone == "reads" else 0)
    for id, last in (("runs", 97), ("reads", 98), ("again", 98)):
        if id != gone:
            assert answers[id].tokens == words.say(last, 40)


@pytest.mark.parametrize("kind", ["none", "lookup"])
def test_the_end_of_the_context_while_a_prompt_is_read(kind: str) -> None:
    """An answer without a limit ends where the cells end, not the prompt that is read beside it."""
    words = toy_language(name="toy-llama")
    with Engine(toy_spec(toy("toy-llama"), kind, parallel=2, ctx_size=256)) as engine:
        answers: dict[str, Answer] = {}
        engine.submit("runs", [97] * 30, SamplingParams.from_dict({"temperature": 0}))
        while len(answers.get("runs", Answer()).tokens) < 60:
            take(answers, engine.step())
        engine.submit("reads", [98] * 140, SamplingParams.from_dict({"temperature": 0, "max_tokens": 20}))
        drain(engine, answers)
    for id, last in (("runs", 97), ("reads", 98)):
        answer = answers[id]
        assert (answer.error, answer.reason) == (None, "length")
        assert answer.tokens
        assert answer.tokens == words.say(last, len(answer.tokens))


def test_no_room_for_a_pass_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should llama.cpp refuse it for want of cells, the longest fails, be it answered or read; the other goes on."""
    with Engine(toy_spec(toy("toy-llama"), "lookup", parallel=2)) as engine:
        force_together(engine)
        answers: dict[str, Answer] = {}
        params = SamplingParams.from_dict({"temperature": 0, "max_tokens": 40})
        engine.submit("runs", [97], params)
        engine.step()
        engine.submit("reads", [98] * 100, params)
        take(answers, engine.step())
        with monkeypatch.context() as patch:
            patch.setattr(engine._target, "decode", lambda _batch: 1)
            take(answers, engine.step())
        drain(engine, answers)
    assert answers["reads"].error is not None
    assert answers["runs"].tokens[:1] != []
    words = toy_language(name="toy-llama").say(97, 40)
    assert answers["runs"].tokens == words[40 - len(answers["runs"].tokens):]


def slots_with(*rests: int) -> list[Slot]:
    """Slots with so many tokens of a prompt still to be read."""
    slots = []
    for id, rest in enumerate(rests):
        slot = Slot(id)
        slot.request = Request(str(id), [1] * (10 + rest), SamplingParams())
        slot.tokens = [1] * 10
        slots.append(slot)
    return slots


@pytest.mark.parametrize(("rests", "budget", "equal", "lengths"), [
    ((100, 100), 16, False, [16]), ((7, 100), 16, False, [7, 9]), ((7, 100), 16, True, [7, 7]),
    ((12, 100), 16, True, [12]), ((7, 3, 50), 16, True, [7, 7]), ((3, 4, 5), 64, False, [3, 4, 5]),
    ((5,), 0, False, [])])
def test_what_is_read_in_a_pass(rests: tuple[int, ...], budget: int, equal: bool, lengths: list[int]) -> None:
    """A recurrent memory reads two prompts in one pass only with pieces of one length."""
    found = parts(slots_with(*rests), budget, equal=equal)
    assert [len(part.tokens) for part in found] == lengths
    assert all(part.last == (len(part.tokens) == rests[part.slot.id]) for part in found)


def test_a_piece_ends_where_the_state_is_to_be_kept() -> None:
    slots = slots_with(100)
    assert slots[0].request is not None
    slots[0].request.checkpoint_at = 30
    assert [len(part.tokens) for part in parts(slots, 64, equal=True)] == [20]


def test_widths_are_few_and_by_time() -> None:
    """The whole pass has one of a few sizes whatever the answers have; a step of both takes about two of theirs."""
    def settled(cost: float, rows: int, most: int = 512) -> int:
        pace = Pace(most, together=True)
        assert pace.beside(rows, 0.0) == 0  # nothing is known yet
        for _ in range(30):
            pace.decoded(rows, 0.02)
            n = pace.beside(rows, 0.0)
            pace.read(rows + n, max(0.02, cost * (rows + n)))
        return rows + pace.beside(rows, 0.0)

    assert settled(0.01, 1) == settled(0.01, 4) == 32  # a slow device: the least
    assert settled(0.01, 6) == settled(0.01, 12) == 48
    assert settled(0.0005, 1) == settled(0.0005, 4) == 64  # by time: two and a quarter of 20 ms
    assert settled(0.0, 16) == 512
    assert settled(0.0, 28, 32) == 28  # no room for both in one pass
