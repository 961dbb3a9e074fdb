"""What a peer process is told: one frozen table, passed from the command line to listener and worker as JSON.

Knows nothing of hydra.toml (hydra.config fills it in) and reads no environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hydra.rpc import wire


@dataclass(frozen=True)
class PeerSettings:
    """Settings of one peer.

    host, port: where to listen (port 0: any free one). devices: ggml names, or ("auto",). threads: of a CPU device, 0
    = one per physical core. allow: addresses that may connect beside loopback; empty = loopback only. *_s: seconds.
    tls_dir: certificates, empty = no TLS; tls_nodes: names that may connect then, empty = all of the CA.
    """

    name: str = "peer"
    host: str = "127.0.0.1"
    port: int = wire.DEFAULT_PORT
    devices: tuple[str, ...] = ("auto",)
    threads: int = 0
    allow: tuple[str, ...] = ()
    max_connections: int = 4
    first_byte_s: float = 5.0
    hello_s: float = 5.0
    message_s: float = 30.0
    min_rate_bytes_s: int = 1 << 20
    max_inflight_bytes: int = 256 << 20
    cache_dir: str = ""
    cache_max_bytes: int = 64 << 30
    model_path: str = ""
    timings: bool = False
    config_digest: str = ""
    tls_dir: str = ""
    tls_nodes: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PeerSettings:
        fields = json.loads(text)
        for name in ("devices", "allow", "tls_nodes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
