"""hydra bench link on a small model: the ways agree, and the rows say what was sent."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydra.bench import linkbench, linkhead, synthetic
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


def test_a_run_that_was_stopped_goes_on(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    plan = linkbench.Plan(model, ("loopback",), (1024,), (False, True), ("stock", "link"), 1, 1, threads=1)
    whole = linkbench.run(plan, lambda _text: None, file)
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + len(whole) == 5
    file.write_text("\n".join(lines[:3]) + "\n")  # stopped after the first setting
    told: list[str] = []
    again = linkbench.run(plan, told.append, file)
    assert again[:2] == whole[:2] and [(row.way, row.mtp) for row in again[2:]] == [("stock", True), ("link", True)]
    assert not any("MTP off" in line for line in told) and file.read_text().splitlines()[:3] == lines[:3]
    told.clear()
    assert linkbench.run(plan, told.append, file) == again and not told, "nothing left: nothing is loaded"
    with pytest.raises(ConfigError, match="other options"):
        linkbench.run(replace(plan, turns=2), told.append, file)
    file.write_text("no rows")
    with pytest.raises(ConfigError, match="cannot be read"):
        linkbench.run(plan, told.append, file)


def test_the_text_repeats_itself_as_text_does() -> None:
    some = list(islice(linkhead.text(4096), 4000))
    assert some == list(islice(linkhead.text(4096), 4000)) and all(0 <= token < 4096 for token in some)
    late = sum(token not in some[:at] for at, token in enumerate(some) if at >= 2000)
    assert 0.15 < late / 2000 < 0.25
    assert len(set(islice(linkhead.text(64), 4000))) == 56, "and goes on when there is nothing new any more"


@pytest.mark.parametrize(
    "arguments", [["--ways", "stock,magic"], ["--mtp", "maybe"], ["--n-kv", "many"], ["--model", "nowhere.gguf"]]
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["link", *arguments])
    assert isinstance(done.exception, ConfigError)


def test_tokens_of_a_step_with_mtp() -> None:
    assert linkbench.tokens_per_step(False) == 1
    assert linkbench.tokens_per_step(True) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
