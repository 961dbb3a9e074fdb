"""`hydra plan`: will it fit, where, and how fast: before anything is loaded.

Finds out what the nodes have (hydra.toml, else the box itself and its peers), leaves the arithmetic to hydra/plan, and
draws. `hydra up` asks `plan_for` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config, console, nodes
from ..config import Config, NodeConfig
from ..errors import ConfigError, HydraError
from ..plan import cards, report
from ..plan.gguf import read_header
from ..plan.memory import GIB, Place, Setting
from ..plan.shape import Shape, shape_of

ASK_S = 2.0


def run(file: str | None, node: str | None, overrides: Mapping[str, Any], *, offline: bool, acceptance: float,
        as_json: bool) -> int:
    """Returns 0 when it fits (or nothing speaks against it), 1 when it does not. Raises: HydraError."""
    cfg = config.load(file, overrides=overrides)
    try:
        here = nodes.this_node(cfg, node).node.name
    except ConfigError:
        if node:
            raise
        here = ""
    plan = plan_for(cfg, here, offline=offline, acceptance=acceptance)
    if as_json:
        console.result_json(plan.to_dict())
    else:
        for line in header_lines(plan):
            console.result(line)
        console.result("")
        console.table(*node_table(plan))
        console.result("")
        for line in verdict_lines(plan):
            console.result(line)
    return 0 if plan.fits else 1


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
    live = (_local() if node.name == here else {} if node.role == "head" or offline else _peer(node)) or {}
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
    return Place(node.name, node.role == "head", gpu, memory, bandwidth)


def _local() -> dict[str, Any]:
    """This box's first card, or its memory."""
    from ..api.hardware import local_devices

    first = local_devices()[0]
    gpu = first["name"] != "CPU"
    return {"name": first["name"], "gpu": gpu, "total": first["memory_total"],
            "free": first["memory_total"] - first["memory_used"]}


def _peer(node: NodeConfig) -> dict[str, Any]:
    """What a running hydra peer says of its first device; empty where it cannot be asked."""
    from ..doctor.ask import Target, get

    try:
        devices = get(Target(node.name, node.host, node.port), "/health", ASK_S).body.get("devices") or []
        first = devices[0]
        free, total = first["memory"]
    except (HydraError, LookupError, TypeError, ValueError):
        return {}
    return {"name": first.get("description", ""), "gpu": first.get("kind") in ("gpu", "igpu"), "free": int(free),
            "total": int(total)}


# ---- in words ------------------------------------------------------------------------------------------------------


def header_lines(plan: report.Plan) -> list[str]:
    shape, setting = plan.shape, plan.setting
    blocks = f" and {shape.n_nextn} MTP block{'s' if shape.n_nextn > 1 else ''}" if shape.n_nextn else ""
    draft = f", MTP up to {setting.n_max}" if setting.drafts(shape) else ""
    return [f"{shape.name}: {shape.arch}, {shape.n_layer} layers{blocks}, {console.bytes_text(shape.file_bytes)}",
            f"context {setting.context(shape)}, K {setting.type_k}, V {setting.type_v}, ubatch {setting.ubatch_size}, "
            f"{setting.parallel} at a time{draft}", *shape.notes]


def node_table(plan: report.Plan) -> tuple[list[str], list[list[str]]]:
    """GiB of each node by what for."""
    names = ["weights", "kv", "state", "kept", "compute", "draft", "output", "reserve"]
    shown = [name for name in names if any(getattr(node, name) for node in plan.nodes.values())]
    rows = []
    for place in plan.places:
        node = plan.nodes[place.name]
        missing = plan.lacking.get(place.name)
        state = f"{_gib(missing)} too little" if missing else "fits" if place.memory_bytes else "memory not known"
        rows.append([place.name + (" (head)" if place.is_head else ""), str(plan.counts[place.name]),
                     *[_gib(getattr(node, name)) for name in shown], _gib(node.total),
                     _gib(place.memory_bytes) if place.memory_bytes else "?", state])
    return ["NODE", "LAYERS", *[name.upper() for name in shown], "TOTAL", "OF (GiB)", ""], rows


def verdict_lines(plan: report.Plan) -> list[str]:
    lines = []
    if plan.chosen:
        lines.append("split: worked out here, because layers is auto")
    elif plan.fits and plan.best != plan.counts:
        lines.append("split: as given; best would be " + ", ".join(f"{n} on {name}" for name, n in plan.best.items()))
    lines.append(f"limited by: {plan.limit}")
    if plan.context_here >= 0:
        best = f", {plan.context_best} with the best split" if plan.context_best > plan.context_here else ""
        lines.append(f"largest context that fits: {plan.context_here or 'none'}{best}")
    for found in (plan.near, plan.far):
        if found is not None:
            mtp = f"; with MTP {found.mtp_tokens_per_s:.1f} tok/s" if found.mtp_step_s else ""
            parts = ", ".join(f"{name} {node.total_s * 1e3:.1f} ms" for name, node in found.nodes.items())
            lines.append(f"decode at {found.depth} tokens: about {found.tokens_per_s:.1f} tok/s{mtp} ({parts})")
    if plan.near is None:
        lines.append("decode: not predicted, a node's memory bandwidth is not known (`hydra bench device` measures it; "
                     "bandwidth_gbs in hydra.toml)")
    if not plan.fits:
        lines.append("does not fit. " + ("Any one of these would do:" if plan.changes else
                                         "No single change makes it fit: use a smaller quantisation or another node."))
        lines += [f"  {change.words}" for change in plan.changes]
    return lines


def refusal(plan: report.Plan) -> HydraError:
    """The error of `hydra up` for a plan that does not fit."""
    from ..errors import ModelError

    where = ", ".join(f"{_gib(size)} GiB on {name}" for name, size in plan.lacking.items())
    words = f"Try {plan.changes[0].words}; " if plan.changes else ""
    return ModelError(f"{plan.shape.name} does not fit: {where} too little.",
                      f"{words}`hydra plan` shows it all, --force loads it all the same.")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


__all__ = ["place_of", "plan_for", "refusal", "run", "setting_of"]
