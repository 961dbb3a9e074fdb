"""How large a compute buffer becomes: the tensors of one step, given places by the rules of ggml's own allocator.

``Arena`` repeats ggml-alloc: tensors in order of execution, freed after their last use, results written over a source
where the operation allows it, otherwise the best fitting hole. ``step_bytes`` lays out what one node computes for one
ubatch: its inputs and its layers, in llama.cpp's order. Small tensors (indices, scales) are left out.

Knows shapes, nothing of weights or devices.
Source: ggml/src/ggml-alloc.c (ggml_gallocr_alloc_graph_impl, ggml_dyn_tallocr_alloc), src/llama-graph.cpp and
src/models/{llama,gemma3,qwen35,delta-net-base}.cpp of the pinned llama.cpp, checked with GGML_SCHED_DEBUG.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra.plan.shape import Layer, Shape

F32, F16, I64 = 4, 2, 8
_ALIGN = 128
_ENOUGH = 16


class _Tensor:
    """A tensor of the step. uses: how often it is still to be read; at: its place, None = not its own memory."""

    __slots__ = ("at", "size", "uses")

    def __init__(self, size: int) -> None:
        self.size = -(-size // _ALIGN) * _ALIGN
        self.uses = 0
        self.at: int | None = None


@dataclass
class _Op:
    out: _Tensor
    reads: tuple[_Tensor, ...]
    inplace: bool


class Graph:
    """Operations in order of execution; ``peak`` gives them places."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.inputs: list[_Tensor] = []

    def input(self, size: int) -> _Tensor:
        """An input: it has its place before anything else."""
        tensor = _Tensor(size)
        self.inputs.append(tensor)
        return tensor

    def op(self, size: int, *reads: _Tensor, inplace: bool = False) -> _Tensor:
        """An operation with a result of ``size`` bytes. inplace: it may be written over a source of the same size."""
        out = _Tensor(size)
        self.ops.append(_Op(out, reads, inplace))
        return out

    def store(self, *reads: _Tensor) -> None:
        """An operation whose result lies elsewhere (in a cache)."""
        self.ops.append(_Op(_Tensor(0), reads, False))

    def peak(self) -> int:
        """Bytes of the smallest buffer that the allocator gets by with."""
        for op in self.ops:
            for tensor in op.reads:
                tensor.uses += 1
        arena = Arena()
        for tensor in self.inputs:
            tensor.at = arena.take(tensor.size)
        for op in self.ops:
            if op.out.size:
                over = next((t for t in op.reads if op.inplace and t.at is not None and t.uses == 1
                             and t.size == op.out.size), None)
                if over is not None:
                    op.out.at, over.at = over.at, None
                else:
                    op.out.at = arena.take(op.out.size)
            for tensor in op.reads:
                tensor.uses -= 1
                if not tensor.uses and tensor.at is not None:
                    arena.give(tensor.at, tensor.size)
                    tensor.at = None
        return arena.peak


class Arena:
    """Free blocks by place; the last one has no end. Best fit, but the last block only when no other fits."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []  # [place, size], in order; behind them all is free
        self.end = 0
        self.peak = 0

    def take(self, size: int) -> int:
        best = None
        for index, (_, room) in enumerate(self.free):
            # The allocator's own comparison: of equally good ones the last.
            if room >= size and (best is None or room <= self.free[best][1]):
                best = index
        if best is not None:
            block = self.free[best]
            place = block[0]
            block[0] += size
            block[1] -= size
            if not block[1]:
                del self.free[best]
            return place
        place = self.end
        self.end += size
        self.peak = max(self.peak, self.end)
        return place

    def give(self, place: int, size: int) -> None:
        index = 0
        while index < len(self.free) and self.free[index][0] < place:
            index += 1
        self.free.insert(index, [place, size])
        if index + 1 < len(self.free) and sum(self.free[index]) == self.free[index + 1][0]:
            self.free[index][1] += self.free.pop(index + 1)[1]
        if index and sum(self.free[index - 1]) == self.free[index][0]:
            self.free[index - 1][1] += self.free.pop(index)[1]
            index -= 1
        if sum(self.free[index]) == self.end:  # it touches the endless block
            self.end = self.free.pop(index)[0]


@dataclass(frozen=True)
class Step:
    """What a step is: tokens computed at once, rows of output, sequences, cells of the caches, how it attends.

    quantised_k, quantised_v: the caches are rotated. n_rs: snapshots of a recurrent state besides the newest.
    convert_k, convert_v: flash attention on a card makes f16 of that cache first, in its own result's memory.
    """

    tokens: int
    outputs: int
    sequences: int
    cells: int
    cells_window: int
    flash: bool
    quantised_k: bool = False
    quantised_v: bool = False
    n_rs: int = 0
    convert_k: bool = False
    convert_v: bool = False


def step_bytes(shape: Shape, layers: tuple[Layer, ...], step: Step, *, first: bool, last: bool, shares_inputs: bool,
               mtp: bool = False) -> int:
    """Compute buffer of the node that has ``layers``.

    first: the token embeddings are made here; last: the output is. shares_inputs: the inputs are made in this very
    buffer (a CPU head), instead of copied into it when they are needed. mtp: this is the draft context.
    """
    if len(layers) > _ENOUGH:  # they repeat: the peak is reached early, or in the last ones
        layers = (*layers[:_ENOUGH - 3], *layers[-3:])
    return _Builder(shape, step).build(layers, first=first, last=last, shares_inputs=shares_inputs, mtp=mtp).peak()


def input_bytes(shape: Shape, step: Step) -> int:
    """What the head's own memory holds of a step where the head computes on a card: embeddings and masks."""
    graph = Graph()
    builder = _Builder(shape, step)
    builder.graph = graph
    graph.input(F32 * shape.n_embd * step.tokens)
    builder.masks(shape.layers, given=True)
    tokens = graph.op(F32 * shape.n_embd * step.tokens)
    graph.store(tokens, *(t for t in builder.masks_by_window.values()))
    return graph.peak()


class _Builder:
    def __init__(self, shape: Shape, step: Step) -> None:
        self.shape, self.step = shape, step
        self.graph = Graph()
        self.masks_by_window: dict[bool, _Tensor] = {}
        self.indices: dict[bool, _Tensor] = {}

    def build(self, layers: tuple[Layer, ...], *, first: bool, last: bool, shares_inputs: bool, mtp: bool) -> Graph:
        g, s = self.graph, self.shape
        row = F32 * s.n_embd * self.step.tokens
        if mtp:
            return self._mtp(layers, row)
        if shares_inputs:
            if first:
                g.input(row)  # room for embeddings given from outside, always reserved
            self.masks(layers if not first else s.layers, given=True)
        if first and shares_inputs:
            embedded = g.op(row)
            # A peer's layers come first: the embeddings go there, and its result comes back.
            if layers and layers[0].index == 0:
                stream = embedded
            else:
                # The peer gets its copies; what only the peer's layers need is then free again.
                ours = {bool(layer.window) for layer in layers if layer.attends}
                others = [t for table in (self.masks_by_window, self.indices) for w, t in table.items()
                          if w not in ours]
                g.store(embedded, *others)
                stream = g.op(row if layers or s.gated else F32 * s.n_embd * self.step.outputs)
        else:
            stream = g.op(row)  # a copy of what the node before has made
        if not shares_inputs:
            self.masks(layers, given=False)
        for layer in layers:
            stream = self._layer(stream, layer, layer.index == s.n_layer - 1)
        if last:
            self._output(stream)
        else:
            g.store(stream)
        return g

    def masks(self, layers: tuple[Layer, ...], *, given: bool) -> None:
        """Masks and rotations, as inputs of this buffer (given) or as copies that are made when first needed."""
        size = F16 if self.step.flash else F32
        make = self.graph.input if given else self.graph.op
        attending = [layer for layer in layers if layer.attends and not layer.mtp]
        if not attending:
            return
        for layer in attending:  # in the order of their first use
            windowed = bool(layer.window)
            if windowed in self.masks_by_window:
                continue
            cells = self.step.cells_window if windowed else self.step.cells
            self.masks_by_window[windowed] = make(size * cells * self.step.tokens)
            if not self.step.flash:  # V lies transposed: an index for each of its numbers
                self.indices[windowed] = make(I64 * self._wide_v(layer) // F32)

    def _wide_v(self, layer: Layer) -> int:
        s = self.shape
        head_v = s.head_v_swa if layer.window else s.head_v or s.head_k
        return F32 * head_v * layer.n_head_kv * self.step.tokens

    def _norm(self, tensor: _Tensor) -> _Tensor:
        normed = self.graph.op(tensor.size, tensor, inplace=True)
        return self.graph.op(tensor.size, normed, inplace=True)

    def _layer(self, stream: _Tensor, layer: Layer, tail: bool) -> _Tensor:
        g, s = self.graph, self.shape
        row = stream.size
        normed = self._norm(stream)
        mixed = self._delta_net(normed, layer) if layer.recurrent else self._attention(normed, layer)
        if tail and not s.gated:  # only the rows that have an output go on
            row = F32 * s.n_embd * self.step.outputs
            mixed = g.op(row, mixed)
            stream = g.op(row, stream)
        mixed = g.op(row, mixed, inplace=True)  # a norm behind it in some architectures; else nothing
        joined = g.op(row, mixed, stream, inplace=True)
        rows = self.step.outputs if tail and not s.gated else self.step.tokens
        after = self._norm(joined)
        if layer.experts:
            out = self._experts(after, layer, rows)
            if layer.n_ff_shared:
                out = g.op(row, out, self._feed_forward(after, layer.n_ff_shared, rows, True), inplace=True)
        else:
            out = self._feed_forward(after, layer.n_ff, rows, layer.gate)
        return g.op(row, out, joined, inplace=True)

    def _feed_forward(self, normed: _Tensor, n_ff: int, rows: int, gated: bool) -> _Tensor:
        g = self.graph
        if not gated:
            up = g.op(F32 * n_ff * rows, normed)
            return g.op(F32 * self.shape.n_embd * rows, g.op(up.size, up, inplace=True))
        gate = g.op(F32 * n_ff * rows, normed)
        up = g.op(F32 * n_ff * rows, normed)
        both = g.op(F32 * n_ff * rows, gate, up)
        return g.op(F32 * self.shape.n_embd * rows, both)

    def _experts(self, normed: _Tensor, layer: Layer, rows: int) -> _Tensor:
        g, s = self.graph, self.shape
        used, wide = s.n_expert_used, F32 * s.n_ff_expert * s.n_expert_used * rows
        scores = g.op(F32 * s.n_expert * rows, normed)
        chances = g.op(F32 * s.n_expert * rows, scores, inplace=True)
        chosen = g.op(F32 * s.n_expert * rows, chances)
        weights = g.op(F32 * used * rows, chances, chosen)
        up = g.op(wide, normed, chosen)
        gate = g.op(wide, normed, chosen)
        both = g.op(wide, gate, up)
        down = g.op(F32 * s.n_embd * used * rows, both, chosen)
        weighted = g.op(F32 * s.n_embd * used * rows, down, weights, inplace=True)
        return g.op(F32 * s.n_embd * rows, weighted)

    def _attention(self, normed: _Tensor, layer: Layer) -> _Tensor:
        g, s, step = self.graph, self.shape, self.step
        t = step.tokens
        head_k, head_v = (s.head_k_swa, s.head_v_swa) if layer.window else (s.head_k, s.head_v or s.head_k)
        wide_q, wide_k = F32 * head_k * layer.n_head * t, F32 * head_k * layer.n_head_kv * t
        wide_v, wide_o = self._wide_v(layer), F32 * head_v * layer.n_head * t
        gate = None
        if s.gated:
            gate = g.op(2 * wide_q, normed)
            q = g.op(wide_q, g.op(wide_q, gate), inplace=True)
        else:
            q = g.op(wide_q, normed)
            if s.qk_norm:  # of a view of the product, which the allocator does not write over
                q = g.op(wide_q, q)
        if step.quantised_k:
            q = g.op(wide_q, q)
        if s.windowed:  # models with two caches compute K first
            k = self._key(normed, wide_k)
            v = self._value(normed, wide_v)
        else:
            v = self._value(normed, wide_v)
            k = self._key(normed, wide_k)
        g.store(k)
        g.store(v, *(self.indices[w] for w in self.indices if w == bool(layer.window)))
        mask = self.masks_by_window[bool(layer.window)]
        if step.flash:
            cells = step.cells_window if layer.window else step.cells
            room = F16 * cells * layer.n_head_kv * (head_k * step.convert_k + head_v * step.convert_v)
            out = g.op(wide_o + room, q, mask)
        else:
            cells = step.cells_window if layer.window else step.cells
            scores = g.op(F32 * cells * layer.n_head * t, q)
            shares = g.op(scores.size, scores, mask, inplace=True)
            out = g.op(wide_o, g.op(wide_o, shares))
        if step.quantised_v:
            out = g.op(wide_o, out)
        if gate is not None:
            opened = g.op(wide_o, g.op(wide_o, gate), inplace=True)
            out = g.op(wide_o, out, opened, inplace=True)
        return g.op(F32 * s.n_embd * t, out)

    def _key(self, normed: _Tensor, wide: int) -> _Tensor:
        k = self.graph.op(wide, normed)
        if self.shape.qk_norm:
            k = self.graph.op(wide, k)
        return self.graph.op(wide, k) if self.step.quantised_k else k

    def _value(self, normed: _Tensor, wide: int) -> _Tensor:
        v = self.graph.op(wide, normed)
        return self.graph.op(wide, v) if self.step.quantised_v else v

    def _delta_net(self, normed: _Tensor, layer: Layer) -> _Tensor:
        g, s, step = self.graph, self.shape, self.step
        t, n_seq = step.tokens, step.sequences
        key, value = s.ssm["state"] * s.ssm["groups"], s.ssm["inner"]
        wide = F32 * (2 * key + value) * t
        kept = g.op(F32 * s.conv_state * n_seq)
        mixed = g.op(wide, normed)
        window = g.op(wide + F32 * s.conv_state * n_seq, kept, mixed)
        g.store(window)
        state = g.op(F32 * s.delta_state * n_seq)
        raw = g.op(wide, window)
        conv = g.op(wide, raw, inplace=True)
        q = g.op(F32 * key * t, g.op(F32 * key * t, conv), inplace=True)
        k = g.op(F32 * key * t, g.op(F32 * key * t, conv), inplace=True)
        out = g.op(F32 * value * t + F32 * s.delta_state * (1 + step.n_rs) * n_seq, q, k, conv, state)
        g.store(out)
        z = None
        flat = F32 * value * t
        inner = g.op(flat, out)
        inner = g.op(flat, inner, inplace=True)
        z = g.op(flat, normed)
        z = g.op(flat, z, inplace=True)
        gated = g.op(flat, inner, z, inplace=True)
        return g.op(F32 * s.n_embd * t, gated)

    def _output(self, stream: _Tensor) -> None:
        g, s = self.graph, self.shape
        row = F32 * s.n_embd * self.step.outputs
        normed = self._norm(stream)
        if s.gated:  # the hidden rows of all tokens are kept for the MTP block
            normed = g.op(row, normed)
        g.store(g.op(F32 * s.n_vocab * self.step.outputs, normed))

    def _mtp(self, layers: tuple[Layer, ...], row: int) -> Graph:
        """The draft context: embedding and hidden row joined, then one block, then the output."""
        g, s = self.graph, self.shape
        hidden = g.input(row)
        self.masks_by_window[False] = g.input((F16 if self.step.flash else F32) * self.step.cells * self.step.tokens)
        token = self._norm(g.op(row))
        both = g.op(2 * row, token, self._norm(hidden))
        stream = g.op(row, both)
        for layer in layers:
            stream = self._layer(stream, layer, False)
        normed = self._norm(stream)
        g.store(g.op(F32 * s.n_vocab * self.step.outputs, g.op(F32 * s.n_embd * self.step.outputs, normed)))
        return g
