"""`hydra certs init`: the private CA and one certificate for each node of hydra.toml (hydra/security.py)."""

from __future__ import annotations

from pathlib import Path

from .. import config, console, security


def init(file: str | None, days: int, renew: bool, *, as_json: bool) -> None:
    """Write what is missing in [security] cert_dir and say which files go to which box."""
    cfg = config.load(file)
    folder = Path(cfg.security.cert_dir)
    written = security.init_certs(folder, [node.name for node in cfg.nodes], days, renew)
    if as_json:
        console.result_json({"directory": str(folder), "written": [str(path) for path in written]})
        return
    for path in written:
        console.result(str(path))
    if not written:
        console.note(f"Every node has its certificate in {folder} already; --renew makes new ones.")
    for node in cfg.nodes:
        console.note(f"{node.name} ({node.host}) needs ca.pem, {node.name}.pem and {node.name}.key in its cert_dir.")
    console.note("Keep ca.key on this box alone: whoever has it can make certificates.")
    if not cfg.security.tls:
        console.note(f"TLS is off: write tls = true under [security] in {cfg.path} on every box to use them.")
