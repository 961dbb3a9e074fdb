"""`hydra cache list|clear`: the weights that this box keeps for heads (hydra/peer/weights_store.py)."""

from __future__ import annotations

import time
from pathlib import Path

from .. import config, console
from ..errors import ConfigError, HydraError
from ..peer import weights_store


def directory(file: str | None, cache_dir: str) -> Path:
    """--cache-dir, else [peer] cache_dir. Raises: ConfigError where there is neither."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    cfg = config.load(file)
    if not cfg.peer.cache_dir:
        raise ConfigError(f"{cfg.path} sets no [peer] cache_dir, so no weights are kept.",
                          "Set it, or name a directory with --cache-dir DIR.")
    return Path(cfg.peer.cache_dir)


def show(file: str | None, cache_dir: str, *, as_json: bool) -> None:
    """Longest unused first, as they would go."""
    folder = directory(file, cache_dir)
    entries = weights_store.list_entries(folder)
    stored = sum(entry.stored_bytes for entry in entries)
    if as_json:
        rows = [{"hash": f"{entry.fnv:016x}", "size_bytes": entry.size_bytes, "stored_bytes": entry.stored_bytes,
                 "used": entry.used_ns // 10**9} for entry in entries]
        console.result_json({"directory": str(folder), "entries": rows, "stored_bytes": stored})
        return
    console.table(["HASH", "SIZE", "ON DISK", "LAST USED"], [
        [f"{entry.fnv:016x}", console.bytes_text(entry.size_bytes), console.bytes_text(entry.stored_bytes),
         time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_ns / 1e9))] for entry in entries])
    console.note(f"{len(entries)} tensors in {folder}, {console.bytes_text(stored)} on disk.")


def clear(file: str | None, cache_dir: str, *, as_json: bool) -> None:
    """Remove all of them. Safe while a peer serves: an open file stays readable."""
    folder = directory(file, cache_dir)
    try:
        count, freed = weights_store.clear(folder)
    except OSError as error:
        raise HydraError(f"{folder} cannot be cleared: {error.strerror}.", "Check its permissions.") from error
    if as_json:
        console.result_json({"directory": str(folder), "removed": count, "freed_bytes": freed})
    else:
        console.note(f"Removed {count} tensors from {folder}, {console.bytes_text(freed)} freed.")
