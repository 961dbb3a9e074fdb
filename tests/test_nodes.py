"""hydra/nodes.py: this box is recognised by address or name, and never guessed."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from hydra import config, nodes
from hydra.errors import ConfigError

BOX = nodes.Box(frozenset({"192.168.1.11", "fd00::11"}), frozenset({"mini", "mini.lan"}))
NAMES = {"tower.lan": frozenset({"192.168.1.10"}), "box-b": frozenset({"192.168.1.11"}),
         "alias": frozenset({"127.0.1.1"})}


def make(tmp_path: Path, head: str = "192.168.1.10", peer: str = "192.168.1.11", name: str = "second") -> config.Config:
    file = tmp_path / "hydra.toml"
    file.write_text(f'[model]\npath = "m"\n[[nodes]]\nname = "first"\nrole = "head"\nhost = "{head}"\n'
                    f'[[nodes]]\nname = "{name}"\nrole = "peer"\nhost = "{peer}"\n')
    return config.load(file, {})


def who(cfg: config.Config, name: str | None = None, env: dict[str, str] | None = None) -> nodes.Recognised:
    return nodes.this_node(cfg, name, env=env or {}, box=BOX, lookup=lambda host: NAMES.get(host, frozenset()))


@pytest.mark.parametrize(("host", "how"), [
    ("192.168.1.11", "is an address of this box"),
    ("fd00::11", "is an address of this box"),
    ("box-b", r"box-b \(192.168.1.11\) is an address of this box"),
    ("Mini", "is this box's host name"),
    ("mini.lan", "is this box's host name"),
    ("alias", "loopback"),
])
def test_recognised(tmp_path, host, how):
    got = who(make(tmp_path, peer=host))
    assert got.node.name == "second"
    assert re.search(how, got.how)


def test_node_named_like_the_box_is_the_last_resort(tmp_path):
    assert "host name mini" in who(make(tmp_path, peer="10.9.9.9", name="mini")).how
    assert who(make(tmp_path, head="192.168.1.11", peer="10.9.9.9", name="mini")).node.name == "first"


def test_named(tmp_path):
    cfg = make(tmp_path)
    assert who(cfg, "first").how == "named by --node"
    assert who(cfg, env={"HYDRA_NODE": "first"}).node.name == "first"
    assert who(cfg, "second", env={"HYDRA_NODE": "first"}).node.name == "second"
    with pytest.raises(ConfigError, match="no node 'third'"):
        who(cfg, "third")


def test_none_says_what_was_looked_at(tmp_path):
    with pytest.raises(ConfigError) as caught:
        who(make(tmp_path, head="tower.lan", peer="nowhere.lan"))
    for words in ("fd00::11", "192.168.1.11", "mini.lan", "first is tower.lan (192.168.1.10)",
                  "second is nowhere.lan (a name that does not resolve)"):
        assert words in caught.value.message
    assert "--node" in caught.value.hint


def test_ambiguous(tmp_path):
    with pytest.raises(ConfigError, match=r"could be first .* and second") as caught:
        who(make(tmp_path, head="127.0.0.1", peer="127.0.0.1"))
    assert "--node" in caught.value.hint


def test_this_box_has_no_loopback():
    box = nodes.this_box()
    assert box.names and not any(address.startswith("127.") or address == "::1" for address in box.addresses)


def test_resolve_is_bounded(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: gate.wait(20) and [])
    assert nodes.resolve("slow", 0.05) == frozenset()
    gate.set()
    monkeypatch.undo()
    assert "127.0.0.1" in nodes.resolve("127.0.0.1")
