"""hydra bench link on a small model: the ways agree, and the rows say what was sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydra.bench import linkbench, synthetic
from hydra.bench.cli import app
from hydra.errors import ConfigError


@pytest.fixture(scope="module")
def model() -> Path:
    return synthetic.model("toy-llama", exact=False)


def test_all_ways_say_the_same_and_the_link_says_it_shorter(model: Path) -> None:
    plan = linkbench.Plan(model, ("loopback",), (1024, 2048), (False, True), ("stock", "hydra", "link", "f16"), 1, 2,
                          threads=1)  # fmt: skip
    rows = {(row.way, row.n_kv, row.mtp): row for row in linkbench.run(plan, lambda _text: None)}
    assert len(rows) == 16
    for (way, n_kv, mtp), row in rows.items():
        assert row.step_ms > 0 and row.tps > 0 and row.ratio_to_stock > 0
        if way == "f16":
            assert row.logit_error < 0.5
        else:
            assert row.exact, row
        if way == "link":
            direct = rows["stock", n_kv, mtp]
            assert direct.bytes_per_step == rows["hydra", n_kv, mtp].bytes_per_step > 0
            assert row.bytes_to_peer < direct.bytes_to_peer and row.messages_per_step < direct.messages_per_step
            assert rows["f16", n_kv, mtp].bytes_per_step < row.bytes_per_step
    assert rows["stock", 2048, True].bytes_per_step > rows["stock", 1024, True].bytes_per_step


def test_json_is_one_object_last(model: Path) -> None:
    arguments = ["link", "--model", str(model), "--link", "loopback", "--n-kv", "1024", "--mtp", "off", "--turns", "1",
                 "--steps", "1", "--threads", "1", "--ways", "stock,link", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["way"] for row in rows] == ["stock", "link"]
    assert {"bytes_per_step", "messages_per_step", "tps", "ratio_to_stock"} <= rows[1].keys()


@pytest.mark.parametrize(
    "arguments", [["--ways", "stock,magic"], ["--mtp", "maybe"], ["--n-kv", "many"], ["--model", "nowhere.gguf"]]
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["link", *arguments])
    assert isinstance(done.exception, ConfigError)


def test_tokens_of_a_step_with_mtp() -> None:
    assert linkbench.tokens_per_step(False) == 1
    assert linkbench.tokens_per_step(True) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
