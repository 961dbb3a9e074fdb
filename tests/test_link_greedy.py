"""The first invariant with the link in between: greedy tokens through it are those of one box, on real weights.

A prompt and 64 tokens go through rows, ranges and repeated messages, to one peer and to two in sequence (the second is
given the results of the first, which never repeat).
"""

from __future__ import annotations

import contextlib

import pytest

from hydra.head.spec import Endpoint
from hydra.link.process import start_link
from hydra.link.settings import LinkSettings
from tests.peer_tools import peer
from tests.test_greedy_through_peers import N_TOKENS, greedy


@pytest.fixture(scope="module")
def local() -> list[int]:
    return greedy((), {})[0]


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [("mini",), ("mini", "nano")], ids="+".join)
def test_greedy_tokens_through_the_link_are_those_without_a_peer(names: tuple[str, ...], local: list[int]) -> None:
    layers = dict(zip(names, (7, 5), strict=False))
    with contextlib.ExitStack() as stack:
        links = []
        for name in names:
            host, port = stack.enter_context(peer("hydra"))
            links.append(stack.enter_context(start_link(LinkSettings(name, host, port), quiet=True)))
        endpoints = tuple(Endpoint(link.settings.name, link.endpoint) for link in links)
        tokens, placed = greedy(endpoints, layers)
        stats = [link.stats() for link in links]
    assert len(local) == N_TOKENS and tokens == local
    assert {name: placed[name] for name in names} == layers
    for counts in stats:
        assert counts["wire_sends"] < counts["plain_messages"]
        assert counts["wire_bytes_up"] < counts["plain_bytes_up"]
