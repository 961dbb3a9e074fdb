"""What a link is told: one frozen table, passed to its process as JSON. Knows nothing of hydra.toml."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LinkSettings:
    """One link, from this head to one peer.

    name, host, port: the peer. node: this box's own name (its certificate), tls_dir: where that lies, empty = no TLS.
    deltas: False = plain ggml-RPC is passed through, as to a stock peer (TLS without the rest). activations: "f32" or
    "f16". silence_s: a peer that says nothing for so long is gone. deadline_s: longest that one message may be worked
    on, 0 = no limit. port_here: where the engine connects on loopback, 0 = any free one.
    """

    name: str
    host: str
    port: int
    node: str = ""
    tls_dir: str = ""
    deltas: bool = True
    activations: str = "f32"
    silence_s: float = 15.0
    deadline_s: float = 0.0
    connect_s: float = 5.0
    port_here: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LinkSettings:
        return cls(**json.loads(text))
