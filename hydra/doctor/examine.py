"""The order of an examination: this box first, then each peer of hydra.toml (or those named on the command line).

Knows which checks there are and what each needs; holds none. A check that fails by a fault of its own becomes a
finding and does not keep the others from running.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hydra import config, nodes
from hydra.config import Config, NodeConfig
from hydra.doctor import fit, gpu, inside, link, network, own, peers, system
from hydra.doctor.ask import Target
from hydra.doctor.finding import Finding, fail, ok, skip, warn
from hydra.errors import ConfigError, HydraError, ModelError
from hydra.model_file import ModelFile, read_model_file
from hydra.plan.gguf import read_header
from hydra.plan.shape import shape_of


@dataclass
class Patient:
    """What is examined: this box's node of hydra.toml, where it has one, and the peers."""

    cfg: Config | None = None
    node: NodeConfig | None = None
    model: ModelFile | None = None
    targets: tuple[Target, ...] = ()

    @property
    def digest(self) -> str:
        return self.cfg.digest() if self.cfg else ""


def examine(file: str | None, node: str | None, addresses: Iterable[str] = (),
            doing: Callable[[str], object] = lambda _what: None) -> Iterator[Finding]:
    """Every finding, as it is made. doing: told what comes next.

    addresses: peers as host:port instead of those of hydra.toml.
    Raises: ConfigError for a node or an address on the command line that cannot be meant.
    """
    patient = Patient()
    doing("hydra.toml")
    yield from _guard("config", "hydra.toml", lambda: _configuration(patient, file, node, bool(addresses)))
    if addresses:
        patient.targets = tuple(_target(address) for address in addresses)
    doing("llama.cpp and the devices of this box")
    loaded: list[Finding] = []
    for finding in _guard("library", "llama.cpp", lambda: inside.run(_question(patient))):
        loaded.append(finding)
        yield finding
    doing("the cards")
    yield from _guard("gpu", "cards", lambda: gpu.check(gpu.seen_by_ggml(loaded), wants_gpu=_wants_gpu(patient)))
    doing("this box")
    yield from _guard("system", "this box", lambda: system.check(*_cache(patient)))
    yield from _guard("sockets", "accepted sockets of this box", lambda: [own.accepted_socket()])
    if patient.node is not None and patient.node.role == "peer":
        me = patient.node
        yield from _guard("sockets", f"port {me.port}", lambda: own.port(me))
    elif patient.node is not None and patient.cfg is not None:
        api = patient.cfg.head.api_port
        yield from _guard("sockets", f"port {api} (API)", lambda: own.api_port(api))
    told: dict[str, list[str]] = {}
    for target in patient.targets:
        doing(f"peer {target.name} ({target.endpoint})")
        yield from _guard("peer", f"peer {target.name}", lambda: _peer(patient, target, told))  # noqa: B023 (used at once)
    cfg = patient.cfg
    if cfg is not None and not addresses:
        hosts = {node.name: node.host for node in cfg.nodes}
        yield from _guard("network", "names", lambda: network.names(hosts, told))


def _guard(group: str, check: str, run: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from run()
    except HydraError as exc:
        yield fail(group, check, exc.message, exc.hint)
    except Exception as exc:
        yield fail(group, check, f"this check itself failed: {type(exc).__name__}: {exc}",
                   "This is a bug of hydra: please report it with `hydra doctor --json --debug`.")


def _configuration(patient: Patient, file: str | None, name: str | None, optional: bool) -> Iterator[Finding]:
    """hydra.toml, the node of this box, and the model file where it is here."""
    try:
        cfg = config.load(file)
    except ConfigError as exc:
        if optional and file is None:
            yield skip("config", "hydra.toml", "not needed: the peers are named on the command line")
        else:
            yield fail("config", "hydra.toml", exc.message, exc.hint)
        return
    patient.cfg = cfg
    yield ok("config", "hydra.toml", f"{cfg.path}: {len(cfg.nodes)} nodes, digest {cfg.digest()}", digest=cfg.digest())
    try:
        found = nodes.this_node(cfg, name)
    except ConfigError as exc:
        if name:
            raise
        yield warn("config", "this box", exc.message, exc.hint)
    else:
        patient.node = found.node
        yield ok("config", "this box", f"{found.node.name} ({found.node.role}): {found.how}", node=found.node.name)
    tls = _tls(cfg, patient.node)
    patient.targets = tuple(Target(n.name, n.host, n.port, tls) for n in cfg.peers
                            if patient.node is None or patient.node.role == "head" or n.name == patient.node.name)
    if patient.node is None or patient.node.role == "head":
        yield from _model(patient, cfg)


def _model(patient: Patient, cfg: Config) -> Iterator[Finding]:
    try:
        model = patient.model = read_model_file(cfg.model.path)
    except ModelError as exc:
        here = patient.node is not None
        yield (fail if here else skip)("config", "model", exc.message, *([exc.hint] if here else []))
        return
    try:
        if sum(node.layers == "auto" for node in cfg.nodes) <= 1:
            split = config.check_split(cfg, model.n_layer, model.n_nextn)
            words = ", ".join(f"{count} on {name}" for name, count in split.items())
        else:
            words = "split by `hydra plan`"
        yield ok("config", "model", f"{model.name}: {model.architecture}, {model.n_layer} layers "
                 f"({words}), {model.n_nextn} MTP block{'' if model.n_nextn == 1 else 's'}")
    except ConfigError as exc:
        yield fail("config", "model", exc.message, exc.hint)
        return
    if patient.node is not None:
        yield from fit.check(cfg, patient.node.name)


def _tls(cfg: Config, node: NodeConfig | None) -> ssl.SSLContext | None:
    if not cfg.security.tls or node is None:
        return None
    from pathlib import Path

    from hydra import security

    return security.client_context(security.load_identity(Path(cfg.security.cert_dir), node.name))


def _target(address: str) -> Target:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"command line: --peer {address} is not HOST:PORT.", "Write it like 192.168.1.11:50052.")
    return Target(address, host.strip("[]"), int(port))


def _question(patient: Patient) -> inside.Question:
    cfg, node = patient.cfg, patient.node
    if cfg is None:
        return inside.Question()
    head_dims: tuple[int, ...] = (128,)
    if patient.model is not None:
        shape = shape_of(read_header(cfg.model.path))
        head_dims = tuple(sorted({shape.head_k, *((shape.head_k_swa,) if shape.windowed else ())}))
    return inside.Question(
        device=node.device if node else "auto", gpu=node.gpu if node else "",
        memory_gib=node.memory_gib if node else 0.0, type_k=cfg.model.cache_type_k, type_v=cfg.model.cache_type_v,
        flash_attn=cfg.model.flash_attn, head_dims=head_dims)


def _wants_gpu(patient: Patient) -> bool:
    node = patient.node
    return node is not None and bool(node.gpu or node.device.upper().startswith("CUDA"))


def _cache(patient: Patient) -> tuple[str, int]:
    """Where this box keeps received weights, and how many it will receive; empty where it is no peer."""
    cfg, node = patient.cfg, patient.node
    if cfg is None or node is None or node.role != "peer" or not cfg.peer.cache_dir or cfg.peer.model_path:
        return "", 0
    try:
        model = read_model_file(cfg.model.path)  # rarely on this box
        share = node.layers / max(1, model.n_layer) if isinstance(node.layers, int) else 1.0
        return cfg.peer.cache_dir, int(model.size_bytes * share)
    except ModelError:
        return cfg.peer.cache_dir, int(node.memory_gib * 2**30)


def _peer(patient: Patient, target: Target, told: dict[str, list[str]]) -> Iterator[Finding]:
    """One peer: there or not, its way, its protocol, link and kernels, and last its sockets after some use."""
    name = f"peer {target.name}"
    own_peer = patient.node is not None and patient.node.role == "peer" and patient.node.name == target.name
    speed_mbit = mtu = 0
    device = network.interface_to(target.host)
    if device and device != "lo":
        found = network.interface(device)
        speed_mbit, mtu = found.speed_mbit, found.mtu
        yield network.judge_interface(f"{name}: interface", found)
    seen = peers.look(target, own=own_peer, digest=patient.digest)
    if seen.health.get("allow"):
        told[target.name] = [str(address) for address in seen.health["allow"]]
    try:
        yield from seen.findings
        if seen.client is not None:
            client = seen.client
            if mtu:
                yield network.path_mtu(f"{name}: MTU", client.socket, mtu)
            yield from _guard("link", name, lambda: link.check(client, name, seen.connect_s, speed_mbit))
        yield from _guard("sockets", name, lambda: peers.sockets(seen))
    finally:
        seen.close()
