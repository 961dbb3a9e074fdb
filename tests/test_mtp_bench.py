"""`hydra bench mtp`: every way of drafting is measured, the answers agree, and the table is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydra.bench import cli, mtp
from hydra.errors import ConfigError, HydraError
from tests.engine_support import toy


def test_all_ways_of_drafting_are_measured() -> None:
    lines: list[str] = []
    plan = mtp.Plan(Path(toy()), ("none", "hydra"), (1, 3), rounds=1, tokens=40, prompt_tokens=64, threads=1, layers=2,
                    ctx_size=512)
    outcome = mtp.run(plan, lines.append)
    assert [(f.peer, f.draft) for f in outcome.figures] == [
        (peer, draft) for peer in ("none", "hydra") for draft in ("off", "1", "3", "adaptive")]
    for figure in outcome.figures:
        assert len(figure.decode_tps) == len(figure.prefill_tps) == len(figure.ideal_tps) == 1
        assert figure.ideal_tps[0] >= figure.decode_tps[0] * 0.9
        if figure.draft != "adaptive":  # which may well find that a toy is not worth a draft
            assert (figure.acceptance_rate is None) == (figure.draft == "off")
    three = outcome.find("none", "3")
    one = outcome.find("none", "1")
    assert three is not None
    assert one is not None
    assert (three.mean_acceptance_length or 0) > (one.mean_acceptance_length or 0) > 1
    assert outcome.identical
    assert outcome.setting["layers"] == {"peer": 2, "head": 2}
    assert all(len(row) == len(mtp.COLUMNS) for row in outcome.rows())
    assert set(outcome.to_dict()) == {"figures", "identical", "setting"}
    assert len(lines) == 4


def test_several_requests_at_once() -> None:
    plan = mtp.Plan(Path(toy()), ("none",), (2,), adaptive=False, rounds=1, tokens=30, prompt_tokens=40, threads=1,
                    ctx_size=1024, parallel=3)
    outcome = mtp.run(plan, lambda _line: None)
    assert all(figure.decode_tps[0] > 0 for figure in outcome.figures)
    assert outcome.identical


def test_a_shape_alone_is_measured_with_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hydra bench --synthetic 27b`: a rig is tried before a model is fetched."""
    asked: list[str] = []
    monkeypatch.setattr(mtp, "command", lambda synthetic: asked.append(synthetic))
    runner = CliRunner()
    assert runner.invoke(cli.app, ["--synthetic", "27b"]).exit_code == 0
    assert asked == ["27b"]
    refused = runner.invoke(cli.app, ["--synthetic", "27b", "nagle"])
    assert isinstance(refused.exception, ConfigError)
    assert "hydra bench nagle --synthetic 27b" in refused.exception.hint
    assert runner.invoke(cli.app, ["--help"]).exit_code == 0
    assert asked == ["27b"]


def test_a_model_without_mtp_is_refused() -> None:
    plan = mtp.Plan(Path(toy("toy-llama")), ("none",), (1,), rounds=1, tokens=10, prompt_tokens=32, threads=1,
                    ctx_size=256)
    with pytest.raises(HydraError, match="no MTP block"):
        mtp.run(plan, lambda _line: None)
