"""hydra.toml, as read, into what each part is told: the engine's spec, the supervisor's patience, a peer's settings.

The one place that knows both sides, so that hydra/head and hydra/peer know nothing of hydra.toml. Imports neither
llama.cpp nor numpy.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import config
from ..config import Config, NodeConfig
from ..errors import ConfigError
from ..model_file import ModelFile, read_model_file
from ..nodes import resolve

if TYPE_CHECKING:
    from ..head.probe import PeerTarget
    from ..head.spec import EngineSpec
    from ..head.supervisor import SupervisorSettings
    from ..peer.settings import PeerSettings


def engine_spec(cfg: Config, model: ModelFile | None = None, links: Mapping[str, str] | None = None) -> EngineSpec:
    """What the engine is to load, with the split checked against the model file.

    links: addresses of peers that are reached through a link, by node name.
    Raises: ModelError (the file), ConfigError (the split).
    """
    from ..head.spec import DraftSpec, Endpoint, EngineSpec

    model = model or read_model_file(cfg.model.path)
    auto = [node.name for node in cfg.nodes if node.layers == "auto"]
    # Two or more left to `auto`: nothing is given, and the engine splits by free memory.
    if len(auto) == len(cfg.nodes):
        layers = {}
    else:
        layers = config.check_split(cfg, model.n_layer, model.n_nextn)
    head = cfg.head_node
    m = cfg.model
    return EngineSpec(
        model_path=m.path,
        head=head.name,
        endpoints=tuple(Endpoint(node.name, (links or {}).get(node.name, node.endpoint)) for node in cfg.peers),
        layers=layers,
        devices=() if head.device == "auto" else (head.device,),
        n_gpu_layers=gpu_layers(cfg, model),
        ctx_size=m.ctx_size,
        batch_size=m.batch_size,
        ubatch_size=m.ubatch_size,
        cache_type_k=m.cache_type_k,
        cache_type_v=m.cache_type_v,
        flash_attn=m.flash_attn,
        parallel=m.parallel,
        threads=m.threads or head.threads,
        use_extra_bufts=m.use_extra_bufts,
        exact_resume=cfg.head.exact_resume,
        draft=DraftSpec("auto" if cfg.mtp.enabled else "none", cfg.mtp.draft_n_max, cfg.mtp.draft_p_min,
                        cfg.mtp.adaptive, cfg.mtp.lookup, cfg.mtp.draft_model),
    )


def gpu_layers(cfg: Config, model: ModelFile) -> int:
    """How many layers lie on the head's GPU, -1 = all. Where there are peers the nodes' `layers` are the split, and
    nothing else is: ConfigError."""
    asked, most = cfg.model.gpu_layers, model.n_layer + model.n_nextn + 1  # the output counts as a layer
    if asked == "auto" or asked >= most:
        return -1
    if cfg.peers:
        head = cfg.head_node.name
        raise ConfigError(f"gpu_layers (-ngl) is {asked} of {most} ({cfg.origins['model.gpu_layers']}), and there are "
                          "peers: what lies where is then the layers of each node.",
                          f"Leave it out, and give fewer to {head}: --set nodes.{cfg.peers[0].name}.layers=N and "
                          f"--set nodes.{head}.layers=auto.")
    return asked


def supervisor_settings(cfg: Config) -> SupervisorSettings:
    """How patient the head is."""
    from ..head.supervisor import SupervisorSettings

    h = cfg.head
    return SupervisorSettings(queue_max=h.queue_max, queue_wait_s=h.queue_wait_s, grace_s=h.grace_s,
                              peer_wait_s=h.peer_wait_s, step_deadline_s=h.step_deadline_s,
                              silence_s=cfg.link.silence_s, restart_limit=h.restart_limit,
                              restart_window_s=h.restart_window_s)


def peer_targets(cfg: Config, tls: ssl.SSLContext | None = None) -> tuple[PeerTarget, ...]:
    """The peers to be waited for, in the order of the file."""
    from ..head.probe import PeerTarget

    return tuple(PeerTarget(node.name, node.host, node.port, tls) for node in cfg.peers)


def peer_settings(cfg: Config, node: NodeConfig) -> PeerSettings:
    """What the peer process of `node` is told.

    Raises: ConfigError where another node's host name does not resolve: who may connect would be anyone's guess.
    """
    from ..peer.settings import PeerSettings

    p = cfg.peer
    return PeerSettings(
        name=node.name,
        host=node.bind or node.host,
        port=node.port,
        devices=(node.device,),
        threads=node.threads,
        allow=allowed(cfg),
        max_connections=p.max_connections,
        first_byte_s=p.first_byte_s,
        hello_s=p.hello_s,
        message_s=p.message_s,
        max_inflight_bytes=p.max_inflight_bytes,
        cache_dir=p.cache_dir,
        cache_max_bytes=int(p.cache_max_gib * (1 << 30)),
        model_path=p.model_path,
        config_digest=cfg.digest(),
        tls_dir=cfg.security.cert_dir if cfg.security.tls else "",
        tls_nodes=tuple(each.name for each in cfg.nodes) if cfg.security.tls else (),
    )


def allowed(cfg: Config) -> tuple[str, ...]:
    """Addresses that may use a peer besides loopback: those of the nodes, and [peer] allow."""
    found: list[str] = []
    for node in cfg.nodes:
        try:
            addresses = [str(ipaddress.ip_address(node.host))]
        except ValueError:
            addresses = sorted(resolve(node.host))
            if not addresses:
                raise ConfigError(f"The host {node.host!r} of node {node.name} does not resolve on this box "
                                  f"({cfg.origins[f'nodes.{node.name}.host']}).",
                                  "Write its IP address, or mend the name service.") from None
        found += [address for address in addresses if address not in found]
    return (*found, *(address for address in cfg.peer.allow if address not in found))
