"""hydra/commands/links.py: which links a head starts, and that one that dies comes back on its port."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from hydra import config, security
from hydra.commands.child import NodeProcess, free_ports
from hydra.commands.links import Links, link_settings, probe_context
from hydra.commands.translate import engine_spec
from hydra.errors import ConfigError
from hydra.model_file import ModelFile
from hydra.rpc.client import Client
from tests.test_cli_up import until

TOML = """\
[model]
path = "m.gguf"
[head]
step_deadline_s = 33
[link]
silence_s = 7
activations = "f16"
[security]
cert_dir = "certs"
[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
layers = 1
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {port}
device = "CPU"
layers = 1
"""


def load(tmp_path: Path, **overrides: object) -> config.Config:
    file = tmp_path / "hydra.toml"
    file.write_text(TOML.format(port=free_ports(1)[0]))
    return config.load(file, {}, {key.replace("__", "."): value for key, value in overrides.items()})


def test_none_unless_asked(tmp_path):
    cfg = load(tmp_path, link__enabled=False)
    links = Links(cfg).start()
    assert links.endpoints == {} and probe_context(cfg) is None
    links.stop()


def test_settings(tmp_path):
    [got] = link_settings(load(tmp_path, link__enabled=True))
    assert (got.name, got.node, got.deltas, got.activations, got.silence_s) == ("mini", "tower", True, "f16", 7.0)
    assert (got.deadline_s, got.tls_dir) == (33.0, "")
    [got] = link_settings(load(tmp_path, link__enabled=False, security__tls=True))
    assert (got.deltas, got.tls_dir) == (False, str(tmp_path / "certs")), "TLS without the rest"


def test_a_missing_certificate_is_told_before_anything_starts(tmp_path):
    cfg = load(tmp_path, security__tls=True)
    with pytest.raises(ConfigError, match=r"ca\.pem is missing"):
        probe_context(cfg)
    security.init_certs(tmp_path / "certs", ["tower", "mini"])
    assert probe_context(cfg) is not None


def test_a_link_that_dies_comes_back_on_its_port(tmp_path):
    cfg = load(tmp_path, link__enabled=True)
    links = Links(cfg).start()
    try:
        [endpoint] = links.endpoints.values()
        spec = engine_spec(cfg, ModelFile(Path("m"), "llama", "m", 2, 0, 0, 0), links.endpoints)
        assert [(e.node, e.address) for e in spec.endpoints] == [("mini", endpoint)]
        first = links._running["mini"].process
        first.kill()
        deadline = time.monotonic() + 30
        while links._running["mini"].process is first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert links._running["mini"].running and links.endpoints == {"mini": endpoint}
        again = links._running["mini"].process
    finally:
        links.stop()
    assert again.poll() is not None and links.endpoints == {}


def test_a_peer_tells_its_figures_while_a_link_is_connected(tmp_path):
    """Through `hydra up` and the link that its head would start; /stats asks the device worker about it."""
    cfg = load(tmp_path, link__enabled=True)
    with NodeProcess(cfg.path, "mini") as peer:
        until(peer, cfg.peers[0].port, 200, "ok")
        links = Links(cfg).start()
        host, port = links.endpoints["mini"].split(":")
        client = Client(host, int(port), timeout_s=30.0)
        try:
            url = f"http://127.0.0.1:{cfg.peers[0].port}/stats"
            with urllib.request.urlopen(url, timeout=10) as reply:
                told = json.load(reply)
            assert [row["options"]["nodelay"] for row in told["connections"]] == [1]
            assert until(peer, cfg.peers[0].port, 200, "ok")["restarts"] == 0
        finally:
            client.close()
            links.stop()
