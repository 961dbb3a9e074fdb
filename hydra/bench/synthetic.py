"""Makes models to test and measure with: real architectures, made-up weights, no download.

Knows GGUF, the tensors of three architectures and how to fill blocks of quantised types; does not know llama.cpp or
an engine.

**Exact** models say what is known in advance. Everything that writes into the residual stream (attn_output, ssm_out,
ffn_down) is zero: all arithmetic is done, and the stream stays the token's embedding. Output row ``successor(t)`` is
the embedding of ``t``, so the model says ``successor(t)`` after ``t`` with certainty. The MTP block drafts from an
embedding table of its own in which a chosen share of rows is wrong: acceptance is a number that was chosen. **Mixed**
models have nothing zeroed: the successor is still favoured, but state and cache decide.

Big shapes are filled with random quantised blocks written directly. They cost what the real model costs.

Source: src/models/{qwen35,llama,gemma3}.cpp and ggml-common.h of the pinned llama.cpp; docs/engine.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hydra.embedded import cache_home
from hydra.errors import ModelError

ASK_ABOVE_BYTES = 1 << 30
_GENERATION = 5  # part of a cached file's name: raise it when what is written changes
_ALIGN = 32
_PIECE_BYTES = 32 << 20
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CYCLE = [*range(32, 127), 10]  # printable ASCII and the line feed that ends a chat prompt
_EMBED_STD = 0.05
MIXED_GAIN = 3.0  # of what the layers of a mixed model add: state then decides about as often as the last token
_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
Array = npt.NDArray[Any]
Confirm = Callable[[str, int], bool]


@dataclass(frozen=True)
class Shape:
    """One model's dimensions. ``n_nextn`` MTP blocks; every ``full_attn_interval``-th layer attends, the others are
    gated delta nets
    (arch qwen35). ``quant``: type of the weight matrices; embeddings and output are q8_0 unless that is f32 or f16."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    quant: str
    n_nextn: int = 0
    full_attn_interval: int = 4
    ssm_state: int = 0
    ssm_groups: int = 0
    ssm_heads: int = 0
    ssm_conv: int = 4
    n_swa: int = 0

    @property
    def table_quant(self) -> str:
        return self.quant if self.quant in ("f32", "f16") else "q8_0"


SHAPES: dict[str, Shape] = {shape.name: shape for shape in (
    Shape("toy", "qwen35", 4, 256, 256, 4, 2, 64, 512, 4096, "f32", 1, 2, 32, 2, 8),
    Shape("toy-llama", "llama", 4, 256, 256, 4, 2, 64, 512, 4096, "f32"),
    Shape("toy-gemma", "gemma3", 6, 256, 256, 4, 2, 64, 512, 4096, "f32", n_swa=64),
    Shape("tiny", "qwen35", 12, 1024, 3072, 8, 2, 128, 4096, 32768, "q8_0", 1, 4, 128, 8, 16),
    Shape("small", "qwen35", 16, 2048, 6144, 8, 2, 256, 4096, 32768, "q8_0", 1, 4, 128, 16, 16),
    Shape("link", "llama", 1, 5120, 3584, 24, 4, 256, 4096, 131072, "q8_0"),
    Shape("9b", "qwen35", 32, 4096, 12288, 16, 4, 256, 248320, 262144, "q5_K", 1, 4, 128, 16, 32),
    Shape("27b", "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, "q5_K", 1, 4, 128, 16, 48),
)}


@dataclass(frozen=True)
class Language:
    """What an exact model says: ``successor[t]`` after ``t``, and what its MTP block guesses (``guess[t]``)."""

    successor: tuple[int, ...]
    guess: tuple[int, ...]

    def say(self, last: int, n: int) -> list[int]:
        """The ``n`` tokens that follow ``last``."""
        said = []
        for _ in range(n):
            last = self.successor[last]
            said.append(last)
        return said


def language(shape: Shape, acceptance: float, seed: int = 1) -> Language:
    """One cycle over the printable characters; ``1 - acceptance`` of them are guessed wrongly, spread evenly."""
    rng = np.random.default_rng(seed)
    cycle = list(rng.permutation(_CYCLE))
    successor = list(range(shape.n_vocab))
    for here, there in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        successor[here] = int(there)
    guess = list(successor)
    order = rng.permutation(len(cycle))
    for k in order[:round((1 - acceptance) * len(cycle))]:
        # The guess of another character two steps on: never right.
        guess[cycle[k]] = successor[cycle[(k + 2) % len(cycle)]]
    return Language(tuple(successor), tuple(guess))


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # rows first, as numpy has it
    quant: str
    fill: Callable[[], Iterator[bytes]]


class _Filler:
    """Makes tensors' bytes: random blocks, zeros, constants, tables."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool: dict[tuple[str, float], bytes] = {}

    def random(self, shape: tuple[int, ...], quant: str, std: float) -> Iterator[bytes]:
        total = n_bytes(shape, quant)
        if total <= 4 * _PIECE_BYTES:
            yield random_blocks(self._rng, int(np.prod(shape)), quant, std)
            return
        # Large tensors repeat one piece from different beginnings: random enough to cost what the real ones cost.
        key = (quant, std)
        unit = block_layout(quant)[1]
        if key not in self._pool:
            per_block = block_layout(quant)[0]
            self._pool[key] = random_blocks(self._rng, _PIECE_BYTES // unit * per_block, quant, std)
        pool = self._pool[key]
        at = int(self._rng.integers(len(pool) // unit)) * unit
        while total:
            piece = memoryview(pool)[at:at + total]
            yield bytes(piece)
            total -= len(piece)
            at = 0

    @staticmethod
    def zeros(shape: tuple[int, ...], quant: str) -> Iterator[bytes]:
        total = n_bytes(shape, quant)
        while total:
            size = min(total, _PIECE_BYTES)
            yield bytes(size)
            total -= size

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Iterator[bytes]:
        yield self._rng.uniform(low, high, shape).astype(np.float32).tobytes()


def block_layout(quant: str) -> tuple[int, int]:
    """Weights and bytes of one block. Source: ggml-common.h."""
    layouts = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_K": (256, 144), "q5_K": (256, 176),
               "q6_K": (256, 210)}
    try:
        return layouts[quant]
    except KeyError:
        raise ModelError(f"Synthetic models cannot be made in {quant!r}.", f"Types: {', '.join(layouts)}.") from None


def n_bytes(shape: tuple[int, ...], quant: str) -> int:
    """Bytes of a tensor. Raises ModelError when its rows are no whole number of blocks."""
    per_block, unit = block_layout(quant)
    if shape[-1] % per_block:
        raise ModelError(f"A row of {shape[-1]} weights is no whole number of {quant} blocks of {per_block}.")
    return int(np.prod(shape)) // per_block * unit


def random_blocks(rng: np.random.Generator, count: int, quant: str, std: float) -> bytes:
    """``count`` weights of about this standard deviation, as blocks of ``quant``."""
    if quant in ("f32", "f16"):
        return (rng.standard_normal(count) * std).astype(np.float32 if quant == "f32" else np.float16).tobytes()
    per_block, unit = block_layout(quant)
    blocks = rng.integers(0, 256, (count // per_block, unit), dtype=np.uint8)

    def scale(value: float) -> Array:
        return np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if quant == "q8_0":  # d, 32 x int8: uniform over -128..127 has a deviation of 73.9
        blocks[:, :2] = scale(std / 73.9)
    elif quant == "q6_K":  # d at the end; int8 scales x values of -32..31
        blocks[:, 208:210] = scale(std / (73.9 * 18.5))
    else:  # q4_K, q5_K: d, dmin first; six-bit scales x values, minus six-bit minima: centred on zero
        top = 15 if quant == "q4_K" else 31
        blocks[:, :2] = scale(std / (13.0 * top))
        blocks[:, 2:4] = scale(std / (13.0 * top) * top / 2)
    return blocks.tobytes()


def _table(rng_seed: int, shape: tuple[int, int], quant: str, rows: Callable[[int, int], Array]) -> Iterator[bytes]:
    """An embedding table whose row ``i`` is the seed's row ``rows(i)``; only the first rows are permuted."""
    n_rows, n_cols = shape
    row_bytes = n_bytes((1, n_cols), quant)
    step = max(512, _PIECE_BYTES // row_bytes // 512 * 512)
    for first in range(0, n_rows, step):
        count = min(step, n_rows - first)
        rng = np.random.default_rng((rng_seed, first))
        data = np.frombuffer(random_blocks(rng, count * n_cols, quant, _EMBED_STD), np.uint8).reshape(count, row_bytes)
        yield data[rows(first, count)].tobytes()


def _plan(shape: Shape, exact: bool, acceptance: float, seed: int) -> list[_Tensor]:
    fill = _Filler(seed)
    words = language(shape, acceptance, seed)
    tensors: list[_Tensor] = []
    d, ff = shape.n_embd, shape.n_ff

    def weight(name: str, rows: int, cols: int, *, writes: bool = False, std: float | None = None) -> None:
        size = (rows, cols)
        if writes and exact:
            tensors.append(_Tensor(name, size, shape.quant, lambda: fill.zeros(size, shape.quant)))
        else:
            deviation = std if std is not None else (MIXED_GAIN if writes else 1.0) / float(np.sqrt(cols))
            # The stream is made of embeddings of deviation 0.05; what the layers add is to be of the same order.
            deviation = deviation * _EMBED_STD if writes else deviation
            tensors.append(_Tensor(name, size, shape.quant, lambda: fill.random(size, shape.quant, deviation)))

    def vector(name: str, size: int | tuple[int, int], low: float, high: float) -> None:
        dims = size if isinstance(size, tuple) else (size,)
        tensors.append(_Tensor(name, dims, "f32", lambda: fill.uniform(dims, low, high)))

    def table(name: str, source: tuple[int, ...]) -> None:
        index = np.asarray(source)
        limit = 512  # rows beyond are their own: a table of gigabytes is written in one pass

        def rows(first: int, count: int) -> Array:
            own = np.arange(count)
            if first == 0:
                own[:limit] = index[:limit]
            return own

        tensors.append(_Tensor(name, (shape.n_vocab, d), shape.table_quant,
                               lambda: _table(seed, (shape.n_vocab, d), shape.table_quant, rows)))

    def norm(name: str, size: int = d) -> None:
        vector(name, size, 1.0, 1.0)

    def attention(prefix: str, gated: bool) -> None:
        weight(f"{prefix}.attn_q.weight", shape.n_head * shape.head_dim * (2 if gated else 1), d)
        weight(f"{prefix}.attn_k.weight", shape.n_head_kv * shape.head_dim, d)
        weight(f"{prefix}.attn_v.weight", shape.n_head_kv * shape.head_dim, d)
        weight(f"{prefix}.attn_output.weight", d, shape.n_head * shape.head_dim, writes=True)
        if shape.arch != "llama":
            norm(f"{prefix}.attn_q_norm.weight", shape.head_dim)
            norm(f"{prefix}.attn_k_norm.weight", shape.head_dim)

    def feed_forward(prefix: str) -> None:
        weight(f"{prefix}.ffn_gate.weight", ff, d)
        weight(f"{prefix}.ffn_up.weight", ff, d)
        weight(f"{prefix}.ffn_down.weight", d, ff, writes=True)

    def delta_net(prefix: str) -> None:
        key, value = shape.ssm_state * shape.ssm_groups, shape.ssm_state * shape.ssm_heads
        weight(f"{prefix}.attn_qkv.weight", 2 * key + value, d)
        weight(f"{prefix}.attn_gate.weight", value, d)
        vector(f"{prefix}.ssm_conv1d.weight", (2 * key + value, shape.ssm_conv), -0.5, 0.5)
        vector(f"{prefix}.ssm_dt.bias", shape.ssm_heads, -3.0, 0.0)
        vector(f"{prefix}.ssm_a", shape.ssm_heads, -4.0, -0.05)
        weight(f"{prefix}.ssm_beta.weight", shape.ssm_heads, d)
        weight(f"{prefix}.ssm_alpha.weight", shape.ssm_heads, d)
        norm(f"{prefix}.ssm_norm.weight", shape.ssm_state)
        weight(f"{prefix}.ssm_out.weight", d, value, writes=True)

    identity = tuple(range(shape.n_vocab))
    inverse = np.argsort(np.asarray(words.successor))
    table("token_embd.weight", identity)
    norm("output_norm.weight")
    table("output.weight", tuple(int(t) for t in inverse))
    for il in range(shape.n_layer):
        prefix = f"blk.{il}"
        norm(f"{prefix}.attn_norm.weight")
        recurrent = shape.arch == "qwen35" and (il + 1) % shape.full_attn_interval != 0
        if recurrent:
            delta_net(prefix)
        else:
            attention(prefix, gated=shape.arch == "qwen35")
        if shape.arch != "llama":
            norm(f"{prefix}.post_attention_norm.weight")
        if shape.arch != "qwen35":
            norm(f"{prefix}.ffn_norm.weight")
        if shape.arch == "gemma3":
            norm(f"{prefix}.post_ffw_norm.weight")
        feed_forward(prefix)
    for il in range(shape.n_layer, shape.n_layer + shape.n_nextn):
        prefix = f"blk.{il}"
        norm(f"{prefix}.attn_norm.weight")
        norm(f"{prefix}.post_attention_norm.weight")
        attention(prefix, gated=True)
        feed_forward(prefix)
        tensors.append(_Tensor(f"{prefix}.nextn.eh_proj.weight", (d, 2 * d), _projection_quant(shape),
                               lambda: _projection(d, _projection_quant(shape), 0.0 if exact else 0.3)))
        norm(f"{prefix}.nextn.enorm.weight")
        norm(f"{prefix}.nextn.hnorm.weight")
        norm(f"{prefix}.nextn.shared_head_norm.weight")
        if acceptance < 1:
            # Row t is the embedding of the token whose successor is guessed after t.
            table(f"{prefix}.nextn.embed_tokens.weight", tuple(int(inverse[g]) for g in words.guess))
    return tensors


def _projection_quant(shape: Shape) -> str:
    return shape.table_quant


def _projection(d: int, quant: str, hidden: float) -> Iterator[bytes]:
    """eh_proj: the identity on the embedding's half, ``hidden`` times the identity on the hidden row's half."""
    for first in range(0, d, 256):
        rows = np.zeros((min(256, d - first), 2 * d), np.float32)
        own = np.arange(len(rows))
        rows[own, first + own] = 1.0
        rows[own, d + first + own] = hidden
        yield _quantise(rows, quant)


def _quantise(rows: npt.NDArray[np.float32], quant: str) -> bytes:
    if quant == "f32":
        return rows.tobytes()
    if quant == "f16":
        return rows.astype(np.float16).tobytes()
    blocks = rows.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    safe = np.where(scale == 0, 1, scale).astype(np.float32)
    data = np.zeros((len(blocks), 34), np.uint8)
    data[:, :2] = scale[:, None].view(np.uint8)
    data[:, 2:] = np.rint(blocks / safe[:, None]).astype(np.int8).view(np.uint8)
    return data.tobytes()


def size_bytes(shape: Shape, acceptance: float = 0.7) -> int:
    """What the file of this shape takes on disk, to within its header."""
    return sum(n_bytes(tensor.shape, tensor.quant) for tensor in _plan(shape, True, acceptance, 1))


def build(path: Path, shape: Shape, *, acceptance: float = 0.7, exact: bool = True, seed: int = 1,
          progress: Callable[[int, int], None] | None = None) -> None:
    """Write one model; ``progress`` gets bytes done and in all. The file appears under its name only when it is
    whole.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    if not 0 <= acceptance <= 1:
        raise ModelError(f"An acceptance of {acceptance} is not between 0 and 1.")
    tensors = _plan(shape, exact, acceptance, seed)
    total = sum(n_bytes(tensor.shape, tensor.quant) for tensor in tensors)
    kinds = {"f32": GGMLQuantizationType.F32, "f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0,
             "q4_K": GGMLQuantizationType.Q4_K, "q5_K": GGMLQuantizationType.Q5_K, "q6_K": GGMLQuantizationType.Q6_K}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        writer = GGUFWriter(str(part), shape.arch)
        _metadata(writer, shape, acceptance, exact)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes(tensor.shape, tensor.quant),
                                   raw_dtype=kinds[tensor.quant])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        done = 0
        with part.open("ab") as out:
            out.write(bytes(-out.tell() % _ALIGN))
            for tensor in tensors:
                size = 0
                for piece in tensor.fill():
                    out.write(piece)
                    size += len(piece)
                    if progress is not None:
                        progress(done + size, total)
                out.write(bytes(-size % _ALIGN))
                done += size
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _metadata(writer: Any, shape: Shape, acceptance: float, exact: bool) -> None:
    arch = shape.arch
    writer.add_name(f"hydra synthetic {shape.name}")
    made = {**dataclasses.asdict(shape), "acceptance": acceptance, "exact": exact}
    writer.add_string("hydra.synthetic", json.dumps(made))
    numbers = {"block_count": shape.n_layer + shape.n_nextn, "context_length": shape.n_ctx,
               "embedding_length": shape.n_embd,
               "feed_forward_length": shape.n_ff, "attention.head_count": shape.n_head,
               "attention.head_count_kv": shape.n_head_kv, "attention.key_length": shape.head_dim,
               "attention.value_length": shape.head_dim,
               "rope.dimension_count": shape.head_dim // 4 if arch == "qwen35" else shape.head_dim}
    if arch == "qwen35":
        numbers.update({"full_attention_interval": shape.full_attn_interval, "ssm.conv_kernel": shape.ssm_conv,
                        "ssm.inner_size": shape.ssm_state * shape.ssm_heads, "ssm.state_size": shape.ssm_state,
                        "ssm.time_step_rank": shape.ssm_heads, "ssm.group_count": shape.ssm_groups})
        pairs = shape.head_dim // 8
        writer.add_array("qwen35.rope.dimension_sections", [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    if shape.n_nextn:
        numbers["nextn_predict_layers"] = shape.n_nextn
    if shape.n_swa:
        numbers["attention.sliding_window"] = shape.n_swa
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 1e7)
    _vocabulary(writer, shape)


def _vocabulary(writer: Any, shape: Shape) -> None:
    """256 bytes, one merge (llama.cpp asks for the list), the specials, and padding."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte-to-character table
    spelling = {byte: chr(byte) for byte in visible}
    spelling.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in spelling)})
    tokens = [spelling[byte] for byte in range(256)] + [spelling[0] * 2, *_SPECIALS]
    types = [1] * 257 + [3] * len(_SPECIALS)
    tokens += [f"<|pad{i}|>" for i in range(shape.n_vocab - len(tokens))]
    types += [5] * (shape.n_vocab - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{spelling[0]} {spelling[0]}"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)


def cache_dir() -> Path:
    """Where made models are kept: ``$XDG_CACHE_HOME/hydra/models`` or ``~/.cache/hydra/models``."""
    return cache_home() / "models"


def model(name: str, *, acceptance: float = 0.7, exact: bool = True, seed: int = 1, quant: str | None = None,
          directory: Path | None = None, confirm: Confirm | None = None,
          progress: Callable[[int, int], None] | None = None) -> Path:
    """The path of a cached model of this shape, made now if it is not there.

    ``confirm(path, bytes)`` is asked before more than a gigabyte is written; without it such a model is refused.
    Raises: ModelError for an unknown shape, a refusal, or a disk without room.
    """
    if name not in SHAPES:
        raise ModelError(f"There is no synthetic model {name!r}.", f"There are: {', '.join(SHAPES)}.")
    shape = SHAPES[name] if quant is None else dataclasses.replace(SHAPES[name], quant=quant)
    spec = json.dumps([_GENERATION, dataclasses.asdict(shape), acceptance, exact, seed], sort_keys=True)
    digest = hashlib.sha256(spec.encode()).hexdigest()[:10]
    kind = f"a{round(acceptance * 100):03d}" if exact else "mixed"
    path = (directory or cache_dir()) / f"{name}-{shape.quant}-{kind}-{digest}.gguf"
    if path.exists():
        return path
    size = size_bytes(shape, acceptance)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    if size > free:
        raise ModelError(f"{path} would take {size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free there.",
                         "Set XDG_CACHE_HOME to a larger disk.")
    if size > ASK_ABOVE_BYTES and (confirm is None or not confirm(str(path), size)):
        raise ModelError(f"{path} would take {size / 1e9:.1f} GB and was not confirmed.",
                         "Say yes, or choose a smaller one.")
    build(path, shape, acceptance=acceptance, exact=exact, seed=seed, progress=progress)
    return path
