"""`hydra pull`: a model file from Hugging Face into the folder of models, whole and checked, however often it breaks.

The path of the (first) file goes to stdout, so that `hydra up -m "$(hydra pull …)"` works; all else to stderr. What is
fetched and how is hydra/hub.py's; this decides where to, shows it, and writes hydra.toml's line where asked.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from .. import config, console, hub
from ..errors import ConfigError, ModelError

FOLDER = "models"  # as in hydra.toml.example
LINE_EVERY_S = 10.0
RATE_WINDOW_S = 5.0
_PATH_LINE = re.compile(r"""^(\s*path\s*=\s*)("(?:[^"\\]|\\.)*"|'[^']*')(?!["'])""")


def run(reference: str, file: str | None, to: str, revision: str, *, force: bool, verify: bool, use: bool,
        as_json: bool) -> None:
    """Fetch it. use: write its path into hydra.toml. Raises: HydraError."""
    wanted = hub.parse(reference, revision)
    cfg = _config(file, needed=use)
    folder = _folder(to, cfg)
    server = hub.Hub()
    with console.Status() as status:
        status.update(f"asking {server.endpoint.partition('://')[2]} for {wanted.repo}")
        listing = server.listing(wanted)
    files = hub.choose(listing, wanted)
    begin = time.monotonic()
    absent = _absent(folder, listing, files, force=force, verify=verify)
    if absent:
        needed = hub.missing_bytes(folder, absent)
        hub.check_space(folder, needed)
        _fetch(server, listing, absent, folder)
    first = folder / files[0].name
    if as_json:
        console.result_json({
            "path": str(first), "repo": listing.repo, "commit": listing.commit,
            "files": [{"name": each.name, "size_bytes": each.size_bytes, "sha256": each.sha256 or None,
                       "fetched": each in absent} for each in files],
            "seconds": round(time.monotonic() - begin, 1)})
    else:
        console.result(str(first))
    if use and cfg is not None:
        use_model(cfg, first)
        console.note(f"{cfg.path} uses it now. A head that runs takes it with `hydra reload`.")
    else:
        console.note(f"In hydra.toml: [model] path = {json.dumps(_as_written(cfg, first))}"
                     f"{' (or run it again with --use)' if cfg is not None else ''}")


def _config(file: str | None, *, needed: bool) -> config.Config | None:
    """hydra.toml where there is one. Raises: ConfigError for one that cannot be used, and where it is needed."""
    try:
        config.find(file)
    except ConfigError:
        if needed or file:
            raise
        return None
    return config.load(file)


def _folder(to: str, cfg: config.Config | None) -> Path:
    """--to, else where hydra.toml has its model, else ./models. Raises: ConfigError where it cannot be made."""
    if to:
        folder = Path(to).expanduser().absolute()
    elif cfg is not None:
        folder = Path(cfg.model.path).parent
    else:
        folder = Path(FOLDER).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be made: {error.strerror}.", "Name another with --to FOLDER.") \
            from error
    return folder


def _absent(folder: Path, listing: hub.Listing, files: list[hub.RemoteFile], *, force: bool,
            verify: bool) -> list[hub.RemoteFile]:
    """The files that are not there yet. Raises: ModelError where one is there that is not as it should be."""
    if force:
        return files
    absent = [each for each in files if not hub.there(folder, each)]
    for each in files:
        if each in absent:
            continue
        if verify:
            with console.Loading(console.note, every_s=LINE_EVERY_S) as loading:
                right = hub.is_right(folder, each, _shown(loading, "checking", each.size_bytes))
            if not right:
                raise ModelError(f"{folder / each.name} is damaged: its checksum is not that of {listing.repo}.",
                                 "Fetch it anew with --force.")
        console.note(f"{each.name} is there already ({console.bytes_text(each.size_bytes)}"
                     f"{', checksum right' if verify else ''}).")
    return absent


def _fetch(server: hub.Hub, listing: hub.Listing, files: list[hub.RemoteFile], folder: Path) -> None:
    total = sum(each.size_bytes for each in files)
    kept = total - hub.missing_bytes(folder, files)
    what = files[0].name if len(files) == 1 else f"{len(files)} files, {files[0].name} and on,"
    console.note(f"Fetching {what} from {listing.repo} ({console.bytes_text(total)}) to {folder}")
    if kept:
        console.note(f"{console.bytes_text(kept)} of it are there and kept.")
    fetched = done = 0
    try:
        with console.Loading(console.note, every_s=LINE_EVERY_S) as loading:
            def again(why: str, pause_s: float) -> None:
                loading.say(f"The connection broke ({why}); going on in {pause_s:.0f} s.")

            for each in files:
                hub.fetch(server, listing, each, folder, on_progress=_shown(loading, "", total, done), on_retry=again)
                fetched, done = fetched + 1, done + each.size_bytes
    except KeyboardInterrupt:
        kept = total - hub.missing_bytes(folder, files[fetched:])
        console.note(f"Kept {console.bytes_text(kept)} of {console.bytes_text(total)}: the same command goes on from "
                     "there.")
        raise
    console.note(f"Fetched; the checksum{'s are' if len(files) > 1 else ' is'} right.")


def _shown(loading: console.Loading, stage: str, total: int, before: int = 0,
           clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """A progress callback: bytes, speed over the last seconds, time left. before: bytes of the files before this."""
    marks: list[tuple[float, int]] = []

    def show(count: int) -> None:
        now = clock()
        if marks and count < marks[-1][1]:
            marks.clear()  # the server began anew
        marks.append((now, count))
        while now - marks[0][0] > RATE_WINDOW_S and len(marks) > 2:
            marks.pop(0)
        seconds, got = now - marks[0][0], count - marks[0][1]
        rate = got / seconds if seconds > 0 else 0.0
        done = before + count
        loading.update(stage, bytes_done=done, bytes_total=total, rate=rate,
                       eta_s=(total - done) / rate if rate and seconds > 1 else None)

    return show


# ---- hydra.toml ----------------------------------------------------------------------------------------------------


def _as_written(cfg: config.Config | None, path: Path) -> str:
    """The path as hydra.toml would have it: from its own place on where it lies below that."""
    if cfg is None:
        return str(path)
    try:
        return str(path.relative_to(cfg.path.absolute().parent))
    except ValueError:
        return str(path)


def use_model(cfg: config.Config, path: Path) -> None:
    """Exchange the value of [model] path in hydra.toml; all else, comments too, stays as it is.

    Raises: ConfigError where that line is not one that can be exchanged; the file is then as it was.
    """
    text = cfg.path.read_text(encoding="utf-8")
    said = re.fullmatch(r".* line (\d+)", config.load(cfg.path, {}).origins["model.path"])
    lines = text.splitlines(keepends=True)
    at = int(said[1]) - 1 if said else -1
    value = json.dumps(_as_written(cfg, path), ensure_ascii=False)
    changed, count = _PATH_LINE.subn(lambda found: found[1] + value, lines[at], count=1)
    by_hand = ConfigError(f"{cfg.path}: the line of [model] path cannot be exchanged.", f"Write path = {value} there.")
    if not said or not count:
        raise by_hand
    lines[at] = changed
    scratch = cfg.path.with_name(f".{cfg.path.name}.{os.getpid()}")
    try:
        scratch.write_text("".join(lines), encoding="utf-8")
        scratch.chmod(cfg.path.stat().st_mode & 0o777)
        if Path(config.load(scratch, {}).model.path) != path:
            raise by_hand
        scratch.replace(cfg.path.resolve())
    except OSError as error:
        raise ConfigError(f"{cfg.path} cannot be written: {error.strerror}.", f"Write path = {value} there.") from error
    finally:
        scratch.unlink(missing_ok=True)
