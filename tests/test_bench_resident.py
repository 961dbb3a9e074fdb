"""A head that stays: the same answers with drafting and without, several at once, and its own words when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra.bench import synthetic
from hydra.bench.pairs import Setting, start
from hydra.bench.resident import ResidentHead, SpeedHead
from hydra.bench.run_head import HeadSpec
from hydra.errors import HydraError
from hydra.head.spec import DraftSpec, Endpoint, EngineSpec

TEXT = (32, 127)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.model("toy", acceptance=0.7, directory=tmp_path_factory.mktemp("models"))


def test_one_load_serves_with_drafting_without_and_several_at_once(model: Path) -> None:
    with start("hydra", Setting("CPU", 1)) as peer:
        spec = EngineSpec(
            str(model),
            endpoints=(Endpoint("peer", peer.endpoint),),
            layers={"peer": 2},
            ctx_size=1024,
            threads=1,
            draft=DraftSpec("mtp", 3, 0.0, adaptive=False),
        )
        with ResidentHead(spec.to_dict(), peer) as head:
            assert head.ready["drafter"] == "mtp" and head.ready["layers"]["peer"] == 2
            assert head.load_s > 0 and head.weighed.peak_bytes >= head.weighed.idle_bytes > 0
            drafted = head.run("mtp", 40, 48, 1, TEXT)
            plain = head.run("plain", 40, 48, 1, TEXT)
            assert drafted.tokens == plain.tokens and len(plain.tokens) == 48
            assert drafted.drafted > drafted.accepted > 0 and plain.drafted == 0
            assert head.run("plain", 40, 8, 2, TEXT).tokens != plain.tokens[:8]  # another seed, another prompt
            together = head.ask(do="many", requests=3, prompt=20, tokens=8, seed=3, alphabet=TEXT)
            assert together["total_tps"] > 0 and len(together["decode_tps"]) == 3
            wide = head.ask(do="logits", prompt=20, seed=4, alphabet=TEXT)
            narrow = head.ask(do="logits", prompt=20, seed=4, alphabet=TEXT, width=1)
            assert wide["top"] == narrow["top"]
            assert wide["logits"] == pytest.approx(narrow["logits"], abs=0.01 * wide["spread"])
            assert head.run("plain", 40, 48, 1, TEXT).tokens == plain.tokens


def test_turns_of_a_raw_head_go_on_where_the_last_ended(model: Path) -> None:
    with SpeedHead(HeadSpec(str(model), threads=1, ctx_size=512)) as head:
        assert head.ask(do="prefill", tokens=64, seed=1)["s"] > 0
        head.ask(do="begin")
        whole = head.ask(do="decode", tokens=12)["tokens"]
        head.ask(do="begin")
        parts = [*head.ask(do="decode", tokens=5)["tokens"], *head.ask(do="decode", tokens=7)["tokens"]]
        assert parts == whole
        assert head.ask(do="verify", steps=2)["s"] > 0


def test_a_head_that_cannot_load_says_why() -> None:
    with pytest.raises(HydraError, match=r"nothing\.gguf"):
        ResidentHead(EngineSpec("/nothing.gguf", ctx_size=256).to_dict())


def test_a_turn_without_room_is_an_error_and_not_a_hang(model: Path) -> None:
    with SpeedHead(HeadSpec(str(model), threads=1, ctx_size=512)) as head:
        head.ask(do="begin")
        with pytest.raises(HydraError, match="no room"):
            head.ask(do="decode", tokens=1000)
