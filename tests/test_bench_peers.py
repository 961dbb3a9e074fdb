"""The peers that a comparison needs (stock, sink, ours), and the head that runs against each, on a small model."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra.bench import synthetic
from hydra.bench.pairs import Setting, run_head, start
from hydra.bench.run_head import HeadSpec
from hydra.bench.sink import Sink
from hydra.bench.stock import StockServer
from hydra.errors import HydraError

ROOT = Path(__file__).resolve().parent.parent
TENSOR = 296


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synthetic.model("toy-llama", directory=tmp_path_factory.mktemp("models")))


class Client:
    """Speaks raw messages, so that the sink is checked against the layout and not against code of ours."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=20)

    def send(self, command: int, payload: bytes = b"") -> None:
        self.sock.sendall(struct.pack("<BQ", command, len(payload)) + payload)

    def ask(self, command: int, payload: bytes = b"") -> bytes:
        self.send(command, payload)
        return self._take(struct.unpack("<Q", self._take(8))[0])

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


@pytest.fixture
def client() -> Iterator[Client]:
    with Sink() as sink:
        made = Client(sink.port)
        with made.sock:
            yield made


def test_the_sink_answers_what_a_load_asks(client: Client) -> None:
    assert client.ask(14, bytes(24))[:3] == b"\x07\x00\x00"
    assert client.ask(15) == struct.pack("<I", 1)
    handle, size = struct.unpack("<QQ", client.ask(0, struct.pack("<IQ", 0, 5000)))
    other, _ = struct.unpack("<QQ", client.ask(0, struct.pack("<IQ", 0, 1)))
    assert size == 5000 and handle != other
    bases = [struct.unpack("<Q", client.ask(3, struct.pack("<Q", h)))[0] for h in (handle, other)]
    assert abs(bases[0] - bases[1]) >= 1 << 40 and not bases[0] % 128
    tensor = bytearray(TENSOR)
    struct.pack_into("<4I4I", tensor, 20, 64, 3, 1, 1, 4, 256, 768, 768)
    assert struct.unpack("<Q", client.ask(13, struct.pack("<I", 0) + tensor + bytes(10 * TENSOR)))[0] >= 768
    client.send(6, bytes(tensor) + bytes(9) + bytes(20 << 20))  # more than any buffer of its own
    assert client.ask(7, bytes(tensor) + bytes(16)) == b"\0"
    client.send(10, bytes(100))
    client.send(16, bytes(4))
    assert client.ask(8, bytes(tensor) + struct.pack("<QQ", 0, 768)) == bytes(768)
    assert len(client.ask(11, bytes(4))) == 16


def test_the_sink_hangs_up_on_what_no_load_sends(client: Client) -> None:
    client.ask(14, bytes(24))
    with pytest.raises((EOFError, ConnectionError)):
        client.ask(99, b"?")


def test_the_sink_that_has_everything() -> None:
    with Sink(found=True) as sink:
        made = Client(sink.port)
        with made.sock:
            made.ask(14, bytes(24))
            assert made.ask(7, bytes(TENSOR + 16)) == b"\1"


def test_the_stock_server_runs_and_ends(model: str) -> None:
    with StockServer(threads=1) as server:
        made = Client(server.port)
        with made.sock:
            assert made.ask(14, bytes(24))[0] == 7
        process = server._child.process
    assert process.poll() is not None


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(HydraError, match="no device named 'CUDA99'"):
        StockServer(device="CUDA99")


@pytest.mark.parametrize("everything", [False, True])
def test_all_peers_give_the_same_tokens_as_none(model: str, everything: bool) -> None:
    spec = HeadSpec(
        model,
        everything_on_peer=everything,
        threads=1,
        ctx_size=256,
        prompts=(40,),
        decode_tokens=12,
        verify_steps=2,
        warmup_tokens=2,
    )
    setting = Setting("CPU", 1)
    alone, _ = run_head(spec, None)
    assert len(alone.tokens) == 12 and alone.decode_tps > 0 and alone.prefill_tps["40"] > 0 and alone.verify_sps > 0
    for kind in ("stock", "hydra"):
        with start(kind, setting) as peer:
            result, weighed = run_head(spec, peer)
        assert result.tokens == alone.tokens
        assert result.layers["peer"] == 4 and len(result.step_ms) == 12
        assert weighed.idle_bytes > 0 and weighed.peak_bytes >= weighed.idle_bytes
        assert set(weighed.cpu_s) == {"load", "prefill 40", "decode", "verify"}


def test_a_load_into_the_sink(model: str) -> None:
    with start("sink", Setting("CPU", 1)) as peer:
        result, _ = run_head(HeadSpec(model, everything_on_peer=True, threads=1), peer)
    assert result.load_s > 0 and result.tokens == []


def test_a_head_that_fails_is_reported() -> None:
    with pytest.raises(HydraError, match=r"The head failed: .*nothing\.gguf"):
        run_head(HeadSpec("/nothing.gguf", threads=1), None)


def test_a_peer_that_is_gone_costs_the_head_and_not_the_benchmark(model: str) -> None:
    with start("stock", Setting("CPU", 1)) as peer:
        gone = peer
    with pytest.raises(HydraError, match="Nobody answers"):
        run_head(HeadSpec(model, threads=1), gone)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            ["peer", "--pairs", "1", "--prompts", "24", "--tokens", "4", "--verify", "2", "--threads", "1"],
            ["decode_ratio", "prefill_ratio", "verify_ratio", "load_ratio", "warm_load_ratio", "peer_rss_idle_bytes",
             "peer_rss_peak_bytes", "cpu_s_per_token", "ceiling_decode_tps", "floor_load_s"],
        ),
        (
            ["peer", "--pairs", "1", "--prompts", "24", "--tokens", "4", "--verify", "2", "--threads", "1", "--apart",
             "--no-loads"],
            ["decode_ratio", "ceiling_decode_tps"],
        ),
        (["wire", "--tokens", "6", "--prompt", "24", "--threads", "1"], ["commands", "decode_tps"]),
    ],
)  # fmt: skip
def test_the_command_reports_json_last(tmp_path: Path, model: str, arguments: list[str], keys: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hydra", "bench", *arguments, "--model", model, "--json"],
        capture_output=True, text=True, timeout=110, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [key for key in keys if key not in report] == []
    if arguments[0] == "peer":
        assert report["decode_ratio"] > 0 and report["ceiling_decode_tps"] > 0
        assert not any("same tokens" in remark for remark in report["remarks"])
        assert report["warm_load_ratio"] is None  # this model has no tensor that a client would cache
        if "--no-loads" in arguments:
            assert report["load_ratio"] is None
        else:
            assert report["peer_rss_peak_bytes"] >= report["peer_rss_idle_bytes"] > 0
        assert "pair 1 of 1" in done.stderr and "pair 1 of 1" not in done.stdout
    else:
        assert set(report["own"]["targets_us"]) <= set(report["own"]["us"])
        assert report["commands"]["GRAPH_RECOMPUTE"]["count"] > 0 and "p99_us" in report["commands"]["GET_TENSOR"]


def test_a_model_that_is_not_there_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hydra", "bench", "wire", "--model", "/nothing.gguf"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "There is no file" in done.stderr
