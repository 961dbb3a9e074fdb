"""`hydra plan`: will it fit, where, and how fast: before anything is loaded.

What the nodes have is found out by hydra/doctor/fit.py, the arithmetic is hydra/plan's; this draws. `hydra up` asks
first, and refuses with the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config, console, nodes
from ..doctor.fit import plan_for
from ..errors import ConfigError, HydraError
from ..plan import report
from ..plan.memory import GIB


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
    if cfg.model.gpu_layers != "auto" and not cfg.peers:
        console.note("gpu_layers is not looked at here: all of the head's layers are counted on its device.")
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

