"""The API as one ASGI application: which path is answered by what.

Holds no logic of its own. `create_app` is all that the rest of hydra needs; serve.py runs it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hydra.api import chat, completions, status
from hydra.api.guard import Guard
from hydra.api.settings import ApiSettings
from hydra.api.state import HeadState
from hydra.head.supervisor import Supervisor


class _Endpoint:
    """A coroutine that answers with any ASGI application: an event stream is no Starlette response."""

    def __init__(self, handler: object) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = await self._handler(Request(scope, receive, send))  # type: ignore[operator]
        await answer(scope, receive, send)


def create_app(supervisor: Supervisor, settings: ApiSettings | None = None) -> ASGIApp:
    """The whole API over one supervisor, which is started and stopped by the caller."""
    settings = settings or ApiSettings()

    def post(path: str, handler: object) -> list[Route]:
        # llama-server answers with and without /v1.
        short = path.removeprefix("/v1")
        return [Route(each, _Endpoint(handler), methods=["POST"]) for each in dict.fromkeys((path, short))]

    routes = [
        *post("/v1/chat/completions", chat.chat_completions),
        *post("/v1/completions", completions.completions),
        *post("/v1/embeddings", completions.embeddings),
        *post("/tokenize", completions.tokenize),
        *post("/detokenize", completions.detokenize),
        Route("/v1/models", status.models),
        Route("/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/v1/health", status.health),
        Route("/metrics", status.prometheus),
        Route("/props", status.props),
        Route("/slots", status.slots),
        Route("/hydra/status", status.status),
    ]
    # A bare router: Starlette's own error middleware would answer 500 before the guard sees what was raised.
    return Guard(Router(routes), settings, HeadState(supervisor, settings))
