"""The head of the link's benchmark: one process that decodes when it is told to, at several fillings of the cache.

A cache of 64K cells is not filled by computing: one sequence of 512 tokens is, and its state is restored under other
sequence numbers until as many cells are in use as wanted. What a step sends depends on the cells in use, not on whose
they are. One JSON line on stdin, one on stdout:

    {"fill": n_kv}                  → {"filled": cells}
    {"steps": n, "width": tokens}   → {"ms": [each], "tokens": [greedy choice of each row], "logits": [[…] per step]}

The text is made up, but repeats itself as text does, because that decides how much of the embeddings is new to the
peer: ``NEW_SHARE`` of the tokens have not come before. (Of English prose, Python and C++ in Qwen's vocabulary, 9 to
33 % of the tokens between the 500th and the 4,000th had not, and 3 to 12 % of later ones.)

Knows nothing of what stands between it and the peer; llama.cpp is reached through hydra.head.llama only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hydra.bench.process import die_with_parent
from hydra.errors import HydraError

BASE_TOKENS = 512
WIDEST = 4
_TAIL_TOKENS = 1024
NEW_SHARE = 0.2
_LOGITS = 64  # of each step's first row, to tell what half precision changes


@dataclass(frozen=True)
class LinkHeadSpec:
    """peer: host:port. max_kv: largest filling that will be asked for, in cells."""

    model: str
    peer: str
    max_kv: int
    threads: int = 2
    cache_type: str = "q8_0"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class LinkHead:
    """A model whose layers are all on the peer, and one context."""

    def __init__(self, spec: LinkHeadSpec) -> None:
        from hydra.head import llama, loading, placement

        llama.api()
        shape = loading.read_shape(spec.model)
        peer = llama.register_peer(spec.peer)
        devices = [peer, *llama.local_devices(("CPU",))[:1]]
        split = placement.tensor_split([shape.n_layer, 0], shape.n_layer_nextn + 1)
        sequences = max(1, spec.max_kv // BASE_TOKENS) + 1
        self.model = llama.Model(spec.model, devices, split, load_mtp=False, pipeline=False, use_extra_bufts=False)
        self.context = llama.Context(
            self.model, n_ctx=sequences * BASE_TOKENS + _TAIL_TOKENS, n_batch=BASE_TOKENS, n_ubatch=BASE_TOKENS,
            n_seq_max=sequences, n_outputs_max=max(sequences, WIDEST), type_k=spec.cache_type, type_v=spec.cache_type,
            flash_attn="on", n_threads=spec.threads,
        )  # fmt: skip
        self._batch = llama.Batch(BASE_TOKENS)
        self._text = text(self.model.vocab.n_tokens)
        self._decode([next(self._text) for _ in range(BASE_TOKENS)], 0, "last")
        self._state = self.context.state(0)
        self.filled = self._position = BASE_TOKENS

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def fill(self, n_kv: int) -> int:
        """Cells in use, at least n_kv less one sequence's: the steps then run just below it."""
        self._rewind()
        while self.filled + BASE_TOKENS < n_kv:
            self.context.restore(self.filled // BASE_TOKENS, self._state)
            self.filled += BASE_TOKENS
        return self.filled

    def steps(self, count: int, width: int) -> dict[str, Any]:
        if self._position + count * width > BASE_TOKENS + _TAIL_TOKENS // 2:
            self._rewind()
        times, tokens, logits = [], [], []
        for _ in range(count):
            part = [next(self._text) for _ in range(width)]
            began = time.perf_counter()
            self._decode(part, self._position, "all")
            rows = [self.context.logits(row) for row in range(width)]
            tokens += [int(row.argmax()) for row in rows]
            times.append((time.perf_counter() - began) * 1e3)
            logits.append([round(float(value), 5) for value in rows[0][:_LOGITS]])
            self._position += width
        return {"ms": times, "tokens": tokens, "logits": logits}

    def _rewind(self) -> None:
        self.context.remove(0, BASE_TOKENS)
        self._position = BASE_TOKENS

    def _decode(self, part: list[int], at: int, output: str) -> None:
        self._batch.clear()
        self._batch.add(part, at, 0, output=output)
        if self.context.decode(self._batch) != 0:
            raise HydraError(f"The context has no room for {len(part)} more tokens.")


def text(n_tokens: int) -> Iterator[int]:
    """Tokens for ever, the same ones each time: NEW_SHARE of them new, while there are any, the others seen before."""
    rng = np.random.default_rng(1)
    # Not the first few, where control tokens are.
    fresh = iter(rng.permutation(np.arange(n_tokens // 8, n_tokens)).tolist())
    seen: list[int] = []
    while True:
        token = next(fresh, None) if not seen or rng.random() < NEW_SHARE else None
        if token is None:
            token = seen[int(rng.integers(len(seen)))]
        else:
            seen.append(token)
        yield token


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the child process; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    die_with_parent()
    try:
        head = LinkHead(LinkHeadSpec(**json.loads(given[0])))
        _say({"filled": head.filled})
        for line in sys.stdin:
            asked = json.loads(line)
            if "fill" in asked:
                _say({"filled": head.fill(asked["fill"])})
            else:
                _say(head.steps(asked["steps"], asked["width"]))
        head.close()
    except HydraError as error:
        _say({"error": error.message, "hint": error.hint})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
