"""A small head for the tests of `hydra chat`: /health and /v1/chat/completions as a script says."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

READY = {"state": "ready", "model": "m"}
END = {"finish_reason": "stop", "timings": {"prompt_per_second": 504.04, "predicted_per_second": 29.2, "draft_n": 10,
                                             "draft_n_accepted": 7, "n_ctx": 1000, "context_n": 120}}


GATE_S = 30.0  # a stream does not wait longer for a test that has failed


class Head:
    """Answers as `health` and `script` say; keeps what it was asked.

    script: events (a dict), lines of the stream (a text), and gates (a threading.Event) at which the stream waits until
    the test has seen what it wants to see.
    """

    def __init__(self) -> None:
        self.health: list[dict[str, Any]] = [READY]
        self.script: list[str | dict[str, Any] | threading.Event] = []
        self.status = 200
        self.refusal: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.health.pop(0) if len(outer.health) > 1 else outer.health[0]
                ready = self.path == "/hydra/status" or body.get("state") == "ready"
                self.reply(200 if ready else 503, json.dumps(body))

            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.keys.append(self.headers["Authorization"])
                if outer.status != 200:
                    self.reply(outer.status, json.dumps(outer.refusal))
                    return
                self.send_response(200)
                self.end_headers()
                try:
                    for item in [*outer.script, "data: [DONE]"]:
                        if isinstance(item, threading.Event):
                            item.wait(GATE_S)
                            continue
                        line = item if isinstance(item, str) else f"data: {json.dumps(item)}"
                        self.wfile.write(f"{line}\n\n".encode())
                        self.wfile.flush()
                except OSError:
                    outer.hung_up.set()

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def says(self, *texts: str, reasoning: str = "") -> None:
        self.script = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        if reasoning:
            self.script.append(thought(reasoning))
        self.script += [said(text) for text in texts]
        self.script += ending(len(texts))


def said(text: str) -> dict[str, Any]:
    """An event with a piece of an answer."""
    return {"choices": [{"delta": {"content": text}}]}


def thought(text: str, total_tokens: int = 0) -> dict[str, Any]:
    """An event with a piece of reasoning, and how many tokens there were so far."""
    counted = {"timings": {"predicted_n": total_tokens}} if total_tokens else {}
    return {"choices": [{"delta": {"reasoning_content": text}}], **counted}


def ending(tokens: int = 1, reason: str = "stop") -> list[dict[str, Any]]:
    """The events at an answer's end."""
    return [{"choices": [{"delta": {}, "finish_reason": reason}], "timings": END["timings"]},
            {"choices": [], "usage": {"completion_tokens": tokens}}]
