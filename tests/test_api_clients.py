"""Other clients that nobody here wrote: the `llm` command, the locust load tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_support import Head, running_head
from tests.fake_engine import say

LLM = Path(sys.executable).with_name("llm")
LOCUST = Path(sys.executable).with_name("locust")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running_head(tmp_path_factory.mktemp("head")) as running:
        yield running


@pytest.mark.skipif(not LLM.exists(), reason="the llm command is not installed")
@pytest.mark.parametrize("arguments", [[], ["--no-stream"]])
def test_llm(head: Head, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: mine\n  api_base: {head.url}/v1\n  api_key_name: none\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"none": "x"}))
    env = {"PATH": os.environ["PATH"], "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [LLM, "-m", "mine", *arguments, say("Grüße vom Kopf.")],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Grüße vom Kopf."


LOCUSTFILE = """
import json
from locust import HttpUser, constant, task

class Asking(HttpUser):
    wait_time = constant(0)

    @task(3)
    def whole(self):
        body = {{"messages": [{{"role": "user", "content": {prompt!r}}}]}}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as answer:
            if answer.json()["choices"][0]["message"]["content"] != {text!r}:
                answer.failure("wrong answer")

    @task(2)
    def stream(self):
        body = {{"messages": [{{"role": "user", "content": {prompt!r}}}], "stream": True}}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            text = ""
            for line in answer.iter_lines():
                if line.startswith(b"data: {{"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content", "")
            if text != {text!r}:
                answer.failure("wrong answer")

    @task(1)
    def health(self):
        self.client.get("/health")
"""


@pytest.mark.skipif(not LOCUST.exists(), reason="locust is not installed")
def test_under_load(head: Head, tmp_path: Path) -> None:
    text = "The quick brown fox."
    (tmp_path / "locustfile.py").write_text(LOCUSTFILE.format(prompt=say(text), text=text))
    command = [
        str(LOCUST),
        "-f",
        str(tmp_path / "locustfile.py"),
        "--headless",
        "-u",
        "12",
        "-r",
        "12",
        "-t",
        "4s",
        "--host",
        head.url,
        "--json",
        "--loglevel",
        "ERROR",
        "--stop-timeout",
        "10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=tmp_path)
    rows = json.loads(done.stdout)
    assert done.returncode == 0 and sum(row["num_requests"] for row in rows) > 20, done.stderr
    assert sum(row["num_failures"] for row in rows) == 0, rows
    assert not head.supervisor.board.open() and head.supervisor.ledger.total == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(head: Head) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": say("by hand")}], "stream": True})
    done = subprocess.run(
        ["curl", "-sN", f"{head.url}/v1/chat/completions", "-d", body], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.rstrip().endswith("data: [DONE]") and '"content":"b"' in done.stdout
