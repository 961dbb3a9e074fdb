"""The engine: slots, batches, drafting and sampling over one target context. One thread calls it; ``step`` is one
decode.

Knows requests and slots. Does not know processes, frames, HTTP or hydra.toml.

One step: take up waiting requests, draft for the decoding slots, decode one target batch (the drafts to be verified,
and, as reading.py says in the same one or in one after it, a bounded piece of the prompts still to be read), then
sample each slot in turn until its draft and the target differ. Every token that leaves was sampled from the target by
the request's own sampler, so drafting changes speed and nothing else.

Source: docs/engine.md; common/speculative.cpp and tools/server/server-context.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.errors import EngineError, HydraError, RequestError

from .adaptive import Acceptance, DraftLength
from .cells import Cells
from .llama import Batch, Context
from .loading import Loaded, ProgressSink, load, n_threads, share
from .reading import Pace, Part, parts
from .sampling import Sampler, SamplingParams, logprobs
from .slots import Chunk, Done, DraftStats, Event, Failed, Request, Slot
from .spec import EngineSpec


class Engine:
    """Serves requests with one loaded model. ``close`` frees everything.

    ``loaded``: what another engine's ``shared`` made, to run beside it on the same weights; else the model is loaded.

    Raises: see loading.load.
    """

    def __init__(self, spec: EngineSpec, progress: ProgressSink | None = None, loaded: Loaded | None = None) -> None:
        self._loaded: Loaded = loaded or load(spec, progress)
        self.spec = spec
        self.model = self._loaded.model
        self.vocab = self.model.vocab
        self._target = self._loaded.target
        self._drafter = self._loaded.drafter
        self.n_ctx = self._target.n_ctx
        n_batch = max(spec.batch_size, spec.parallel * (1 + spec.draft.n_max))
        self._batch = Batch(n_batch)
        self.slots = [Slot(i) for i in range(spec.parallel)]
        self._waiting: deque[Request] = deque()
        self._cancelled: set[str] = set()
        self._lengths: dict[int, DraftLength] = {}  # by the number of decoding slots: costs differ
        self._overall = Acceptance(spec.draft.n_max)
        self._acceptance: dict[str, Acceptance] = {}
        recurrent = self.model.recurrent
        self._pace = Pace(n_batch if recurrent else self._target.n_ubatch, together=not recurrent)
        self.stats = DraftStats()
        self.steps = 0
        self.python_s = 0.0
        self.decoded_steps = 0
        self._cells = Cells(self._target, self._drafter, self.slots)
        try:
            self._cells.warm_up(self._batch, min(self._loaded.warm_up_tokens, self.n_ctx // 2))
            if self._loaded.shares_core:
                self._target.share_core()  # after the warm-up: threads that are made while it is in force inherit it
        except BaseException:
            self._loaded.close()
            raise

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """The ``info`` of the ``ready`` frame."""
        model, vocab = self.model, self.vocab
        return {"model": model.meta("general.name") or model.describe(), "description": model.describe(),
                "architecture": model.meta("general.architecture"), "size_bytes": model.size_bytes,
                "n_layer": model.n_layer, "n_ctx": self.n_ctx, "n_ctx_train": model.n_ctx_train, "n_embd": model.n_embd,
                "n_vocab": vocab.n_tokens, "parallel": self.spec.parallel, "bos": vocab.bos, "eos": vocab.eos,
                "eot": vocab.eot, "add_bos": vocab.add_bos, "bos_text": vocab.text(vocab.bos),
                "eos_text": vocab.text(vocab.eos), "chat_template": model.chat_template(),
                "layers": self._loaded.layers, "memory": self._loaded.memory_use, "notes": self._loaded.notes,
                "drafter": self._drafter.name if self._drafter else None,
                "mtp": {"blocks": model.n_layer_nextn, "n_max": self.spec.draft.n_max,
                        "enabled": self._drafter is not None and self._drafter.name == "mtp"}}

    @property
    def busy(self) -> bool:
        """True while ``step`` has something to do."""
        return bool(self._waiting) or any(slot.request is not None for slot in self.slots)

    def slot_states(self) -> list[dict[str, Any]]:
        """What each slot does, for the heartbeat."""
        return [{"id": slot.id, "request": slot.request.id if slot.request else None, "tokens": len(slot.tokens),
                 "state": "decode" if slot.decoding else "prefill" if slot.filling else "idle"} for slot in self.slots]

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, id: str, prompt: Sequence[int], params: SamplingParams, resume: Sequence[int] = ()) -> None:
        """Queue one request.

        Raises: RequestError when the prompt is empty, holds unknown tokens, or leaves no room in the context.
        """
        total = len(prompt) + len(resume)
        if not total:
            raise RequestError("The prompt is empty.")
        bad = next((t for t in (*prompt, *resume) if not 0 <= t < self.vocab.n_tokens), None)
        if bad is not None:
            raise RequestError(f"Token {bad} is not in the vocabulary of {self.vocab.n_tokens}.")
        if total >= self.n_ctx:
            raise RequestError(f"The prompt has {total} tokens; the context holds {self.n_ctx}, the answer included.",
                               "Shorten it, or set a larger ctx_size.")
        self._waiting.append(Request(id, prompt, params, resume, self.spec.exact_resume))

    def cancel(self, id: str) -> None:
        """End a request at the next step."""
        self._cancelled.add(id)

    def generate(self, prompt: Sequence[int], params: SamplingParams, id: str = "one") -> Iterator[Event]:
        """One request from beginning to end, for callers that have nothing else to do."""
        self.submit(id, prompt, params)
        while True:
            for event in self.step():
                yield event
                if isinstance(event, Done | Failed) and event.id == id:
                    return

    def shared(self, spec: EngineSpec) -> Engine:
        """Another engine on this one's model, with contexts of its own; close it before this one."""
        return Engine(spec, loaded=share(self._loaded, spec))

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean-pooled embedding of a text, in a context of its own that lives for this call.

        Raises: RequestError for a text that does not fit, DeviceError when there is no memory for the context.
        """
        if not 0 < len(tokens) <= self.n_ctx:
            raise RequestError(f"A text of {len(tokens)} tokens cannot be embedded; the context holds {self.n_ctx}.")
        size = len(tokens)
        with Context(self.model, n_ctx=size, n_batch=size, n_ubatch=size, n_seq_max=1, n_outputs_max=size, type_k="f16",
                     type_v="f16", flash_attn=self.spec.flash_attn, n_threads=n_threads(self.spec.threads),
                     embeddings=True) as context:
            batch = Batch(size)
            batch.add(tokens, 0, 0, output="all")
            context.decode(batch)
            return context.embedding(0)

    def close(self) -> None:
        for slot in self.slots:
            if slot.request is not None and slot.request.sampler is not None:
                slot.request.sampler.close()
        self._loaded.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One decode of the target, with all that belongs to it.

        Raises: EngineError when llama.cpp fails; what concerns one request only is a Failed event.
        """
        started = time.perf_counter()
        events: list[Event] = []
        self._drop_cancelled(events)
        self._admit(events)
        decoding = [slot for slot in self.slots if slot.decoding]
        filling = [slot for slot in self.slots if slot.filling]
        filling.sort(key=lambda slot: slot.request.admitted_at if slot.request else 0.0)
        native_s, n_decoded, read = 0.0, 0, False
        if decoding:
            native_s, n_decoded, read = self._decode_step(decoding, filling, events)
        if filling and not read:
            native_s += self._prefill_step(filling, n_decoded, events)
        self.steps += 1
        if decoding and not filling:
            other_s = time.perf_counter() - started - native_s
            self.decoded_steps += 1
            self.python_s += other_s
            self.stats.other_s += other_s
            for slot in decoding:
                if slot.request is not None:
                    slot.request.draft.other_s += other_s / len(decoding)
        return events

    def _drop_cancelled(self, events: list[Event]) -> None:
        if not self._cancelled:
            return
        for slot in self.slots:
            if slot.request is not None and slot.request.id in self._cancelled:
                self._end(slot, "cancelled", events)
        for request in [r for r in self._waiting if r.id in self._cancelled]:
            self._waiting.remove(request)
            events.append(Done(request.id, "cancelled", request.stats()))
        self._cancelled.clear()

    def _admit(self, events: list[Event]) -> None:
        """Give free slots to waiting requests, first come first served."""
        while self._waiting:
            idle = [slot for slot in self.slots if slot.request is None]
            if not idle:
                return
            request = self._waiting[0]
            running = [s.request for s in self.slots if s.request is not None]
            if running and sum(map(self._cells.wanted, running)) + self._cells.wanted(request) > self.n_ctx:
                return  # the cells are running answers': wait for one to end
            self._waiting.popleft()
            slot = self._cells.best_slot(request, idle)
            self._cells.make_room(self._cells.wanted(request), slot)
            try:
                request.sampler = self._make_sampler(request)
            except RequestError as exc:
                events.append(Failed(request.id, type(exc).__name__, exc.message, exc.hint))
                continue
            request.admitted_at = time.perf_counter()
            request.n_cached = self._cells.reuse(slot, request.prompt)
            request.checkpoint_at = self._cells.checkpoint_at(request)
            slot.request = request
            slot.next_token = None
            self._acceptance[request.id] = self._overall.copy()

    def _make_sampler(self, request: Request) -> Sampler:
        prompt = request.prompt[:request.n_prompt]
        sampler = Sampler(request.params, self.vocab, prompt[-self._history(request.params):], self.n_ctx)
        sampler.replay(request.generated)
        for mark in request.params.preserved_tokens:
            tokens = self.vocab.tokenize(mark, add_special=False)
            if len(tokens) == 1:
                request.preserved |= {tokens[0]}
        for token in request.generated:
            request.stream.push(self._piece(request, token))
        return sampler

    def _piece(self, request: Request, token: int) -> bytes:
        return self.vocab.piece(token, special=token in request.preserved)

    def _history(self, params: SamplingParams) -> int:
        """How many prompt tokens the penalties look back on."""
        return self.n_ctx if min(params.repeat_last_n, params.dry_penalty_last_n) < 0 else max(
            params.repeat_last_n, params.dry_penalty_last_n, 1)

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _length(self, n_slots: int) -> DraftLength:
        length = self._lengths.get(n_slots)
        if length is None:
            length = self._lengths[n_slots] = DraftLength(self.spec.draft.n_max, self.spec.draft.adaptive)
        return length

    def _decode_step(self, slots: list[Slot], filling: list[Slot], events: list[Event]) -> tuple[float, int, bool]:
        """Draft, verify, sample; and read a piece of the ``filling`` slots' prompts in the same pass, where that is
        one.

        Returns the seconds spent in llama.cpp, the number of tokens verified, and whether prompts were read.
        """
        slots = self._with_room(slots, events)
        if not slots:
            return 0.0, 0, False
        length = self._length(len(slots))
        drafts, draft_s = self._draft(slots, length, filling)
        batch = self._batch
        batch.clear()
        started = time.perf_counter()
        guessed = [len(drafts[slot.id]) for slot in slots]
        if self.model.recurrent and len(slots) > 1:
            # A recurrent memory takes sequences of one length in one ubatch: an unequal draft would cost a pass of its
            # own. Padding is verified like a guess (so it can only be right), and counted as none.
            for slot in slots:
                drafts[slot.id].extend([0] * (max(guessed) - len(drafts[slot.id])))
        firsts = [batch.add([slot.next_token or 0, *drafts[slot.id]], len(slot.tokens), slot.id, output="all")
                  for slot in slots]
        n = batch.n
        pieces = self._beside(filling, draft_s)
        if self._target.decode(batch) != 0:
            return self._no_room([*slots, *(part.slot for part in pieces)], events), n, bool(pieces)
        self._target.wait()
        verify_s = time.perf_counter() - started
        self._tell_drafter(pieces)
        self._cells.decoded()
        pass_s = time.perf_counter() - started
        native_s = draft_s + pass_s
        if pieces:
            self._pace.read(batch.n, pass_s)
            verify_s *= n / batch.n
        else:
            self._pace.decoded(n, native_s)
            if self._drafter is not None:
                length.measured(max(guessed), draft_s, verify_s)
        if self._drafter is not None:
            self.stats.draft_s += draft_s
            self.stats.verify_s += verify_s
        for slot, first, real in zip(slots, firsts, guessed, strict=True):
            if slot.request is not None:
                slot.request.draft.draft_s += draft_s / len(slots)
                slot.request.draft.verify_s += verify_s / len(slots)
            self._accept(slot, first, drafts[slot.id], real, events)
        self._have_read(pieces, events)
        return native_s, n, bool(pieces)

    def _no_room(self, slots: list[Slot], events: list[Event]) -> float:
        """llama.cpp found no cells though ours say that there are some: the longest request ends, the others go on."""
        longest = max(slots, key=lambda slot: len(slot.tokens))
        needed = self._batch.n
        for slot in slots:
            if self._drafter is not None:
                self._drafter.rewind(slot.id, len(slot.tokens))
        self._fail(longest, RequestError(f"The context of {self.n_ctx} cells has no room for {needed} more.",
                                         "Set a larger ctx_size, or fewer requests at once (parallel)."), events)
        return 0.0

    def _with_room(self, slots: list[Slot], events: list[Event]) -> list[Slot]:
        """Those slots that can take one more token; the others end here, or shift."""
        kept: list[Slot] = []
        for slot in slots:
            if self._cells.used() + len(kept) + 1 > self.n_ctx and not self._cells.free_idle():
                if self.spec.context_shift and self._cells.shift(slot):
                    kept.append(slot)
                else:
                    self._end(slot, "length", events)
            else:
                kept.append(slot)
        return kept

    def _draft(self, slots: list[Slot], length: DraftLength,
               filling: list[Slot]) -> tuple[dict[int, list[int]], float]:
        """Guesses for each slot, and the seconds it took. What is read beside them keeps its room."""
        none: dict[int, list[int]] = {slot.id: [] for slot in slots}
        if self._drafter is None:
            return none, 0.0
        requests = [slot.request for slot in slots if slot.request is not None]
        fixed = [request.params.draft_n for request in requests if request.params.draft_n is not None]
        if fixed:
            n = min(*fixed, self.spec.draft.n_max)
        else:
            choose = length.steady if filling and self._pace.together else length.choose
            n = choose([self._acceptance[request.id] for request in requests])
        room = self.n_ctx - self._cells.used() - len(slots)
        if self._pace.together:
            room -= sum(len(slot.request.prompt) - len(slot.tokens) for slot in filling if slot.request is not None)
        n = min(n, room // len(slots), max(self._wanted(slot) - 1 for slot in slots))
        if n <= 0:
            return none, 0.0
        started = time.perf_counter()
        jobs = [(slot.id, slot.tokens, slot.next_token or 0) for slot in slots]
        drafts = self._drafter.draft(jobs, n)
        return drafts, time.perf_counter() - started

    def _wanted(self, slot: Slot) -> int:
        """How many more tokens the slot's request may still get."""
        request = slot.request
        if request is None or request.params.max_tokens is None:
            return self.n_ctx
        return request.params.max_tokens - len(request.generated)

    def _accept(self, slot: Slot, first: int, draft: list[int], guessed: int, events: list[Event]) -> None:
        """Sample the slot's outputs in turn while they equal the draft; take back the rest; send what was sampled.

        The first ``guessed`` tokens of the draft are the drafter's.
        """
        request = slot.request
        if request is None or request.sampler is None or slot.next_token is None:
            return
        fed = [slot.next_token, *draft]
        sampled: list[int] = []
        fresh: list[int] = []  # of these, the ones that the caller does not have yet
        details: list[dict[str, Any]] = []
        text: list[str] = []
        reason: str | None = None
        accepted = 0
        try:
            for k in range(len(fed)):
                token, again = self._next_token(request, request.sampler, first + k)
                reason = self._take(request, token, first + k, again, details, text)
                sampled.append(token)
                if not again:
                    fresh.append(token)
                if reason is not None or k == len(draft) or token != draft[k]:
                    break
                accepted += 1
        except RequestError as exc:
            self._fail(slot, exc, events)
            return
        kept = fed[:1 + accepted]
        if self._drafter is not None:
            self._drafter.verified(slot.id, kept, first)
        slot.tokens.extend(kept)
        refused = len(fed) - len(kept)
        slot.rollback = len(fed) - 1
        if refused:
            if not self._target.remove(slot.id, len(slot.tokens)):
                raise EngineError(f"{refused} refused tokens of a draft could not be taken back.",
                                  "Set [mtp] enabled = false for this model, and please report it.")
            slot.rollback = 0  # a pending rollback is single-use
        slot.next_token = sampled[-1]
        request.steps += 1
        # A draft cut short by the end of the answer was not refused.
        tried = guessed if reason is None else min(guessed, accepted)
        if tried:
            right = min(accepted, tried)
            self._acceptance[request.id].add(tried, right)
            self._overall.add(tried, right)
            request.draft.count(tried, right)
            self.stats.count(tried, right)
        if fresh:
            events.append(Chunk(request.id, fresh, "".join(text), details or None))
        if reason is not None:
            self._end(slot, reason, events)

    def _next_token(self, request: Request, sampler: Sampler, index: int) -> tuple[int, bool]:
        """The token after output ``index``, and whether the caller has it already (a continued request)."""
        if not request.replay:
            return sampler.sample(self._target, index, len(request.generated)), False
        token = request.replay.popleft()
        sampler.replay([token])
        return token, True

    def _take(self, request: Request, token: int, index: int, again: bool, details: list[dict[str, Any]],
              text: list[str]) -> str | None:
        """Book one token; returns why the answer ends with it, or None."""
        request.generated.append(token)
        if request.params.logprobs is not None and not again:
            details.append(logprobs(self._target.logits(index), token, request.params.logprobs, self.vocab))
        if self.vocab.is_eog(token):
            return "stop"
        piece = request.stream.push(self._piece(request, token))
        if not again:
            text.append(piece)
        if request.stream.stopped is not None:
            return "stop"
        limit = request.params.max_tokens
        return "length" if limit is not None and len(request.generated) >= limit else None

    # -- reading prompts ---------------------------------------------------------------------------------------------

    def _prefill_step(self, slots: list[Slot], n_decoded: int, events: list[Event]) -> float:
        """Read a piece of the waiting prompts; bounded while others decode, of whom ``n_decoded`` tokens were just
        verified. Returns the seconds spent in llama.cpp.
        """
        budget = self._batch.capacity
        if n_decoded:
            budget = min(budget, self._pace.between(n_decoded))
        self._batch.clear()
        pieces = self._add(parts(slots, budget, equal=self.model.recurrent and n_decoded > 0))
        started = time.perf_counter()
        if self._target.decode(self._batch) != 0:
            return self._no_room([part.slot for part in pieces], events)
        self._tell_drafter(pieces)
        self._cells.decoded()
        self._target.wait()
        seconds = time.perf_counter() - started
        if not self._pace.together:
            self._pace.read(self._batch.n, seconds)
        self._have_read(pieces, events)
        return seconds

    def _beside(self, slots: list[Slot], draft_s: float) -> list[Part]:
        """Add to the batch of answers what is to be read in the same pass."""
        n = self._batch.n
        budget = min(self._pace.beside(n, draft_s), self.n_ctx - self._cells.used() - n) if slots else 0
        return self._add(parts(slots, budget, equal=False))

    def _add(self, pieces: list[Part]) -> list[Part]:
        for part in pieces:
            part.first = self._batch.add(part.tokens, len(part.slot.tokens), part.slot.id,
                                         output="last" if part.last else "none")
        return pieces

    def _tell_drafter(self, pieces: list[Part]) -> None:
        if self._drafter is None or not pieces:
            return
        for part in pieces:
            self._drafter.filled(part.slot.id, part.tokens, part.first, part.following)
        self._drafter.flush()

    def _have_read(self, pieces: list[Part], events: list[Event]) -> None:
        """Book what was read; a prompt that ends with it gives its answer's first token."""
        for part in pieces:
            slot = part.slot
            slot.tokens.extend(part.tokens)
            if slot.request is not None and len(slot.tokens) == slot.request.checkpoint_at:
                self._cells.keep(slot)
            if part.last:
                self._first_token(slot, part.first + len(part.tokens) - 1, events)

    def _first_token(self, slot: Slot, index: int, events: list[Event]) -> None:
        request = slot.request
        if request is None or request.sampler is None:
            return
        details: list[dict[str, Any]] = []
        text: list[str] = []
        request.first_at = time.perf_counter()
        if request.params.max_tokens is not None and len(request.generated) >= request.params.max_tokens:
            self._end(slot, "length", events)  # max_tokens = 0: the prompt was to be read, nothing more
            return
        if request.stream.stopped is not None or (request.generated and self.vocab.is_eog(request.generated[-1])):
            self._end(slot, "stop", events)  # a continued answer that was complete
            return
        try:
            token, again = self._next_token(request, request.sampler, index)
            reason = self._take(request, token, index, again, details, text)
        except RequestError as exc:
            self._fail(slot, exc, events)
            return
        slot.next_token = token
        if not again:
            events.append(Chunk(request.id, [token], "".join(text), details or None))
        if reason is not None:
            self._end(slot, reason, events)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, slot: Slot, reason: str, events: list[Event]) -> None:
        request = slot.request
        if request is None:
            return
        request.ended_at = time.perf_counter()
        rest = request.stream.finish()
        if rest and reason != "cancelled":
            events.append(Chunk(request.id, [], rest))
        events.append(Done(request.id, reason, request.stats(), request.stream.stopped))
        self._release(slot)

    def _fail(self, slot: Slot, exc: HydraError, events: list[Event]) -> None:
        """End one request by an error; what its last batch left in the memory is forgotten."""
        request = slot.request
        if request is None:
            return
        events.append(Failed(request.id, type(exc).__name__, exc.message, exc.hint))
        self._cells.forget(slot, 0)
        self._release(slot)

    def _release(self, slot: Slot) -> None:
        request = slot.request
        if request is not None:
            if request.sampler is not None:
                request.sampler.close()
            self._acceptance.pop(request.id, None)
        slot.request = None
        slot.next_token = None
        slot.used_at = time.perf_counter()
