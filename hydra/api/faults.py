"""Errors in OpenAI's shape, with the status that its clients act on.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

The one place where a HydraError becomes an HTTP answer. Source: OpenAI's error codes; llama-server's types for 503.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from hydra.errors import EngineError, HydraError, PeerError, RequestError
from hydra.head.streams import Overloaded, Unavailable, WaitedTooLong


class Unauthorized(RequestError):
    pass


class Forbidden(RequestError):
    pass


class TooLarge(RequestError):
    pass


class NotFound(RequestError):
    pass


class NotSupported(RequestError):
    """The loaded model cannot do what was asked."""


# Most specific first: (error, status, type, code).
_TABLE: tuple[tuple[type[HydraError], int, str, str | None], ...] = (
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (Forbidden, 403, "invalid_request_error", "forbidden"),
    (NotFound, 404, "invalid_request_error", "not_found"),
    (TooLarge, 413, "invalid_request_error", "request_too_large"),
    (NotSupported, 501, "not_supported_error", "not_supported"),
    (WaitedTooLong, 503, "unavailable_error", "waited_too_long"),
    (Unavailable, 503, "unavailable_error", "unavailable"),
    (Overloaded, 503, "unavailable_error", "overloaded"),
    (RequestError, 400, "invalid_request_error", None),
    (PeerError, 503, "unavailable_error", "peer"),
    (EngineError, 503, "unavailable_error", "engine"),
    (HydraError, 500, "server_error", None),
)


def status_of(error: HydraError) -> int:
    return next(status for cls, status, _, _ in _TABLE if isinstance(error, cls))


def body_of(error: HydraError) -> dict[str, Any]:
    """The JSON object for an error, also as an event of a stream that had begun."""
    kind, code = next((kind, code) for cls, _, kind, code in _TABLE if isinstance(error, cls))
    if code is None and isinstance(error, RequestError) and "context" in error.message.lower():
        code = "context_length_exceeded"
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}}


def response_of(error: HydraError) -> JSONResponse:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), status_of(error), headers)
