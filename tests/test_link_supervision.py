"""What a link reports of its peer becomes the reason that the head gives for its engine's end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hydra.commands.links import Links
from hydra.head.diagnosis import LINK_FAULT_S, Ending, LinkFault, diagnose
from hydra.head.supervisor import Supervisor

RPC_LOSS = ["ggml-rpc.cpp:354: Remote RPC server crashed or returned malformed response"]
SILENT = ("mini", "silent", "Peer mini (192.0.2.7:50052) has said nothing for 15.2 s.", "The box is off.")


def test_the_links_words_are_the_reason() -> None:
    failure = diagnose(Ending("exit"), "ended by SIGABRT", RPC_LOSS, [], loading=False, link=LinkFault(*SILENT))
    assert failure.node == "mini" and failure.key == "link:mini:silent" and failure.hint == "The box is off."
    assert failure.reason == "Peer mini (192.0.2.7:50052) has said nothing for 15.2 s; the engine ended by SIGABRT"


def test_an_old_word_explains_nothing() -> None:
    old = LinkFault(*SILENT, at=time.monotonic() - LINK_FAULT_S - 1)
    assert diagnose(Ending("exit"), "ended by SIGABRT", [], [], loading=False, link=old).node is None


def test_the_supervisor_is_told_and_only_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(Supervisor, "link_failed", lambda self, *fault: told.append(fault))
    links: Any = Links.__new__(Links)
    links._stopping = _Never()
    links.on_fault = Supervisor.__new__(Supervisor).link_failed
    links._on_event({"event": "connected", "peer": "mini", "mode": "link"})
    links._on_event(dict(zip(("peer", "kind", "message", "hint"), SILENT, strict=True)) | {"event": "fault"})
    assert told == [SILENT]


class _Never:
    def is_set(self) -> bool:
        return False
