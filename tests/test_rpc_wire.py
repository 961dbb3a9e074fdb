"""The numbers of the wire against the pinned library, and messages and connections without a socket."""

from __future__ import annotations

import numpy as np
import pytest

from hydra.errors import ProtocolError
from hydra.ggml import abi, library
from hydra.rpc import messages, wire
from hydra.rpc.connection import ServerConnection, State, pack_request
from hydra.rpc.wire import Command


def test_struct_sizes() -> None:
    assert wire.RPC_TENSOR.itemsize == wire.TENSOR_SIZE == 296
    offsets = {name: wire.RPC_TENSOR.fields[name][1] for name in wire.RPC_TENSOR.names}  # type: ignore[index,union-attr]
    assert offsets == {
        "id": 0, "type": 8, "buffer": 12, "ne": 20, "nb": 36, "op": 52, "op_params": 56, "flags": 120, "src": 124,
        "view_src": 204, "view_offs": 212, "data": 220, "name": 228, "use_count": 292,
    }  # fmt: skip
    assert wire.HEADER.size == 9 and wire.HELLO_REPLY.size == 28
    assert wire.SET_TENSOR_HEAD_SIZE == 305
    assert wire.REQUEST_SIZES[Command.GET_ALLOC_SIZE] == 4 + 11 * 296
    assert set(wire.REQUEST_SIZES) | {Command.SET_TENSOR, Command.GRAPH_COMPUTE} == set(Command)
    assert len(Command) == 18 and int(Command.HELLO) == 14


def test_region_struct_reads_the_same_fields_as_the_dtype() -> None:
    raw = messages.tensor_bytes(id=1, type=8, buffer=2**40, ne=(1, 2, 3, 4), nb=(5, 6, 7, 8), data=2**50, use_count=-1)
    assert wire.TENSOR_REGION.unpack(raw) == (8, 2**40, 1, 2, 3, 4, 5, 6, 7, 8, 2**50)


def test_the_pinned_library_has_these_layouts() -> None:
    ggml = library.load()
    assert ggml.version() == library.PINNED_GGML
    assert abi.TENSOR.itemsize == abi.TENSOR_SIZE == ggml.ggml_tensor_overhead() - 32
    assert abi.verify_layout(ggml) == ""


def test_a_layout_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    class Shifted(ctypes.Structure):
        _fields_ = [("pad", ctypes.c_uint64), *abi.CGraph._fields_]

    monkeypatch.setattr(abi, "CGraph", Shifted)
    assert abi.verify_layout(library.load()) != ""


def test_another_library_is_refused_by_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import LibraryError

    monkeypatch.setattr(library, "PINNED_GGML", "9.9.9")
    with pytest.raises(LibraryError, match=r"0\.25\.3.*9\.9\.9"):
        library.check_version(library.load())


def test_only_one_registry_is_loaded() -> None:
    library.load()
    names = [path.rsplit("/", 1)[1] for path in library.loaded_files()]
    assert names.count("libggml.so.0") == 1 and "libggml.so" not in names


def graph(n: int = 3) -> messages.GraphCompute:
    rows = np.zeros(n, dtype=wire.RPC_TENSOR)
    rows["id"] = np.arange(1, n + 1)
    return messages.GraphCompute(0, [n], rows)


def test_messages_come_back_as_they_were() -> None:
    tensor = messages.tensor_bytes(id=7, name=b"x")
    for message in (
        messages.SetTensor(tensor, 5, b"abc", 1),
        messages.AllocBuffer(1, 2**40),
        messages.Hello(b"c" * 24),
    ):
        assert type(message).unpack(message.pack()) == message
    again = messages.GraphCompute.unpack(graph().pack())
    assert again.nodes == [3] and again.tensors.tobytes() == graph().tensors.tobytes()
    assert len(messages.GetAllocSize(0, tensor, (tensor,)).pack()) == wire.REQUEST_SIZES[Command.GET_ALLOC_SIZE]


@pytest.mark.parametrize("cut", [0, 4, 11, 12, 100])
def test_a_short_graph_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        messages.GraphCompute.unpack(graph().pack()[:cut])


def test_a_session_fed_one_byte_at_a_time() -> None:
    connection = ServerConnection()
    stream = (
        pack_request(Command.HELLO, bytes(24))
        + pack_request(Command.DEVICE_COUNT)
        + pack_request(Command.GET_ALIGNMENT, b"\0" * 4)
    )
    seen = []
    for byte in stream:
        connection.receive_data(bytes([byte]))
        while (request := connection.next_request()) is not None:
            seen.append((request.cmd, len(request.payload)))
    assert seen == [(14, 24), (15, 0), (1, 4)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pack_request(Command.DEVICE_COUNT), "before HELLO"),
        (wire.HEADER.pack(Command.HELLO, 0), "another protocol version"),
        (pack_request(Command.HELLO, bytes(24)) * 2, "second time"),
        (pack_request(Command.HELLO, bytes(24)) + wire.HEADER.pack(18, 0), "Unknown command 18"),
        (pack_request(Command.HELLO, bytes(24)) + wire.HEADER.pack(Command.FREE_BUFFER, 9), "of 9 bytes"),
        (pack_request(Command.HELLO, bytes(24)) + wire.HEADER.pack(Command.SET_TENSOR, 2**63), "SET_TENSOR of"),
        (pack_request(Command.HELLO, bytes(24)) + wire.HEADER.pack(Command.GRAPH_COMPUTE, 2**40), "GRAPH_COMPUTE of"),
    ],
)
def test_bad_headers_close_before_their_payload(data: bytes, words: str) -> None:
    connection = ServerConnection()
    connection.receive_data(data)
    with pytest.raises(ProtocolError, match=words):
        while connection.next_request() is not None:
            pass
    assert connection.state is State.CLOSED
