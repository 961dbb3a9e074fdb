"""Who may ask, and how much: key, origin and size of a request, checked before any route sees it.

Plain ASGI, because the routes have to see the end of a connection themselves. /health is open to all: a load balancer
has no key.
"""

from __future__ import annotations

import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hydra.api import faults
from hydra.api.faults import Forbidden, NotFound, TooLarge, Unauthorized
from hydra.api.settings import ApiSettings
from hydra.api.state import SCOPE_KEY, ClientGone, HeadState
from hydra.errors import HydraError, RequestError

log = logging.getLogger("hydra.api")

OPEN_PATHS = ("/health", "/v1/health")


class Guard:
    """The outermost layer: refuses, bounds, and turns what is raised below into answers."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, head: HeadState) -> None:
        self._app = app
        self._settings = settings
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._cors(headers, MutableHeaders(scope=message))
            await send(message)

        async def refuse(response: Response) -> None:
            if not started:
                await response(scope, receive, sending)

        try:
            if self._preflight(scope, headers):
                await Response(status_code=204)(scope, receive, sending)
                return
            self._check(scope, headers)
            # `app` makes the router raise its refusals instead of answering in plain text.
            scope = {**scope, SCOPE_KEY: self._head, "app": self}
            await self._app(scope, _Bounded(receive, self._settings.max_request_bytes), sending)
        except HydraError as error:
            await refuse(faults.response_of(error))
        except HTTPException as error:
            await refuse(_http_error(scope, error))
        except (ClientGone, ClientDisconnect):
            pass  # nobody is there to be told
        except Exception:
            log.exception("A request failed; this is a bug of hydra (%s %s).", scope["method"], scope["path"])
            await refuse(faults.response_of(HydraError("The request failed inside hydra.", "Its log has the details.")))

    def _check(self, scope: Scope, headers: Headers) -> None:
        settings = self._settings
        origin = headers.get("origin")
        if origin is not None and not self._allowed(origin):
            # Browsers send it for every page that calls another address; no other program does.
            raise Forbidden(
                f"Pages of {origin} may not use this API.", "Add the origin to head.cors_origins to let them."
            )
        if settings.api_key and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            # Headers come as latin-1; a key with other letters was sent as UTF-8.
            if not hmac.compare_digest(given.encode("latin-1"), settings.api_key.encode()):
                raise Unauthorized("The API key is missing or wrong.", "Send it as Authorization: Bearer KEY.")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > settings.max_request_bytes:
            raise TooLarge(
                f"The request has {length} bytes; the limit is {settings.max_request_bytes}.",
                "Send less, or raise head.max_request_bytes.",
            )

    def _allowed(self, origin: str) -> bool:
        return "*" in self._settings.cors_origins or origin in self._settings.cors_origins

    def _preflight(self, scope: Scope, headers: Headers) -> bool:
        origin = headers.get("origin")
        return (
            scope["method"] == "OPTIONS"
            and origin is not None
            and self._allowed(origin)
            and "access-control-request-method" in headers
        )

    def _cors(self, request: Headers, response: MutableHeaders) -> None:
        origin = request.get("origin")
        if origin is None or not self._allowed(origin):
            return
        response["Access-Control-Allow-Origin"] = origin
        response["Vary"] = "Origin"
        if "access-control-request-method" in request:
            response["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            response["Access-Control-Allow-Headers"] = request.get("access-control-request-headers", "*")
            response["Access-Control-Max-Age"] = "600"


def _http_error(scope: Scope, error: HTTPException) -> Response:
    """The router's own refusals (no such path, wrong method) in OpenAI's shape."""
    if error.status_code == 404:
        return faults.response_of(NotFound(f"There is no {scope['path']}.", "docs/api.md has the paths."))
    response = faults.response_of(RequestError(f"{scope['method']} {scope['path']}: {error.detail}."))
    response.status_code = error.status_code
    return response


class _Bounded:
    """`receive`, up to a number of body bytes: Content-Length may be absent, or a lie."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise TooLarge(
                    f"The request has more than {self._limit} bytes.", "Send less, or raise head.max_request_bytes."
                )
        return message
