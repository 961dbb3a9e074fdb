"""A small head for the tests of `hydra chat`: /health and /v1/chat/completions as a script says."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

READY = {"state": "ready", "model": "m"}
END = {"finish_reason": "stop", "timings": {"prompt_per_second": 504.04, "predicted_per_second": 29.2, "draft_n": 10,
                                             "draft_n_accepted": 7, "n_ctx": 1000, "context_n": 120}}


class Head:
    """Answers as `health` and `script` say; keeps what it was asked."""

    def __init__(self) -> None:
        self.health: list[dict[str, Any]] = [READY]
        self.script: list[str | dict[str, Any]] = []
        self.status = 200
        self.refusal: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
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
                lines = [item if isinstance(item, str) else f"data: {json.dumps(item)}" for item in outer.script]
                self.reply(200, "".join(f"{line}\n\n" for line in [*lines, "data: [DONE]"]))

            def reply(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def says(self, *texts: str, reasoning: str = "") -> None:
        self.script = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        if reasoning:
            self.script.append({"choices": [{"delta": {"reasoning_content": reasoning}}]})
        self.script += [{"choices": [{"delta": {"content": text}}]} for text in texts]
        self.script += [{"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": END["timings"]},
                        {"choices": [], "usage": {"completion_tokens": len(texts)}}]
