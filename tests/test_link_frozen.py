"""`hydra up` with its link before a peer that freezes: named in the time set, and Ctrl-C ends the head whenever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hydra.bench import soak, synthetic
from tests.test_survival_signals import BOUND_S, Stream

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[soak.Rig]:
    made = soak.Rig(tmp_path, synthetic.model("toy-llama"))
    try:
        made.wait_ready(120)
        yield made
    finally:
        made.close()


def restart_head(rig: soak.Rig, link: str) -> None:
    rig.head.process.send_signal(signal.SIGTERM)
    assert rig.head.process.wait(BOUND_S) == 0
    file = rig.folder / "head.toml"
    head, _, tail = file.read_text().partition("[link]\n")
    file.write_text(f"{head}[link]\n{link}\n[[nodes]]{tail.partition('[[nodes]]')[2]}")
    rig.restart_head()
    rig.wait_ready(120)


def freeze(rig: soak.Rig) -> list[int]:
    """The peer's processes, both stopped; what is sent to them is taken by the kernel, and never answered."""
    pids = [rig.peer.process.pid, int(rig.peer_health()["worker_pid"])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def wait_for(condition: Callable[[], object], seconds: float) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begin


def processes(rig: soak.Rig) -> list[psutil.Process]:
    return psutil.Process(rig.head.process.pid).children(recursive=True)


def interrupt(rig: soak.Rig, family: list[psutil.Process]) -> float:
    """Ctrl-C as a terminal does it, twice: everybody in the foreground gets it. Returns the seconds that it took."""
    begin = time.monotonic()
    for _ in range(2):
        for process in (psutil.Process(rig.head.process.pid), *family):
            if process.is_running():
                process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert rig.head.process.wait(BOUND_S) == 0
    psutil.wait_procs(family, BOUND_S)
    assert not [process for process in family if process.is_running()], "nothing of the head is left"
    return time.monotonic() - begin


def test_a_frozen_peer_is_named_in_the_time_set_and_the_answer_goes_on(rig: soak.Rig) -> None:
    restart_head(rig, "enabled = true\nsilence_s = 2.0")
    stream = Stream(rig, 400)
    pids = freeze(rig)
    try:
        took = wait_for(lambda: re.search(r"Peer peer \(\S+\) has said nothing for", rig.head.log_tail(80)), 20)
    finally:
        thaw(pids)
    assert took < 10, "silence_s is 2"
    stream.join(BOUND_S * 2)
    assert stream.done and stream.exact() and len(stream.tokens) == 400 and not stream.error


def test_ctrl_c_ends_a_head_whose_peer_is_frozen_and_not_yet_noticed(rig: soak.Rig) -> None:
    restart_head(rig, "enabled = true\nsilence_s = 600.0")
    Stream(rig, 3900)
    family = processes(rig)
    assert any("hydra.link.process" in " ".join(process.cmdline()) for process in family)
    pids = freeze(rig)
    try:
        time.sleep(0.5)
        interrupt(rig, family)
    finally:
        thaw(pids)
