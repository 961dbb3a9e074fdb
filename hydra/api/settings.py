"""What the API is told: keys, limits, origins. Filled from [head] of hydra.toml by hydra/commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiSettings:
    """Defaults are the safe ones: loopback, no foreign origin, a bounded body."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str = ""
    """Empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API; `*` for all. Empty: a request that a browser sends for a page is
    refused."""
    max_request_bytes: int = 8 << 20
    keepalive_s: float = 5.0
    """A stream that has nothing to say sends a comment this often, so that proxies and clients keep it open."""
    node: str = "head"
    model_alias: str = ""
    """Name under which /v1/models lists the model; empty: the file's own."""
