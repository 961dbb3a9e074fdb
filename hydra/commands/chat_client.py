"""A head's HTTP API as `hydra chat` needs it: is it ready, and one streamed chat completion.

Knows nothing of terminals. Every failure becomes a HydraError at this boundary.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from ..errors import EngineError, HydraError, PeerUnreachable, RequestError

CONNECT_S = 5.0
# Between two pieces of an answer; the API sends a comment every few seconds while it has nothing to say.
SILENCE_S = 120.0


@dataclass
class Piece:
    """Something of an answer. `tokens`: of the answer so far, 0 where the head does not say. `note`: why nothing comes
    just now, as /health says it. `end`: finish_reason, usage and timings."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    note: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)


class ContextFull(RequestError):
    """The conversation has grown larger than the head's context."""


class HeadClient:
    """One head. `close()` or `with`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False,
                                  timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S))

    def health(self, timeout_s: float = CONNECT_S) -> dict[str, Any]:
        """The head's /health, ready or not. Raises: PeerUnreachable."""
        return self._get("/health", timeout_s)[1]

    def status(self) -> dict[str, Any]:
        """All that the head knows of its nodes and requests. Raises: PeerUnreachable, RequestError."""
        code, body = self._get("/hydra/status")
        if code != 200:
            raise _refused(code, json.dumps(body).encode(), self.url)
        return body

    def _get(self, path: str, timeout_s: float = CONNECT_S) -> tuple[int, dict[str, Any]]:
        try:
            reply = self._http.get(path, timeout=timeout_s)
            body = reply.json()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise PeerUnreachable(f"What answers at {self.url} is not a head.", "Name the head with --url.") from error
        if reply.status_code not in (401, 403) and (not isinstance(body, dict) or "model" not in body):
            what = f"the peer {body['name']}" if isinstance(body, dict) and "devices" in body else "something else"
            raise PeerUnreachable(f"What answers at {self.url} is no head but {what}.", "Name the head with --url.")
        return reply.status_code, body

    def chat(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Generator[Piece, None, None]:
        """Stream one answer; closing the iterator cancels it on the head. Raises: HydraError."""
        request = {"messages": messages, **params, "stream": True, "stream_options": {"include_usage": True},
                   "timings_per_token": True}
        end: dict[str, Any] = {}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=request) as reply:
                if reply.status_code != 200:
                    raise _refused(reply.status_code, reply.read(), self.url)
                for line in reply.iter_lines():
                    if line.startswith(": hydra "):
                        yield Piece(note=_note(line[8:]))
                    elif line.startswith("data: ") and line != "data: [DONE]":
                        yield from _pieces(json.loads(line[6:]), end)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise EngineError(f"The head sent an answer that cannot be read: {error}.") from error
        yield Piece(end=end)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> HeadClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _unreachable(self, error: httpx.HTTPError) -> HydraError:
        if isinstance(error, httpx.ConnectError):
            return PeerUnreachable(f"No head answers at {self.url}.",
                                   "Start `hydra up` on the head box, or name another with --url.")
        if isinstance(error, httpx.TimeoutException):
            return PeerUnreachable(f"The head at {self.url} says nothing any more.", "`hydra doctor` looks why.")
        return PeerUnreachable(f"The connection to the head at {self.url} broke: {error or type(error).__name__}.",
                               "Ask again; its log says why.")


def _pieces(event: dict[str, Any], end: dict[str, Any]) -> Iterator[Piece]:
    """The pieces of one event; what belongs to the end is put into `end`."""
    if "error" in event:
        error = event["error"] if isinstance(event["error"], dict) else {"message": str(event["error"])}
        raise _error(error, 400 if error.get("type") == "invalid_request_error" else 500)
    end.update({key: event[key] for key in ("usage", "timings") if event.get(key)})
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason"):
            end["finish_reason"] = choice["finish_reason"]
        if delta.get("reasoning_content"):
            yield Piece(reasoning=delta["reasoning_content"], tokens=_predicted(event))
        if delta.get("content"):
            yield Piece(text=delta["content"])


def _predicted(event: dict[str, Any]) -> int:
    """Tokens of the answer so far. Source: llama-server's `timings_per_token`."""
    timings = event.get("timings")
    return int(timings.get("predicted_n") or 0) if isinstance(timings, dict) else 0


def _note(text: str) -> dict[str, Any]:
    try:
        note = json.loads(text)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _refused(status: int, body: bytes, url: str) -> HydraError:
    try:
        error = dict(json.loads(body)["error"])
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200] or f"HTTP {status}"
        error = {"message": message}
    if status in (401, 403):
        return RequestError(message, "Set HYDRA_API_KEY to the key of [head] api_key in hydra.toml.")
    if status == 404:
        return PeerUnreachable(f"What answers at {url} is not a head: {message}", "Name the head with --url.")
    return _error(error, status)


def _error(error: dict[str, Any], status: int) -> HydraError:
    """OpenAI's error object; its message says what to do, where there is something."""
    message = str(error.get("message") or "The head gave up on this answer.")
    if error.get("code") == "context_length_exceeded":
        return ContextFull(message)
    return EngineError(message) if status >= 500 else RequestError(message)
