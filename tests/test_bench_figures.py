"""Ratios, percentiles and link settings: what stands between the runs and the figures that are reported."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from hydra.bench.link import Link, parse_link
from hydra.bench.pairs import compare, order, percentile
from hydra.bench.run_head import HeadSpec
from hydra.errors import ConfigError, HydraError


def test_ratios_are_within_pairs() -> None:
    ratio = compare("decode", "tok/s", [10, 20, 40], [11, 20, 20])
    assert ratio is not None
    assert ratio.ratios == (1.1, 1.0, 0.5)
    assert ratio.median == 1.0  # of the ratios; the ratio of the medians would be the same here by chance only
    assert (ratio.stock, ratio.hydra) == (20, 20)
    assert ratio.to_dict()["ratio_min"] == 0.5 and ratio.to_dict()["ratio_max"] == 1.1


def test_above_one_is_better_for_times_too() -> None:
    ratio = compare("load", "s", [10.0], [5.0], smaller_is_better=True)
    assert ratio is not None and ratio.median == 2.0


def test_what_was_not_measured_is_none_and_not_a_number() -> None:
    assert compare("load", "s", [], []) is None
    assert compare("load", "s", [0.0], [3.0]) is None


def test_neither_goes_first_always() -> None:
    assert [order(pair)[0] for pair in range(4)] == ["stock", "hydra", "stock", "hydra"]


def test_percentile() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(100)), 0.99) == 99


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1gbit", (1e9, 0.0)), ("1Gbit,0.2ms", (1e9, 2e-4)), ("2.5gbit,200us", (2.5e9, 2e-4)), ("100mbit,0", (1e8, 0.0))],
)
def test_a_link_is_read(text: str, expected: tuple[float, float]) -> None:
    assert parse_link(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "1gbit,slow", "-1gbit", "1gb", "1gbit,1h", "1gbit,1ms,2ms"])
def test_a_link_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="Write it like"):
        parse_link(text)


def test_a_head_spec_survives_its_trip() -> None:
    spec = HeadSpec("model.gguf", peer="127.0.0.1:1", prompts=(1, 2), devices=("CPU",), stats=True)
    assert HeadSpec.from_json(spec.to_json()) == spec


def test_the_link_is_shaped_and_goes_again() -> None:
    link = Link(2e8, 1e-3)
    try:
        link.__enter__()
    except HydraError as error:
        assert error.hint
        pytest.skip(f"no network namespaces here: {error.message}")
    try:
        assert "200 Mbit/s" in link.description and ("netem" in link.description)
        for netns in (link.head_netns, link.peer_netns):
            shown = subprocess.run(
                ["tc", "-n", netns, "qdisc", "show", "dev", "veth0"],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            ).stdout
            assert "tbf" in shown and "rate 200Mbit" in shown
    finally:
        link.__exit__()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True).stdout
    assert link.head_netns not in left and link.peer_netns not in left


def test_a_link_without_the_rights_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        monkeypatch.setattr(shutil, "which", lambda tool: None)
        with pytest.raises(HydraError, match="not installed"):
            Link(1e9, 0).__enter__()
        return
    link = Link(1e9, 0)
    link.head_netns = f"no/such{os.getpid()}"  # as refused as it is without CAP_NET_ADMIN
    with pytest.raises(HydraError) as caught:
        link.__enter__()
    assert "CAP_NET_ADMIN" in caught.value.hint
