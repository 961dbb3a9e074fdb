"""`hydra up` as real processes on loopback: serves, waits, says who has the port, and stops in order."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hydra.commands.child import NodeProcess, free_ports, hydra_command
from hydra.embedded import embedded_model

WAIT_S = 60.0
TOML = """\
[model]
path = "m.gguf"
[head]
api_port = {api}
peer_wait_s = {wait}
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
layers = 2
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {peer}
device = "CPU"
layers = {layers}
"""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


class Rig:
    """A hydra.toml of two boxes on loopback, and a GGUF of four layers that is a header and no more."""

    def __init__(self, folder: Path, layers: int = 2, wait: float = 0.0) -> None:
        self.api, self.peer = free_ports(2)
        self.file = folder / "hydra.toml"
        self.file.write_text(TOML.format(api=self.api, peer=self.peer, layers=layers, wait=wait))
        entries = text("general.architecture") + struct.pack("<I", 8) + text("llama")
        entries += text("llama.block_count") + struct.pack("<II", 4, 4)
        (folder / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entries)

    def run(self, node: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(hydra_command("up", "--config", str(self.file), "--node", node), capture_output=True,
                              text=True, timeout=WAIT_S)


def health(port: int) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except (OSError, ValueError):
        return 0, {}


def until(node: NodeProcess, port: int, status: int, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and node.running:
        code, body = health(port)
        if code == status and body.get("state") == state:
            return body
        time.sleep(0.05)
    raise AssertionError(f"{node.node}: no {status} {state} ({health(port)}): {node.log_file.read_text()}")


def test_a_peer_serves_is_safe_to_repeat_and_stops(tmp_path):
    rig = Rig(tmp_path)
    with NodeProcess(rig.file, "mini") as peer:
        body = until(peer, rig.peer, 200, "ok")
        assert body["name"] == "mini" and body["config_digest"]
        again = rig.run("mini")
        assert again.returncode == 1
        assert f"127.0.0.1:{rig.peer} is already served by process {peer.process.pid} (" in again.stderr
        assert f"kill {peer.process.pid}" in again.stderr and "Traceback" not in again.stderr
        assert until(peer, rig.peer, 200, "ok"), "the first one serves on"
        assert peer.stop() == 0
    assert health(rig.peer) == (0, {})


def test_a_head_waits_for_its_peer_tells_so_and_stops(tmp_path):
    rig = Rig(tmp_path)
    with NodeProcess(rig.file, "tower") as head:
        body = until(head, rig.api, 503, "waiting")
        assert "peer mini" in body["reason"] and str(rig.peer) in body["reason"]
        again = rig.run("tower")
        assert again.returncode == 1 and f"process {head.process.pid} (" in again.stderr
        head.process.send_signal(signal.SIGINT)
        assert head.process.wait(WAIT_S) == 0
    log = head.log_file.read_text()
    assert "Waiting for peer mini" in log and "next look in" in log and log.rstrip().endswith("Stopped.")
    assert "Traceback" not in log


def test_a_head_gives_up_when_the_wait_is_over(tmp_path):
    done = Rig(tmp_path, wait=1.0).run("tower")
    assert done.returncode == 5, done.stderr
    assert "error: Peer mini" in done.stderr and "hint:" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_split_is_refused_before_anything_starts(tmp_path):
    done = Rig(tmp_path, layers=3).run("tower")
    assert done.returncode == 2
    assert "2 on tower + 3 on mini = 5, the model has 4 layers" in done.stderr


def test_two_nodes_of_one_box_have_to_be_named(tmp_path):
    done = subprocess.run(hydra_command("up", "--config", str(Rig(tmp_path).file)), capture_output=True, text=True,
                          timeout=WAIT_S)
    assert done.returncode == 2 and "--node NAME" in done.stderr


def test_a_device_that_is_not_there(tmp_path):
    rig = Rig(tmp_path)
    rig.file.write_text(rig.file.read_text().replace('"CPU"', '"CUDA9"'))
    done = rig.run("mini")
    assert done.returncode == 4, done.stderr
    assert "error: There is no device CUDA9; this box has " in done.stderr and "CPU" in done.stderr
    assert "hint:" in done.stderr and "Traceback" not in done.stderr and "starts again" not in done.stderr


@pytest.mark.model
@pytest.mark.slow
def test_demo(tmp_path):
    """The whole path: the embedded model through one peer gives the tokens of the local run."""
    done = subprocess.run(hydra_command("demo", "--json", "--tokens", "64", "--peer-layers", "7", "The capital of"),
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) >= {"text", "tokens", "identical_to_local", "prefill_tps", "decode_tps", "layers", "wire"}
    assert report["identical_to_local"] is True and len(report["tokens"]) == 64 and report["text"]
    assert report["layers"] == {"peer": 7, "head": 11}
    commands = report["wire"]["commands"]
    assert commands["GRAPH_COMPUTE"]["count"] >= 1 and commands["GET_TENSOR"]["count"] >= 64
    assert report["wire"]["messages"] == sum(row["count"] for row in commands.values())
    assert report["prefill_tps"] > 0 and report["decode_tps"] > 0
    assert "identical with and without the peer" in done.stderr


@pytest.mark.model
@pytest.mark.parametrize("peers", [False, True])
def test_a_heads_device_that_is_not_there(tmp_path, peers):
    """No next try would find it: said once, with what there is, and not until restart_limit."""
    rig = Rig(tmp_path)
    text = rig.file.read_text().replace('path = "m.gguf"', f"path = {json.dumps(str(embedded_model().path))}")
    text = text.replace("layers = 2", 'device = "CUDA9"', 1)
    if not peers:
        text = text[: text.index('[[nodes]]\nname = "mini"')]
    text = text.replace("layers = 2", "")
    rig.file.write_text(text)
    with NodeProcess(rig.file, "mini") if peers else contextlib.nullcontext() as peer:
        if peer is not None:
            until(peer, rig.peer, 200, "ok")
        done = rig.run("tower")
    assert done.returncode == 4, done.stderr
    assert "error: There is no device CUDA9; this box has CPU" in done.stderr and "again in" not in done.stderr
