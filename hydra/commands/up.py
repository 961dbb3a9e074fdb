"""`hydra up`: find out which node this box is and run as it, in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .. import config, console, nodes
from .translate import peer_settings

log = logging.getLogger("hydra.up")


def run(file: str | None, node: str | None, overrides: Mapping[str, Any], *, log_json: bool, debug: bool) -> None:
    """Raises: HydraError for everything that keeps this node from running."""
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

        serve_head(cfg, lambda: config.load(file, overrides=overrides))
