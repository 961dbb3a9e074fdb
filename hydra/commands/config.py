"""`hydra config check` and `hydra config show`: what hydra.toml says, as understood, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config, console, nodes
from ..errors import ConfigError, ModelError
from ..model_file import read_model_file


def show(file: str | None, overrides: Mapping[str, Any], *, origin: bool, as_json: bool) -> None:
    """Every key with its value; with `origin`, where it came from."""
    cfg = config.load(file, overrides=overrides)
    values = cfg.values()
    if as_json:
        traced = {key: {"value": value, "origin": cfg.origins[key]} for key, value in values.items()}
        console.result_json({"file": str(cfg.path), "values": traced if origin else values})
        return
    rows = [[key, _text(value), cfg.origins[key]] if origin else [key, _text(value)] for key, value in values.items()]
    console.table(["KEY", "VALUE", "ORIGIN"] if origin else ["KEY", "VALUE"], rows)


def check(file: str | None, node: str | None, overrides: Mapping[str, Any], *, as_json: bool) -> None:
    """Read the file, say what it means, and compare the split with the model where the model file is on this box.

    Raises: ConfigError for any fault in the file; not knowing which node this box is, is told and is no fault here.
    """
    cfg = config.load(file, overrides=overrides)
    try:
        found = nodes.this_node(cfg, node)
        here, how = found.node.name, found.how
    except ConfigError as error:
        if node:
            raise
        here, how = "", f"{error.message} {error.hint}"
    split: dict[str, int] = {}
    try:
        model = read_model_file(cfg.model.path)
        about = f"{model.name}: {model.architecture}, {model.n_layer} layers" + (
            f" and {model.n_nextn} MTP block" if model.n_nextn else "") + f", {console.bytes_text(model.size_bytes)}"
    except ModelError as error:
        about = f"not checked here: {error.message}"
    else:
        if sum(n.layers == "auto" for n in cfg.nodes) <= 1:
            split = config.check_split(cfg, model.n_layer, model.n_nextn)
    if as_json:
        listed = [{"name": n.name, "role": n.role, "address": n.endpoint if n.role == "peer" else n.host,
                   "layers": n.layers, "device": n.device} for n in cfg.nodes]
        console.result_json({"file": str(cfg.path), "digest": cfg.digest(), "this_node": here or None, "how": how,
                             "model": about, "split": split, "nodes": listed})
        return
    console.table(["NODE", "ROLE", "ADDRESS", "LAYERS", "DEVICE", "GPU"], [
        [n.name + (" *" if n.name == here else ""), n.role, n.endpoint if n.role == "peer" else n.host,
         split.get(n.name, n.layers), n.device, n.gpu or "-"] for n in cfg.nodes])
    console.result("")
    api = f"http://{cfg.head.api_host}:{cfg.head.api_port}/v1"
    rows = [["file", f"{cfg.path} (digest {cfg.digest()})"], ["this box", f"{here}: {how}" if here else how],
            ["model", cfg.model.path], ["", about], ["context", _context(cfg)], ["mtp", _mtp(cfg)],
            ["api", api + (" (key asked)" if cfg.head.api_key else "")],
            ["tls", "on" if cfg.security.tls else "off"], ["link", "on" if cfg.link.enabled else "off"]]
    for name, value in rows:
        console.result(f"{name:<9} {value}".rstrip())


def _context(cfg: config.Config) -> str:
    model = cfg.model
    size = f"{model.ctx_size} tokens" if model.ctx_size else "the model's own size"
    return (f"{size}, K {model.cache_type_k}, V {model.cache_type_v}, flash attention {model.flash_attn}, "
            f"ubatch {model.ubatch_size}, {model.parallel} at a time")


def _mtp(cfg: config.Config) -> str:
    if not cfg.mtp.enabled:
        return "off"
    return f"up to {cfg.mtp.draft_n_max} tokens" + (", adaptive" if cfg.mtp.adaptive else "")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value) or "-"
