"""`hydra up`: find out which node this box is and run as it, in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from .. import config, console, nodes
from ..errors import ModelError
from ..model_file import read_model_file
from .translate import gpu_layers, peer_settings

log = logging.getLogger("hydra.up")
PEERS_S = 8.0  # for peers to say what memory they have, where the layers are to be decided


def run(file: str | None, node: str | None, overrides: Mapping[str, Any], *, log_json: bool, debug: bool,
        force: bool = False) -> None:
    """force: load what the plan says cannot fit.

    Raises: HydraError for everything that keeps this node from running.
    """
    if log_json:
        console.log_to_stderr("hydra", debug=debug, as_json=True)  # what is wrong with the file is a record, too
    cfg = config.load(file, overrides=overrides)
    found = nodes.this_node(cfg, node)
    console.log_to_stderr(found.node.name, debug=debug, as_json=log_json)
    me = found.node
    log.info("This box is %s (%s): %s. %s, digest %s.", me.name, me.role, found.how, cfg.path, cfg.digest())
    if me.role == "peer":
        from .peer import serve

        serve(peer_settings(cfg, me))
    else:
        from .head import serve_head

        decided = {**overrides, **_plan(cfg, me.name, force=force)}
        serve_head(config.load(file, overrides=decided), lambda: config.load(file, overrides=decided))


def _plan(cfg: config.Config, here: str, *, force: bool) -> dict[str, Any]:
    """What the plan decides: the layers of each node where hydra.toml leaves them open, else nothing.

    Raises: ModelError, with the table on stderr, when it cannot fit and is not forced.
    """
    from ..doctor import fit
    from . import plan as planning

    deadline = time.monotonic() + PEERS_S
    try:
        if gpu_layers(cfg, read_model_file(cfg.model.path)) >= 0:
            log.info("Not planned: gpu_layers (-ngl) keeps part of the layers in this box's memory; whether that fits "
                     "is found out before the load.")
            return {}
        while True:
            plan = fit.plan_for(cfg, here)
            unknown = [place.name for place in plan.places if not place.memory_bytes]
            if not plan.chosen or not unknown or time.monotonic() >= deadline:
                break
            time.sleep(0.5)  # a peer that starts at the same time says in a moment what it has
    except ModelError as error:  # the loader has the last word on a file
        log.warning("Not planned: %s", error.message)
        return {}
    if not plan.fits:
        console.table(*planning.node_table(plan), stderr=True)
        refusal = planning.refusal(plan)
        if not force:
            raise refusal
        log.warning("%s Loading it all the same, because of --force.", refusal.message)
    if not plan.chosen:
        return {}
    if unknown:
        log.info("Layers: by free memory, once %s is there.", " and ".join(unknown))
        return {}
    log.info("Layers: %s (hydra plan).", ", ".join(f"{count} on {name}" for name, count in plan.counts.items()))
    return {f"nodes.{name}.layers": count for name, count in plan.counts.items()}
