"""One head's connection: its requests, in order, on one thread, straight from the socket to the device and back.

Knows the protocol's commands and this connection's devices and graphs; how bytes move is in hydra.peer.transfers, what
a graph may be in hydra.peer.rules, how connections come here in hydra.peer.worker.

Order. A connection has a backend, so a stream, of its own: sets, graphs and gets are queued on it and run in the order
of the wire. The host waits for the device only where the protocol needs an answer (GET_TENSOR) or where an operation
is not queued on the stream (clear, memset, copy, free, init). Two connections on one device share no buffer, and so no
order.

The GIL is held for the Python between two libggml calls or system calls, some microseconds each; every one of those
releases it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import numpy as np

from hydra.errors import DeviceError, HydraError, ProtocolError
from hydra.ggml import abi
from hydra.ggml.backend import Backend, memory
from hydra.ggml.library import STATUS_SUCCESS
from hydra.peer import indices, ops, rules
from hydra.peer.graph import Arena, GraphStore
from hydra.peer.receiver import ConnectionClosed
from hydra.peer.recheck import recheck
from hydra.peer.shared import MAX_TOPOLOGIES, SharedState
from hydra.peer.stats import N_COMMANDS
from hydra.peer.transfers import Transfers
from hydra.rpc import wire
from hydra.rpc.connection import State, check_header
from hydra.rpc.wire import Command

# Commands after which a head has begun to use what it allocated.
_WRITES = (Command.SET_TENSOR, Command.SET_TENSOR_HASH, Command.BUFFER_CLEAR, Command.GRAPH_COMPUTE)


class Session(Transfers):
    """Serves one connection until it ends.

    start: bytes of it that were read already. ``run`` returns when the head closes the connection.
    Raises (from run): HydraError with the reason when the connection has to be closed.
    """

    def __init__(self, sock: socket.socket, shared: SharedState, start: bytes = b"") -> None:
        super().__init__(sock, shared, start)
        self.state = State.AWAIT_HELLO
        self.backends: list[Backend | None] = [None] * len(shared.devices)
        self.graphs: list[GraphStore | None] = [None] * len(shared.devices)
        self._handlers: list[Callable[[int], None] | None] = [None] * N_COMMANDS
        for command in wire.Command:
            self._handlers[command] = getattr(self, "_" + command.name.lower())

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._serve()
        except ConnectionClosed:
            return
        finally:
            self.close()

    def _serve(self) -> None:
        receiver, handlers, stats = self.receiver, self._handlers, self.stats
        count, bytes_in = stats.count, stats.bytes_in
        unpack = wire.HEADER.unpack_from
        fixed = [wire.REQUEST_SIZES.get(cmd, -1) for cmd in range(256)]
        fixed[Command.HELLO] = -1
        timings = stats.timings
        now = time.perf_counter_ns
        self._hello()
        while True:
            if receiver.pos == receiver.end:
                receiver.idle_wait()
            if receiver.end - receiver.pos < 9:
                receiver.need(9)
            cmd, size = unpack(receiver.data, receiver.pos)
            if size != fixed[cmd]:
                check_header(self.state, cmd, size, self.handles.largest_bytes)
                if cmd == Command.GRAPH_COMPUTE and size > receiver.capacity - 9:
                    self._long_graph(size)
                    continue
                receiver.need(9 + (wire.SET_TENSOR_HEAD_SIZE if cmd == Command.SET_TENSOR else size))
            elif receiver.end - receiver.pos < 9 + size:
                receiver.need(9 + size)
            handler = handlers[cmd]
            assert handler is not None  # check_header knows all commands, and so does __init__
            count[cmd] += 1
            bytes_in[cmd] += size + 9
            if timings is None:
                handler(size)
            else:
                began = now()
                handler(size)
                stats.add_time(cmd, now() - began)

    def _hello(self, size: int = wire.CAPS_SIZE) -> None:
        receiver = self.receiver
        receiver.message_s, after = self.shared.settings.hello_s, receiver.message_s
        receiver.need(9)
        cmd, size = wire.HEADER.unpack_from(receiver.data, receiver.pos)
        check_header(self.state, cmd, size, 0)
        receiver.need(9 + size)
        receiver.pos += 9 + size
        receiver.message_s = after
        self.state = State.OPEN
        self.stats.count[cmd] += 1
        # No transport capabilities: this peer speaks TCP, and leaves the client's offer of RDMA unanswered.
        self._send(Command.HELLO, wire.HELLO_REPLY.pack(*wire.PROTOCOL_VERSION, 0, bytes(wire.CAPS_SIZE)))

    def close(self) -> None:
        """Gives everything back to the device; safe to call twice."""
        for backend in self.backends:
            if backend is not None:
                backend.synchronize()
        for store in self.graphs:
            if store is not None:
                store.close()
        self._plans.clear()
        self.handles.close()
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        self.receiver.close()
        for index, backend in enumerate(self.backends):
            if backend is not None:
                backend.close()
                self.backends[index] = None

    # -- devices -----------------------------------------------------------------------------------------------------

    def _device(self, index: int) -> int:
        if index >= len(self.shared.devices):
            raise ProtocolError(f"Device {index} of {len(self.shared.devices)}.")
        return index

    def _backend(self, index: int) -> Backend:
        backend = self.backends[self._device(index)]
        if backend is None:
            backend = Backend(self.ggml, self.shared.devices[index], self.shared.settings.threads)
            self.backends[index] = backend
        return backend

    def _device_count(self, size: int) -> None:
        self._take(size)
        self._send(Command.DEVICE_COUNT, wire.U32.pack(len(self.shared.devices)))

    def _get_alignment(self, size: int) -> None:
        (index,) = wire.U32.unpack(self._take(size))
        self._send(Command.GET_ALIGNMENT, wire.U64.pack(self.shared.info[self._device(index)].alignment))

    def _get_max_size(self, size: int) -> None:
        (index,) = wire.U32.unpack(self._take(size))
        self._send(Command.GET_MAX_SIZE, wire.U64.pack(self.shared.info[self._device(index)].max_size))

    def _get_device_memory(self, size: int) -> None:
        (index,) = wire.U32.unpack(self._take(size))
        free, total = memory(self.ggml, self.shared.devices[self._device(index)])
        self._send(Command.GET_DEVICE_MEMORY, wire.U64_PAIR.pack(free, total))

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _alloc_buffer(self, size: int) -> None:
        index, wanted = wire.ALLOC_BUFFER.unpack(self._take(size))
        backend = self._backend(index)
        _, total = memory(self.ggml, backend.device)
        # More than the device has cannot be had; a CPU would promise it and fail when it is touched.
        buffer = backend.alloc(wanted) if wanted + self.handles.total_bytes <= total else None
        if buffer is None:
            self._send(Command.ALLOC_BUFFER, wire.U64_PAIR.pack(0, 0))
            return
        self.receiver.enlarge(backend)
        if not any(self.stats.count[cmd] for cmd in _WRITES):
            # A head allocates for all its weights before it writes the first.
            buffer.expect_writes()
            if self.shared.cache is not None:
                self.shared.cache.expect(self.handles.total_bytes + buffer.size)
        handle = self.handles.add(buffer)
        self._send(Command.ALLOC_BUFFER, wire.U64_PAIR.pack(handle, buffer.size))

    def _buffer_get_base(self, size: int) -> None:
        (handle,) = wire.U64.unpack(self._take(size))
        self._send(Command.BUFFER_GET_BASE, wire.U64.pack(self.handles.get(handle)[1]))

    def _free_buffer(self, size: int) -> None:
        (handle,) = wire.U64.unpack(self._take(size))
        buffer = self.handles.pop(handle)
        self.indices.forget_buffer(handle - self.handles.first)
        self._synchronize()
        # Graphs and plans may point into the buffer.
        self._plans.clear()
        for store in self.graphs:
            if store is not None:
                store.forget()
        buffer.close()

    def _buffer_clear(self, size: int) -> None:
        handle, value = wire.BUFFER_CLEAR.unpack(self._take(size))
        buffer, _ = self.handles.get(handle)
        self._synchronize()
        place = self._place(handle)
        self.indices.wrote(place, place + buffer.size)
        if buffer.size:
            self.ggml.ggml_backend_buffer_clear(buffer.handle, value)

    def _get_alloc_size(self, size: int) -> None:
        payload = bytes(self._take(size))
        (index,) = wire.U32.unpack_from(payload)
        backend = self._backend(index)
        wire_rows = np.frombuffer(payload, dtype=wire.RPC_TENSOR, count=1 + wire.MAX_SRC, offset=4)
        rows = self._tensor_rows(memoryview(payload)[4:], 1 + wire.MAX_SRC)
        rows["op"], rows["op_params"] = wire_rows["op"], wire_rows["op_params"]
        present = np.flatnonzero(wire_rows["id"][1:])
        rows["src"][0][present] = rows.ctypes.data + (present + 1) * abi.TENSOR_SIZE
        src = np.full((1 + wire.MAX_SRC, wire.MAX_SRC), -1, dtype=np.int64)
        src[0][present] = present + 1
        rules.check_alloc_query(self._alloc_table(rows, src))
        answer = self.ggml.ggml_backend_buft_get_alloc_size(backend.buffer_type, rows.ctypes.data)
        self._send(Command.GET_ALLOC_SIZE, wire.U64.pack(answer))

    @staticmethod
    def _alloc_table(rows: np.ndarray, src: np.ndarray) -> rules.TensorTable:
        n = len(rows)
        return rules.TensorTable(
            type=rows["type"].view(np.uint32),
            ne=rows["ne"],
            nb=rows["nb"],
            op=rows["op"].view(np.uint32),
            op_params=rows["op_params"],
            flags=rows["flags"],
            src=src,
            view_src=np.full(n, -1, dtype=np.int64),
            view_offs=np.zeros(n, dtype=np.uint64),
            buf=np.full(n, -1, dtype=np.int64),
            data=np.zeros(n, dtype=np.uint64),
            buf_size=np.zeros(0, dtype=np.uint64),
            nodes=np.zeros(1, dtype=np.int64),
        )

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _graph_compute(self, size: int) -> None:
        self._compute(self._take(size))

    def _long_graph(self, size: int) -> None:
        """A graph longer than the buffer: received apart, within the budget of all connections."""
        self.shared.budget.take(size)
        try:
            payload = memoryview(bytearray(size))
            self.receiver.pos += 9
            self.receiver.into(payload)
            self._compute(payload)
        finally:
            self.shared.budget.give(size)
        self.stats.count[Command.GRAPH_COMPUTE] += 1
        self.stats.bytes_in[Command.GRAPH_COMPUTE] += size + 9

    def _compute(self, payload: memoryview) -> None:
        (index,) = wire.U32.unpack_from(payload)
        backend = self._backend(index)
        store = self.graphs[index]
        if store is None:
            store = self.graphs[index] = GraphStore(self.ggml, self.shared.private_layout)
        arena = store.take(payload, self.handles)
        try:
            self._validate(arena, index, backend)
            if arena.changed is None or len(arena.changed):
                assert arena.layout is not None  # _validate has set it
                table = arena.table(self.handles)
                if len(self.backends) > 1:
                    rules.check_devices(table, self._own_buffers(backend))
                arena.indices = indices.plan(table, arena.layout, self._beyond(backend, arena, table, arena.layout))
        except HydraError:
            store.last = None
            raise
        self._launch(backend, arena)

    def _own_buffers(self, backend: Backend) -> np.ndarray:
        own = np.zeros(self.handles.count, dtype=bool)
        for handle, (buffer, _) in self.handles.buffers.items():
            own[handle - self.handles.first] = buffer.backend is backend
        return own

    def _beyond(self, backend: Backend, arena: Arena, table: rules.TensorTable, layout: rules.Layout) -> dict[int, int]:
        """Bytes that the device uses for a tensor, by row, where that is more than the tensor.

        Raises: ProtocolError where it would leave the tensor's buffer.
        """
        if backend.is_cpu:
            return {}
        sizes = layout.memo.get("sizes")
        if sizes is None:
            sizes = layout.memo["sizes"] = rules.sizes_to_ask(table, layout)
        for row in np.flatnonzero(sizes < 0).tolist():
            size = self.ggml.ggml_backend_buft_get_alloc_size(
                backend.buffer_type, arena.address + row * abi.TENSOR_SIZE
            )
            sizes[row] = size if size > layout.extent[row] else 0
        rows = np.flatnonzero(sizes)
        room = table.buf_size[table.buf[rows]] - table.data[rows]
        short = sizes[rows].astype(np.uint64) > room
        if short.any():
            at = int(np.argmax(short))
            row = int(rows[at])
            what = f"Graph tensor {row} ({ops.op_name(int(table.op[row]))}) {table.describe(row)}"
            raise ProtocolError(
                f"{what}: {backend.device.name} uses {sizes[row]} bytes for it; its buffer has {room[at]} left."
            )
        return dict(zip(rows.tolist(), sizes[rows].tolist(), strict=True))

    def _graph_recompute(self, size: int) -> None:
        (index,) = wire.U32.unpack(self._take(size))
        store = self.graphs[self._device(index)]
        arena = store.last if store is not None else None
        if arena is None:
            raise ProtocolError(
                "GRAPH_RECOMPUTE with no graph to compute again: none was sent, or a buffer was freed since."
            )
        backend = self.backends[index]
        assert backend is not None  # a graph was computed on it
        self._launch(backend, arena)

    def _launch(self, backend: Backend, arena: Arena) -> None:
        plan = arena.indices
        assert plan is not None  # _compute has made it
        self.indices.check(plan)
        status = self.ggml.ggml_backend_graph_compute_async(backend.handle, arena.graph)
        if status != STATUS_SUCCESS:
            raise DeviceError(
                f"{backend.device.name} could not compute a graph of {arena.shape[0]} nodes (status {status})."
            )
        self.indices.launched(plan)
        if not backend.is_cpu:
            self._mark_queued(backend)

    def _validate(self, arena: Arena, index: int, backend: Backend) -> None:
        """Every tensor in its place each time; every operation what its op accepts, once per topology."""
        if arena.changed is not None and not len(arena.changed):
            return
        table = arena.table(self.handles)
        table.is_cpu = backend.is_cpu
        known = self.shared.topologies
        if arena.moved_only and arena.layout is not None:
            rules.check_placement(table, arena.layout, arena.changed)
            return
        if arena.reshaped is not None and arena.changed is not None:
            found = recheck(table, arena.reshaped, arena.changed)
            if found is not None:
                arena.layout, nodes = found
                rules.check_placement(table, arena.layout)
                self._check_supported(arena, table, backend, nodes)
                return
        key = (index, rules.topology_key(table))
        arena.layout = known.get(key)
        if arena.layout is not None:
            rules.check_placement(table, arena.layout)
            return
        rules.check_tensors(table)
        rules.check_graph(table)
        self._check_supported(arena, table, backend, arena.nodes)
        if len(known) >= MAX_TOPOLOGIES:
            known.clear()
        arena.layout = known[key] = table.layout

    def _check_supported(self, arena: Arena, table: rules.TensorTable, backend: Backend, nodes: np.ndarray) -> None:
        """That the device has the operations of these nodes, for the tensors that they have."""
        supports = self.ggml.ggml_backend_dev_supports_op
        device = backend.device.handle
        for row in nodes.tolist():
            if not supports(device, arena.address + row * abi.TENSOR_SIZE):
                name = ops.op_name(int(table.op[row]))
                raise ProtocolError(f"Graph tensor {row} ({name}): {backend.device.name} does not have this operation.")
