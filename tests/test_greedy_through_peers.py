"""The first invariant: greedy tokens through peers are those without, on real weights, token for token.

The stock C++ server stands the same test, so that it is one of the protocol and not of our peer. Buffers are plain
everywhere (``use_extra_bufts`` off): a local run that repacks its weights rounds differently.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from hydra.embedded import embedded_model
from hydra.head import launch
from hydra.head.channel import Channel
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec
from tests.peer_tools import peer

PROMPT = "Write a short story about a lighthouse keeper and a very small boat."
N_TOKENS = 64


def greedy(endpoints: tuple[Endpoint, ...], layers: dict[str, int]) -> tuple[list[int], dict[str, int]]:
    """(64 greedy tokens, layers by node as llama.cpp placed them), from an engine process."""
    spec = EngineSpec(
        str(embedded_model().path),
        endpoints=endpoints,
        layers=layers,
        ctx_size=512,
        batch_size=256,
        ubatch_size=256,
        threads=2,
        use_extra_bufts=False,
        draft=DraftSpec(kind="none"),
    )
    engine = launch.start()
    try:
        channel = engine.channel
        channel.send({"type": "load", "spec": spec.to_dict()})
        info = wait(channel, "ready")["info"]
        channel.send({"type": "tokenize", "id": "t", "text": PROMPT, "add_special": True, "parse_special": False})
        prompt = wait(channel, "result")["value"]
        params = {"temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True}
        channel.send({"type": "generate", "id": "g", "prompt": prompt, "params": params})
        tokens: list[int] = []
        while True:
            frame = channel.receive()
            assert frame is not None and frame["type"] != "failed", frame
            if frame["type"] == "chunk":
                tokens += frame["tokens"]
            elif frame["type"] == "done":
                return tokens, info["layers"]
    finally:
        engine.close()


def wait(channel: Channel, kind: str) -> dict[str, Any]:
    while True:
        frame = channel.receive()
        assert frame is not None and frame["type"] != "failed", frame
        if frame["type"] == kind:
            return frame


@pytest.fixture(scope="module")
def local() -> list[int]:
    return greedy((), {})[0]


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kinds", [("hydra",), ("hydra", "hydra"), ("stock",)], ids="+".join)
def test_greedy_tokens_are_those_without_a_peer(kinds: tuple[str, ...], local: list[int]) -> None:
    names = ["mini", "nano"][: len(kinds)]
    layers = dict(zip(names, (7, 5), strict=False))
    with contextlib.ExitStack() as stack:
        where = [stack.enter_context(peer(kind)) for kind in kinds]
        endpoints = tuple(Endpoint(name, f"{host}:{port}") for name, (host, port) in zip(names, where, strict=True))
        tokens, placed = greedy(endpoints, layers)
    assert len(local) == N_TOKENS
    assert tokens == local
    assert {name: placed[name] for name in names} == layers
