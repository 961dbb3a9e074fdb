"""Chooses tokens: one request's parameters, checked, and the chain of llama.cpp samplers made from them.

Does not know slots, batches or drafting. The final draw of token ``k`` of an answer is seeded by (seed, k) alone: a
request that is continued after its engine died, or whose draft was thrown away, draws the same numbers again with no
state to keep.

Source: common/sampling.cpp of the pinned llama.cpp (order of the chain; grammar checked on the drawn token first, and
only on a refusal applied to the whole vocabulary and drawn again: the distribution is the constrained one either way).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from hydra.errors import EngineError, RequestError

from .llama import Context, Vocab, api

MAX_LOGPROBS = 100
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is to be sampled; names and defaults are llama.cpp's.

    ``temperature`` <= 0 is greedy. ``seed`` None draws one. ``max_tokens`` None runs to the end of the context.
    ``logprobs``: None for none, else how many alternatives. ``logit_bias``: by token id. ``json_schema``: a JSON schema
    as a dict.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: str = ""
    json_schema: Mapping[str, Any] | None = None
    preserved_tokens: tuple[str, ...] = ()
    """Control tokens whose text is part of the answer (marks of reasoning and tool calls); llama-server's name."""
    draft_n: int | None = None
    """Draft exactly so many tokens each round (0 = none) instead of as many as pay; at most what was loaded for."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Checked parameters, with a seed drawn where none was given.

        Raises: RequestError naming the parameter and its range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise RequestError(f"There is no sampling parameter {unknown[0]!r}.", f"Known: {', '.join(sorted(known))}.")
        values = {key: value for key, value in data.items() if value is not None}
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        try:
            for key in ("stop", "dry_sequence_breakers", "preserved_tokens"):
                if key in values:
                    values[key] = tuple(str(item) for item in values[key])
            if "logit_bias" in values:
                values["logit_bias"] = {int(k): float(v) for k, v in dict(values["logit_bias"]).items()}
            for f in fields(cls):
                if f.name in values and f.type in ("float", "int", "int | None"):
                    values[f.name] = float(values[f.name]) if f.type == "float" else int(values[f.name])
            params = cls(**values)
        except (TypeError, ValueError) as exc:
            raise RequestError(f"A sampling parameter has the wrong type: {exc}.") from exc
        params._check()
        if params.seed is None or params.seed < 0:
            object.__setattr__(params, "seed", int.from_bytes(os.urandom(4), "little"))
        return params

    def _check(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "temperature": (-1, 100), "top_k": (-1, 1 << 30), "top_p": (0, 1), "min_p": (0, 1), "typical_p": (0, 1),
            "repeat_penalty": (1e-6, 100), "repeat_last_n": (-1, 1 << 30), "frequency_penalty": (-100, 100),
            "presence_penalty": (-100, 100), "dry_multiplier": (0, 1000), "dry_base": (0, 1000),
            "dry_allowed_length": (0, 1 << 20), "dry_penalty_last_n": (-1, 1 << 30)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} is {value}.", f"It must lie between {low:g} and {high:g}.")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}.", "It must be 0 or more.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs is {self.logprobs}.", f"It must lie between 0 and {MAX_LOGPROBS}.")
        if self.draft_n is not None and self.draft_n < 0:
            raise RequestError(f"draft_n is {self.draft_n}.", "It must be 0 or more.")
        if any(not text for text in self.stop):
            raise RequestError("A stop string is empty.", "Leave it out.")
        if self.grammar and self.json_schema is not None:
            raise RequestError("Both grammar and json_schema are given.", "Give one of them.")

    @property
    def plain_greedy(self) -> bool:
        """True when the token is simply the largest logit."""
        return (self.temperature <= 0 and self.repeat_penalty == 1 and not self.frequency_penalty
                and not self.presence_penalty and not self.dry_multiplier and not self.logit_bias
                and not self.ignore_eos and not self.grammar and self.json_schema is None)


def draw_seed(seed: int, position: int, again: bool = False) -> int:
    """32 bits for the draw of one token: splitmix64 over (seed, position, attempt). Source: Steele et al., OOPSLA
    2014.
    """
    x = (seed * 0x9E3779B97F4A7C15 + position * 2 + again + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 16) & 0xFFFFFFFF


def schema_to_grammar(schema: Mapping[str, Any]) -> str:
    """GBNF for a JSON schema, by llama-cpp-python's converter. Raises RequestError for a schema it cannot express."""
    from .llama import json_schema_to_gbnf

    try:
        return json_schema_to_gbnf(json.dumps(schema))
    except Exception as exc:  # the converter raises whatever its parts raise
        raise RequestError(f"The JSON schema cannot be turned into a grammar: {exc}.") from exc


class Sampler:
    """One request's samplers. ``sample`` draws the token after output ``index`` of the last decode; ``close`` frees
    them.

    Raises: RequestError for a grammar that does not parse.
    """

    def __init__(self, params: SamplingParams, vocab: Vocab, history: Sequence[int] = (), n_ctx: int = 0) -> None:
        self.params = params
        self._vocab = vocab
        self._c = api().c
        self._sample = api().sample
        self._seed = params.seed or 0
        self._chain: Any = None
        self._grammar: Any = None
        self._n_filters = 0
        if params.plain_greedy:
            return
        self._make_chain(n_ctx)
        grammar = params.grammar or (schema_to_grammar(params.json_schema) if params.json_schema is not None else "")
        if grammar:
            self._grammar = self._c.llama_sampler_init_grammar(vocab.handle, grammar.encode(), b"root")
            if not self._grammar:
                self.close()
                raise RequestError("The grammar cannot be parsed.", "It must be GBNF with a rule named root.")
            self._candidates = np.zeros(vocab.n_tokens, _CANDIDATE)
        for token in history:
            self._c.llama_sampler_accept(self._chain, token)

    def _make_chain(self, n_ctx: int) -> None:
        c, p, vocab = self._c, self.params, self._vocab
        self._chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())

        def add(sampler: Any) -> None:
            c.llama_sampler_chain_add(self._chain, sampler)
            self._n_filters += 1

        bias = dict(p.logit_bias)
        if p.ignore_eos:
            bias.update({token: -math.inf for token in range(vocab.n_tokens) if vocab.is_eog(token)})
        if bias:
            array = (c.llama_logit_bias * len(bias))()
            for item, (token, value) in zip(array, bias.items(), strict=True):
                if not 0 <= token < vocab.n_tokens:
                    raise RequestError(f"logit_bias names token {token}; the vocabulary has {vocab.n_tokens}.")
                item.token, item.bias = token, value
            add(c.llama_sampler_init_logit_bias(vocab.n_tokens, len(bias), array))
        if p.repeat_penalty != 1 or p.frequency_penalty or p.presence_penalty:
            last_n = n_ctx if p.repeat_last_n < 0 else p.repeat_last_n
            add(c.llama_sampler_init_penalties(vocab.n_tokens, last_n, p.repeat_penalty, p.frequency_penalty,
                                               p.presence_penalty))
        if p.dry_multiplier:
            breakers = (ctypes.c_char_p * max(1, len(p.dry_sequence_breakers)))(
                *[text.encode() for text in p.dry_sequence_breakers])
            last_n = n_ctx if p.dry_penalty_last_n < 0 else p.dry_penalty_last_n
            add(c.llama_sampler_init_dry(vocab.handle, p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n,
                                         breakers, len(p.dry_sequence_breakers)))
        if p.temperature <= 0:
            c.llama_sampler_chain_add(self._chain, c.llama_sampler_init_greedy())
            return
        if p.top_k > 0:
            add(c.llama_sampler_init_top_k(p.top_k))
        if p.typical_p < 1:
            add(c.llama_sampler_init_typical(p.typical_p, 1))
        if p.top_p < 1:
            add(c.llama_sampler_init_top_p(p.top_p, 1))
        if p.min_p > 0:
            add(c.llama_sampler_init_min_p(p.min_p, 1))
        add(c.llama_sampler_init_temp(p.temperature))
        c.llama_sampler_chain_add(self._chain, c.llama_sampler_init_dist(0))

    def sample(self, context: Context, index: int, position: int) -> int:
        """The token that follows output ``index``; ``position`` counts the tokens of the answer before it.

        Raises: EngineError when the logits are not numbers.
        """
        if self._chain is None:
            logits = context.logits(index)
            token = int(logits.argmax())
            if not math.isfinite(logits[token]):
                raise EngineError("The model's logits are not finite numbers.",
                                  "A device or the link may be at fault: `hydra doctor` compares peer and head.")
            return token
        self._seed_draw(position, again=False)
        if self._grammar is None:
            return int(self._sample(self._chain, context.handle, index))
        return self._sample_constrained(context.logits(index), position)

    def _seed_draw(self, position: int, again: bool) -> None:
        if self.params.temperature <= 0:
            return
        c = self._c
        c.llama_sampler_free(c.llama_sampler_chain_remove(self._chain, self._n_filters))
        c.llama_sampler_chain_add(self._chain, c.llama_sampler_init_dist(draw_seed(self._seed, position, again)))

    def _sample_constrained(self, logits: npt.NDArray[np.float32], position: int) -> int:
        c = self._c
        token = self._apply(logits, constrained=False)
        if not self._allowed(token):
            self._seed_draw(position, again=True)
            token = self._apply(logits, constrained=True)
            if not self._allowed(token):
                raise RequestError("The grammar allows no token here.", "Its end does not allow the end of the text.")
        c.llama_sampler_accept(self._grammar, token)
        c.llama_sampler_accept(self._chain, token)
        return token

    def _apply(self, logits: npt.NDArray[np.float32], constrained: bool) -> int:
        candidates = self._candidates
        candidates["id"] = np.arange(len(candidates), dtype=np.int32)
        candidates["logit"] = logits
        array = self._array(candidates)
        if constrained:
            self._c.llama_sampler_apply(self._grammar, ctypes.byref(array))
        self._c.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def _allowed(self, token: int) -> bool:
        one = np.zeros(1, _CANDIDATE)
        one["id"] = token
        array = self._array(one)
        self._c.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(one["logit"][0] > -math.inf)

    def _array(self, candidates: npt.NDArray[Any]) -> Any:
        array = self._c.llama_token_data_array()
        array.data = ctypes.cast(candidates.ctypes.data, type(array.data))
        array.size = len(candidates)
        array.selected = -1
        array.sorted = False
        return array

    def replay(self, tokens: Sequence[int]) -> None:
        """Take tokens as already sampled (a request that is continued)."""
        for token in tokens:
            if self._grammar is not None:
                self._c.llama_sampler_accept(self._grammar, token)
            if self._chain is not None:
                self._c.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        for name in ("_chain", "_grammar"):
            handle = getattr(self, name)
            if handle is not None:
                self._c.llama_sampler_free(handle)
                setattr(self, name, None)


def logprobs(logits: npt.NDArray[np.float32], token: int, top: int, vocab: Vocab) -> dict[str, Any]:
    """The token's log-probability under the model (before samplers) and the ``top`` likeliest alternatives."""
    peak = float(logits.max())
    log_sum = peak + math.log(float(np.exp(logits - peak, dtype=np.float32).sum(dtype=np.float64)))
    result: dict[str, Any] = {"token": token, "logprob": float(logits[token]) - log_sum, "top": []}
    if top:
        best = np.argpartition(-logits, min(top, len(logits) - 1))[:top]
        best = best[np.argsort(-logits[best], kind="stable")]
        result["top"] = [{"token": int(t), "text": vocab.piece(int(t), special=True).decode("utf-8", "replace"),
                          "bytes": list(vocab.piece(int(t), special=True)),
                          "logprob": float(logits[t]) - log_sum} for t in best]
    result["text"] = vocab.piece(token, special=True).decode("utf-8", "replace")
    result["bytes"] = list(vocab.piece(token, special=True))
    return result
