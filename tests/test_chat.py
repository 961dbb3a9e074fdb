"""`hydra chat` against a small head of our own: what goes to stdout, what to stderr, and every way it can go wrong."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from hydra import cli
from hydra.commands import chat
from hydra.commands.chat_client import HeadClient
from hydra.errors import HydraError
from tests.fake_head import READY, Head, ending, said


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_stdin(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["chat", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_shot_writes_the_answer_and_nothing_else(capsys, head):
    head.says("Hello", " wörld", reasoning="hm")
    code, out, err = run(capsys, "hi", "--url", head.url, "-s", "Be brief.", "--temp", "0", "-n", "9", "--seed", "3")
    assert (code, out, err) == (0, "Hello wörld\n", "")
    assert head.asked[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert {key: head.asked[0].get(key) for key in ("temperature", "max_tokens", "seed", "top_p", "stream")} == {
        "temperature": 0, "max_tokens": 9, "seed": 3, "top_p": None, "stream": True}


def test_stdin_goes_before_the_prompt(capsys, head, monkeypatch):
    head.says("ok\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a text\nof two lines\n"))
    assert run(capsys, "Sum it up.", "--url", head.url)[:2] == (0, "ok\n")
    assert head.asked[0]["messages"][0]["content"] == "a text\nof two lines\n\nSum it up."


def test_json_and_stats(capsys, head):
    head.says("yes", reasoning="because")
    code, out, err = run(capsys, "hi", "--url", head.url, "--json", "--stats")
    report = json.loads(out)
    assert code == 0 and len(out.splitlines()) == 1
    assert (report["text"], report["reasoning"], report["finish_reason"]) == ("yes", "because", "stop")
    assert report["usage"] == {"completion_tokens": 1}
    assert err == "prompt 504 tok/s · answer 29.2 tok/s · accepted 70 % · context 12 %\n"


def test_waits_for_a_head_that_loads(capsys, head, monkeypatch):
    monkeypatch.setattr(chat, "READY_POLL_S", 0.0)
    head.says("there")
    head.health = [{"state": "waiting", "reason": "waiting for peer mini", "model": "m"},
                   {"state": "loading", "stage": "weights", "node": "mini", "percent": 40.0, "eta_s": 9, "model": "m"},
                   READY]
    code, out, err = run(capsys, "hi", "--url", head.url)
    assert (code, out) == (0, "there\n") and "waiting for peer mini" in err


def test_failures(capsys, head):
    code, out, err = run(capsys, "hi", "--url", "http://127.0.0.1:9")
    assert (code, out) == (5, "") and err.startswith("error: No head answers") and "hydra up" in err
    head.health = [{"state": "failed", "reason": "out of memory", "model": "m"}]
    assert run(capsys, "hi", "--url", head.url)[0] == 8
    head.health = [{"state": "ok", "name": "mini", "devices": []}]
    code, _, err = run(capsys, "hi", "--url", head.url)
    assert code == 5 and "no head but the peer mini" in err
    head.health = [READY]
    head.status, head.refusal = 401, {"error": {"message": "No key."}}
    code, _, err = run(capsys, "hi", "--url", head.url)
    assert code == 9 and "No key." in err and "HYDRA_API_KEY" in err
    head.status, head.refusal = 503, {"error": {"message": "Queue full."}}
    assert run(capsys, "hi", "--url", head.url)[0] == 8
    head.status = 200
    head.script = [said("half"), {"error": {"message": "The engine is gone."}}]
    code, out, err = run(capsys, "hi", "--url", head.url)
    assert (code, out) == (8, "half\n") and "The engine is gone." in err
    head.script = ["data: {not json"]
    assert run(capsys, "hi", "--url", head.url)[0] == 8


def test_a_full_context_is_the_requests_fault(capsys, head):
    head.script = [{"error": {"message": "The prompt has 9 tokens; the context holds 8.", "code":
                              "context_length_exceeded", "type": "invalid_request_error"}}]
    code, out, err = run(capsys, "hi", "--url", head.url)
    assert (code, out) == (9, "") and "the context holds 8" in err


def test_a_pipe_gets_the_answer_as_it_is(capsys, head, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    head.says("# A *b*\n\x1b[31m", "```c\n", reasoning="hm")
    code, out, err = run(capsys, "hi", "--url", head.url, "--hide-think")
    assert (code, out, err) == (0, "# A *b*\n\x1b[31m```c\n", "")


def test_what_a_stream_waits_for_goes_to_stderr_once(capsys, head):
    note = ': hydra {"state": "loading", "recovering": true, "node": "mini", "stage": "weights", "percent": 4}'
    head.script = [said("one "), note, note.replace("4}", "5}"), said("two"), *ending()]
    code, out, err = run(capsys, "hi", "--url", head.url)
    assert (code, out) == (0, "one two\n")
    assert err == "(recovering: loads: weights on mini; the answer goes on by itself)\n"


def test_address_and_key(capsys, head, monkeypatch, tmp_path):
    head.says("ok")
    monkeypatch.setenv("HYDRA_API", head.url)
    monkeypatch.setenv("HYDRA_API_KEY", "hush")
    assert run(capsys, "hi")[0] == 0 and head.keys == ["Bearer hush"]
    assert chat.head_address(None, "box:99", {}) == ("http://box:99", "")
    assert chat.head_address(None, "", {}) == ("http://127.0.0.1:8080", "")
    file = tmp_path / "hydra.toml"
    file.write_text('[model]\npath = "m"\n[head]\napi_host = "0.0.0.0"\napi_port = 99\napi_key = "k"\n'
                    '[[nodes]]\nname = "a"\nrole = "head"\nhost = "10.0.0.1"\n')
    assert chat.head_address(str(file), "", {}) == ("http://10.0.0.1:99", "k")
    file.write_text("nonsense")
    with pytest.raises(HydraError, match="not valid TOML"):
        chat.head_address(None, "", {})


def test_notes_of_a_silent_stream(head):
    head.script = [': hydra {"reason": "waiting for peer mini"}', ": hydra nonsense", ": other"]
    with HeadClient(head.url) as client:
        notes = [piece.note for piece in client.chat([], {}) if piece.note]
    assert notes == [{"reason": "waiting for peer mini"}]


def test_ps(capsys, head):
    head.health = [{"state": "waiting", "reason": "waiting for peer mini", "model": {}, "nodes": [
        {"name": "tower", "role": "head", "state": "waiting", "devices": [{"utilisation": 97, "temperature": 61}],
         "device": "RTX 5060 Ti", "layers": 40, "memory_used": 2**30, "memory_total": 2**34, "rtt_ms": None,
         "restarts": 1, "uptime_s": 75},
        {"name": "mini", "role": "peer", "state": "refused", "devices": [], "layers": None, "rtt_ms": 0.34},
        {"name": "box", "role": "peer", "state": "up", "devices": [{"memory": [2**30, 2**31]}], "device": "CPU"}],
        "requests": [{"id": 7, "state": "decode", "prompt_tokens": 12, "generated_tokens": 30, "tokens_per_s": 29.2,
                      "age_s": 3.1, "resumed": 1, "pause": ""}]}]
    code = cli.run(["ps", "--url", head.url])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].split() == ["NAME", "ROLE", "STATE", "DEVICE", "LAYERS", "MEMORY", "GPU", "RTT", "RESTARTS", "UP"]
    assert lines[1].split()[2:] == ["waiting", "RTX", "5060", "Ti", "40", "1.0/16.0", "GiB", "97", "%", "61", "°C", "-",
                                    "1", "1:15"]
    assert lines[2].split() == ["mini", "peer", "refused", "-", "-", "-", "-", "0.3", "ms", "-", "-"]
    assert "1.0/2.0 GiB" in lines[3]
    assert lines[4] == "waiting: waiting for peer mini"
    assert lines[5] == "request 7: decode, 12 tokens of prompt, 30 generated, 29.2 tok/s, 3.1 s, continued 1 times"
    assert cli.run(["ps", "--url", head.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][1]["name"] == "mini"
    assert cli.run(["ps", "--url", "http://127.0.0.1:9"]) == 5
