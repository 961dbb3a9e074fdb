"""hydra/commands/ports.py: a taken port is told with the process that has it."""

from __future__ import annotations

import os
import socket

import pytest

from hydra.commands import ports
from hydra.errors import ConfigError, HydraError


def test_free_and_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(HydraError) as caught:
            ports.ensure_free("127.0.0.1", port, "the peer mini")
        assert f"127.0.0.1:{port}" in caught.value.message and f"process {os.getpid()} (" in caught.value.message
        assert "the peer mini cannot start" in caught.value.message and caught.value.hint
    ports.ensure_free("127.0.0.1", port, "the peer mini")


def test_not_our_address():
    with pytest.raises(ConfigError, match="not an address of this box"):
        ports.ensure_free("203.0.113.7", 50052, "the peer mini")
    with pytest.raises(ConfigError, match="does not resolve"):
        ports.ensure_free("no.such.name.invalid", 50052, "the peer mini")


def test_nobody():
    assert str(ports.Listener(0, "", "")) == "a process of another user"
