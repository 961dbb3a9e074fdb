"""Every key of hydra.toml: its table, type, default, limits and meaning, as frozen dataclasses.

Knows nothing of files, environment or errors: hydra/config.py reads and checks. docs/config.md and the comments of
hydra.toml.example are tested against this file. A key is added here only together with the code that reads it.
Rules from: the flags of llama.cpp's llama-server where it has the same setting (names and meanings are kept).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")
PEER_PORT = 50052

Kind = Literal["int", "float", "bool", "str", "path", "list", "layers", "switch"]


@dataclass(frozen=True)
class Key:
    """What a value may be. `local` marks values that rightly differ from box to box (not part of the digest)."""

    kind: Kind
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    local: bool = False
    secret: bool = False


def _key(default: Any, kind: Kind, doc: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"key": Key(kind, doc, **limits)})


def keys_of(table: type) -> dict[str, Key]:
    """The keys of one table, in order of declaration."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(table)}


@dataclass(frozen=True)
class ModelConfig:
    """[model]"""

    path: str = _key("", "path", "The GGUF file on the head box (of a split model, the first part).",
                     required=True, local=True)
    ctx_size: int = _key(4096, "int", "Context in tokens, all slots together (-c). 0 = the model's own.", low=0)
    batch_size: int = _key(2048, "int", "Most tokens of one logical batch (-b).", low=1)
    ubatch_size: int = _key(512, "int", "Most tokens computed at once (-ub).", low=1)
    cache_type_k: str = _key("f16", "str", "Type of the K cache (-ctk).", choices=CACHE_TYPES)
    cache_type_v: str = _key("f16", "str", "Type of the V cache (-ctv); a quantised one needs flash_attn.",
                             choices=CACHE_TYPES)
    flash_attn: str = _key("auto", "switch", "Flash attention (-fa): on, off or auto.", choices=("on", "off", "auto"))
    parallel: int = _key(1, "int", "Requests served at the same time (-np); they share ctx_size.", low=1, high=64)
    gpu_layers: int | Literal["auto"] = _key("auto", "layers", "Without peers: how many layers lie on the head's GPU "
                                             "(-ngl), the output as one; the rest in its own memory. auto = all.",
                                             low=0)
    threads: int = _key(0, "int", "CPU threads of the head (-t). 0 = as many as there are physical cores.", low=0)
    use_extra_bufts: bool = _key(True, "bool", "Let the CPU repack weights: faster, rounds differently from a peer.")


@dataclass(frozen=True)
class MtpConfig:
    """[mtp]"""

    enabled: bool = _key(True, "bool", "Draft with the model's own multi-token-prediction block, where it has one.")
    draft_n_max: int = _key(3, "int", "Most tokens drafted ahead (--spec-draft-n-max).", low=1, high=16)
    draft_p_min: float = _key(0.0, "float", "Stop drafting below this probability (--spec-draft-p-min).", low=0, high=1)
    adaptive: bool = _key(True, "bool", "Choose the draft length from measured costs and acceptance, down to none.")
    lookup: bool = _key(False, "bool", "Where the model has no MTP block, draft what followed the same words before.")
    draft_model: str = _key("", "path", "A small GGUF with the same vocabulary: draft with it, on the head, instead.")


@dataclass(frozen=True)
class HeadConfig:
    """[head]"""

    api_host: str = _key("127.0.0.1", "str", "Address of the API. 0.0.0.0 opens it to the network: set api_key then.")
    api_port: int = _key(8080, "int", "Port of the API.", low=1, high=65535)
    api_key: str = _key("", "str", "Clients must send this as their bearer token. Empty = none asked.", secret=True)
    cors_origins: tuple[str, ...] = _key((), "list", "Web origins that may call the API from a browser.")
    max_request_bytes: int = _key(8 << 20, "int", "A larger request body is refused with 413.", low=1024)
    queue_max: int = _key(64, "int", "Requests that may wait for a slot; one more gets 503 with Retry-After.", low=0)
    queue_wait_s: float = _key(600.0, "float", "Longest wait of a request before its first token.", low=1)
    grace_s: float = _key(10.0, "float", "After Ctrl-C, time for open answers to finish.", low=0)
    peer_wait_s: float = _key(300.0, "float", "How long `hydra up` waits for its peers. 0 = for ever.", low=0)
    step_deadline_s: float = _key(120.0, "float", "One step of the engine longer than this counts as stalled.", low=1)
    restart_limit: int = _key(5, "int", "Engine restarts for one same reason within restart_window_s before giving up.",
                              low=1)
    restart_window_s: float = _key(600.0, "float", "See restart_limit.", low=1)
    exact_resume: bool = _key(True, "bool", "After a restart, retake an answer's known tokens one by one, so that it "
                              "goes on byte for byte. false reads them in one batch: faster, but near ties may differ.")


@dataclass(frozen=True)
class PeerConfig:
    """[peer]"""

    max_connections: int = _key(4, "int", "Head connections at a time; one more is refused at once.", low=1, high=64)
    allow: tuple[str, ...] = _key((), "list", "IP addresses that may connect besides the nodes and loopback.")
    cache_dir: str = _key("", "path", "Where received weights are kept for the next load. Empty = nowhere.", local=True)
    cache_max_gib: float = _key(64.0, "float", "Size limit of cache_dir; the longest unused go first.", low=0.001)
    model_path: str = _key("", "path", "The same GGUF on the peer box, if it has one: its weights then never cross.",
                           local=True)
    first_byte_s: float = _key(5.0, "float", "A connection that sends nothing is closed after this.", low=0.05)
    hello_s: float = _key(5.0, "float", "A connection must have said HELLO by then.", low=0.05)
    message_s: float = _key(30.0, "float", "A started message must make progress within this.", low=0.05)
    max_inflight_bytes: int = _key(256 << 20, "int", "Received and not yet on the device, all connections together.",
                                   low=1 << 20)


@dataclass(frozen=True)
class SecurityConfig:
    """[security]"""

    tls: bool = _key(False, "bool", "Mutual TLS 1.3 between the boxes (`hydra certs init` makes the certificates).")
    cert_dir: str = _key("~/.config/hydra/certs", "path", "Where ca.pem, NODE.pem and NODE.key lie.", local=True)


@dataclass(frozen=True)
class LinkConfig:
    """[link]"""

    enabled: bool = _key(False, "bool", "Send only what changed, in one piece, between two hydra boxes.")
    activations: str = _key("f32", "str", "Activations on the wire: f32 is exact, f16 is half the bytes.",
                            choices=("f32", "f16"))
    silence_s: float = _key(15.0, "float", "A peer silent for this long counts as gone.", low=0.5)


@dataclass(frozen=True)
class NodeConfig:
    """[[nodes]]"""

    name: str = _key("", "str", "Name of the box, used everywhere.", required=True)
    role: str = _key("", "str", "head loads the model and serves the API, peer lends its device.",
                     choices=("head", "peer"), required=True)
    host: str = _key("", "str", "Address or host name by which the other box reaches it.", required=True)
    port: int = _key(PEER_PORT, "int", "Port of a peer (compute and health alike).", low=1, high=65535)
    bind: str = _key("", "str", "Address a peer listens on. Empty = its host; 0.0.0.0 = all, only if written.")
    layers: int | Literal["auto"] = _key("auto", "layers", "Layers of the model on this node, or auto.", low=0)
    device: str = _key("auto", "str", "ggml device, such as CUDA0 or CPU. auto = the first GPU, else the CPU.")
    threads: int = _key(0, "int", "CPU threads where the device is the CPU. 0 = physical cores.", low=0)
    gpu: str = _key("", "str", "What the card is, for `hydra doctor` to compare (part of its name is enough).")
    memory_gib: float = _key(0.0, "float", "Device memory that may be used. 0 = what the device reports.", low=0)
    bandwidth_gbs: float = _key(0.0, "float", "Memory bandwidth in GB/s for `hydra plan`. 0 = from its table.", low=0)

    @property
    def endpoint(self) -> str:
        """`host:port`, as a client names this peer."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


TABLES: dict[str, type] = {
    "model": ModelConfig,
    "mtp": MtpConfig,
    "head": HeadConfig,
    "peer": PeerConfig,
    "security": SecurityConfig,
    "link": LinkConfig,
}
