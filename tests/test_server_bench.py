"""`hydra bench server`: both heads get the same requests, and the table is what they said of themselves.

llama-server is played by a small program here, since only benchmarks need the real one; hydra's head is real.
"""

from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path

import pytest

from hydra.bench import server
from hydra.bench.synthetic import SHAPES
from hydra.errors import ConfigError, HydraError
from tests.engine_support import toy, toy_language

# Says what the exact model says, at 10 tokens a second.
PROGRAM = '''#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
SUCCESSOR = {successor}
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self): self.answer({{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens, last = [], body["prompt"][-1]
        for _ in range(body["n_predict"]):
            last = SUCCESSOR[last]
            tokens.append(last)
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for token in tokens:
                self.wfile.write(b'data: {{"tokens": [%d]}}\\n\\n' % token)
                self.wfile.flush()
                time.sleep(0.01)
            return
        self.answer({{"tokens": tokens, "timings": {{"prompt_per_second": 100.0, "predicted_per_second": 10.0}}}})
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable, successor=list(toy_language().successor)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def plan(programs: Path) -> server.Plan:
    shape = SHAPES["toy"]
    return server.Plan(Path(toy()), programs, ("local",), (True,), requests=2, pairs=2, tokens=12, prompt_tokens=24,
                       layers=2, n_layer=shape.n_layer, n_nextn=shape.n_nextn)


def test_both_are_asked_the_same_and_the_ratio_is_theirs(programs: Path) -> None:
    lines: list[str] = []
    found = server.run(plan(programs), lines.append)
    assert [(c.place, c.mtp, c.requests) for c in found] == [("local", True, 1), ("local", True, 2)]
    assert len(lines) == 2
    for comparison in found:
        assert comparison.same
        assert len(comparison.hydra) == len(comparison.stock) == 2
        assert comparison.median("stock", "decode_tps") == 10
        assert comparison.ratio("decode_tps") == pytest.approx(
            sum(sample.decode_tps for sample in comparison.hydra) / 20)
        assert min(sample.accepted for sample in comparison.hydra) > 0
        assert len(comparison.row()) == len(server.COLUMNS)
        assert comparison.to_dict()["total_tps"]["hydra"] > 0
    assert not found[0].paced
    assert len(found[1].paces["stock"]) == 2  # hydra's toy may be done before the other prompt comes


def test_the_pace_of_an_answer_beside_another_prompt(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SAME_STEP_S", 0.0)  # a toy's steps are that short
    long = dataclasses.replace(plan(programs), tokens=400)
    with server.heads(long, "local", False) as both:
        measured = {head[0]: server.pace(long, head, 1) for head in both}
    stock, ours = measured["stock"], measured["hydra"]
    assert stock is not None and ours is not None
    assert stock.alone_s > 0.005
    assert 0 < ours.median_s <= ours.longest_s
    comparison = server.Comparison("local", False, 2, paces={"hydra": [ours], "stock": [stock]})
    assert comparison.pace("hydra")["longest_s"] == pytest.approx(1e3 * ours.longest_s)
    assert len(comparison.pace_row()) == len(server.PACE_COLUMNS)


def test_another_answer_is_said(programs: Path) -> None:
    program = programs / "llama-server"
    program.write_text(program.read_text().replace("last = SUCCESSOR[last]", "last = 65"))
    found = server.run(dataclasses.replace(plan(programs), requests=1, pairs=1), lambda _line: None)
    assert [comparison.same for comparison in found] == [False]
    assert found[0].row()[-1] == "no"


def test_a_server_that_ends_and_one_that_is_not_there(programs: Path, tmp_path: Path) -> None:
    (programs / "llama-server").write_text(f"#!{sys.executable}\nraise SystemExit('no such option')\n")
    with pytest.raises(HydraError, match="no such option"):
        server.run(plan(programs), lambda _line: None)
    with pytest.raises(ConfigError, match=r"stock-server\.sh"):
        server.find_programs(tmp_path / "nowhere")


def test_the_same_split_is_asked_of_llama_server(programs: Path) -> None:
    on_cpu = server.stock_arguments(plan(programs), "127.0.0.1:1", True)
    assert on_cpu[on_cpu.index("-ngl") + 1] == "4"  # two layers, the MTP block, the output
    assert on_cpu[on_cpu.index("--rpc") + 1] == "127.0.0.1:1"
    on_gpu = server.stock_arguments(dataclasses.replace(plan(programs), device="CUDA0"), "127.0.0.1:1", False)
    assert on_gpu[on_gpu.index("-ts") + 1] == "2,4"
    assert "--spec-type" in on_cpu and "--spec-type" not in on_gpu
    assert "--rpc" not in server.stock_arguments(plan(programs), "", True)
