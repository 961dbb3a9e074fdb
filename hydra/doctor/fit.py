"""What hydra.toml and the boxes themselves say of memory and cards, as hydra/plan wants it; and whether it all fits.

Knows where figures come from: hydra.toml first, then this box, then what a running peer says of itself. The arithmetic
is hydra/plan's. Used by `hydra plan`, `hydra up` and the doctor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hydra import config
from hydra.config import Config, NodeConfig
from hydra.doctor.ask import NoAnswer, Target, get
from hydra.doctor.finding import Finding, fail, ok, skip
from hydra.errors import ModelError
from hydra.plan import cards, report
from hydra.plan.gguf import read_header
from hydra.plan.memory import GIB, Place, Setting
from hydra.plan.shape import Shape, shape_of
from hydra.plan.speed import OP_S

ASK_S = 2.0


def plan_for(cfg: Config, here: str, *, offline: bool = False, acceptance: float = 0.7) -> report.Plan:
    """The plan of a configuration. here: the node that this box is, empty = none. offline: ask no peer.

    Raises: ModelError (the file), ConfigError (the split).
    """
    shape = shape_of(read_header(cfg.model.path))
    places = [place_of(node, here, offline) for node in (*cfg.peers, cfg.head_node)]
    return report.make(shape, setting_of(cfg), places, counts_of(cfg, shape), acceptance=acceptance)


def setting_of(cfg: Config) -> Setting:
    """What of hydra.toml costs memory."""
    m = cfg.model
    # auto = where the device can, and every device that hydra is meant for can.
    return Setting(m.ctx_size, m.batch_size, m.ubatch_size, m.cache_type_k, m.cache_type_v, m.flash_attn != "off",
                   m.parallel, cfg.mtp.enabled, cfg.mtp.draft_n_max)


def counts_of(cfg: Config, shape: Shape) -> dict[str, int] | None:
    """The split that hydra.toml gives; None where it leaves it to `auto` on every node, or on two or more."""
    if sum(node.layers == "auto" for node in cfg.nodes) > 1 or all(node.layers == "auto" for node in cfg.nodes):
        return None
    split = config.check_split(cfg, shape.n_layer, shape.n_nextn)
    return {node.name: split[node.name] for node in (*cfg.peers, cfg.head_node)}


def place_of(node: NodeConfig, here: str, offline: bool) -> Place:
    """A node as planning sees it: from hydra.toml first, then from what the box or the peer itself says."""
    live = (_local(node) if node.name == here else {} if node.role == "head" or offline else _peer(node)) or {}
    name = node.gpu or str(live.get("name", ""))
    card = cards.find(name)
    device = node.device.upper()
    gpu = device not in ("AUTO", "CPU") or (device == "AUTO" and bool(node.gpu or live.get("gpu")))
    memory = int(node.memory_gib * GIB)
    if live.get("total") and bool(live.get("gpu")) == gpu:
        memory = min(memory, live["total"]) if memory else live["free"]
    elif not memory and gpu and card:
        memory = int(card[0] * GIB)
    bandwidth = node.bandwidth_gbs * 1e9 or (card[1] * 1e9 * cards.EFFICIENCY if card and gpu else 0.0)
    return Place(node.name, node.role == "head", gpu, memory, bandwidth, OP_S[gpu])


def _local(node: NodeConfig) -> dict[str, Any]:
    """This box's card, or its memory. A head whose device is auto uses all its cards, a peer the first."""
    import psutil

    from hydra.doctor.gpu import visible_cards

    cards_here = [] if node.device.upper() == "CPU" else visible_cards()
    if match := re.fullmatch(r"CUDA(\d+)", node.device.upper()):
        cards_here = cards_here[int(match[1]):int(match[1]) + 1]
    elif node.role == "peer":
        cards_here = cards_here[:1]
    if cards_here:
        return {"name": cards_here[0][0], "gpu": True, "free": sum(card[1] for card in cards_here),
                "total": sum(card[2] for card in cards_here)}
    ram = psutil.virtual_memory()
    return {"name": "CPU", "gpu": False, "free": int(ram.available), "total": int(ram.total)}


def _peer(node: NodeConfig) -> dict[str, Any]:
    """What a running hydra peer says of its first device; empty where it cannot be asked."""
    try:
        devices = get(Target(node.name, node.host, node.port), "/health", ASK_S).body.get("devices") or []
        first = devices[0]
        free, total = first["memory"]
    except (NoAnswer, LookupError, TypeError, ValueError):
        return {}
    return {"name": first.get("description", ""), "gpu": first.get("kind") in ("gpu", "igpu"), "free": int(free),
            "total": int(total)}


def check(cfg: Config, here: str) -> Iterator[Finding]:
    """Does it fit? One finding for each node that is short of memory, or one that all is well."""
    if cfg.model.gpu_layers != "auto" and not cfg.peers:
        yield skip("config", "memory fit", "gpu_layers keeps part of the layers in this box's memory: `hydra up` finds "
                   "out whether that fits, before it loads")
        return
    try:
        plan = plan_for(cfg, here)
    except ModelError as exc:
        yield skip("config", "memory fit", exc.message)
        return
    words = ", ".join(f"{place.name} {plan.nodes[place.name].total / GIB:.2f} of {_gib(place.memory_bytes)} GiB"
                      for place in plan.places)
    if plan.fits:
        yield ok("config", "memory fit", words, fits=True)
        return
    change = f"Try {plan.changes[0].words}; " if plan.changes else ""
    for name, size in plan.lacking.items():
        yield fail("config", f"memory fit: {name}", f"{size / GIB:.2f} GiB too little ({words})",
                   f"{change}`hydra plan` shows it all.", lacking=size)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "?"
