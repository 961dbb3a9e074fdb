"""A stand-in for huggingface.co on loopback: the API that `hydra pull` asks, and files by range from a second address.

`faults` are used up in order, one for each request of file bytes: ("cut", n) closes after n bytes, ("reset", n) resets,
("status", code), ("whole",) ignores the range, ("other",) answers another range, ("bad",) sends a wrong byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """repos: files by path, by repository. gated: repositories that ask for `token`."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token = "hf_right"
        self.faults: list[tuple[Any, ...]] = []
        self.ranges: list[str | None] = []
        self.cdn_tokens: list[str | None] = []
        self.in_git: set[str] = set()
        self.pause_after = 0  # bytes of a file, after which nothing comes for some seconds
        self.resume = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.resume.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answer(self, request: Any) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        if path == "/api/models":
            asked = parse_qs(parts.query)
            self.say(request, 200, [{"id": name} for name in self.repos
                                    if asked.get("search", [""])[0].lower() in name.lower()
                                    and asked.get("author", [name.split("/")[0]])[0] == name.split("/")[0]])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.describe(request, found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            assert found[2] == COMMIT, "all files of one pull are of one commit"
            if found[1] in self.gated and request.headers["Authorization"] != f"Bearer {self.token}":
                self.say(request, 401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
                return
            # As the real one: a signed address on another host.
            self.say(request, 302, {}, {"Location": f"http://localhost:{self.server.server_port}/cdn/{found[1]}/"
                                                    f"{found[3]}"})
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self.cdn_tokens.append(request.headers["Authorization"])
            self.send(request, self.repos[found[1]][found[2]])
        else:
            self.say(request, 404, {"error": "not found"})

    def describe(self, request: Any, repo: str, revision: str | None) -> None:
        if repo not in self.repos:
            self.say(request, 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in (None, "main", COMMIT):
            self.say(request, 404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[dict[str, Any]] = []
        for path, data in self.repos[repo].items():
            git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git}
            if path not in self.in_git:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        self.say(request, 200, {"id": repo, "sha": COMMIT, "siblings": siblings,
                                "gated": "auto" if repo in self.gated else False})

    def say(self, request: Any, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        request.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    def send(self, request: Any, data: bytes) -> None:
        asked = request.headers["Range"]
        self.ranges.append(asked)
        kind, *rest = self.faults.pop(0) if self.faults else ("",)
        if kind == "status":
            self.say(request, rest[0], {"error": "later"})
            return
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked and kind != "whole" else 0
        if kind == "other":
            begin += 1
        body = data[begin:]
        if kind == "bad":
            body = bytes([body[0] ^ 1]) + body[1:]
        request.send_response(206 if begin else 200)
        if begin:
            request.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if kind in ("cut", "reset"):
            body = body[:rest[0]]
            request.close_connection = True
        if self.pause_after:
            request.wfile.write(body[:self.pause_after])
            request.wfile.flush()
            self.resume.wait(30.0)
            return
        request.wfile.write(body)
        if kind == "reset":
            request.wfile.flush()
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
