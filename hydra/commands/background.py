"""`hydra up --detach`, `hydra down`, `hydra reload` and `hydra logs`: a node that runs without a terminal.

A small file says which process runs as which node; it is only believed when that process is a `hydra up` still. Knows
nothing of what the node does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import config, console, nodes
from ..errors import ConfigError, HydraError
from .child import hydra_command
from .ports import who_listens

START_S = 60.0
STOP_MARGIN_S = 15.0
POLL_S = 0.1


def state_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where this user's logs and pid files are ($XDG_STATE_HOME or ~/.local/state)."""
    env = os.environ if env is None else env
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "hydra"


def log_file(node: str) -> Path:
    return state_dir() / f"{node}.log"


def detach(file: str | None, node: str | None, overrides: Mapping[str, Any], *, log_json: bool, debug: bool,
           force: bool = False) -> None:
    """Start `hydra up` in the background and return when it serves (a peer) or waits and loads (a head).

    Raises: HydraError with its own words when it ends at once; where it runs already.
    """
    cfg = config.load(file, overrides=overrides)
    me = nodes.this_node(cfg, node).node
    running = process_of(cfg, me)
    if running:
        raise HydraError(f"{me.name} runs already (process {running}).", "`hydra down` stops it.")
    arguments = ["--config", str(cfg.path.absolute()), "--node", me.name]
    for key, value in overrides.items():
        if value is not None:
            arguments += ["--set", f"{key}={value}"]
    arguments += ["--log-format", "json"] if log_json else []
    arguments += ["--debug"] if debug else []
    arguments += ["--force"] if force else []
    log = log_file(me.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(hydra_command("up", *arguments), stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=out, start_new_session=True)
    port = me.port if me.role == "peer" else cfg.head.api_port
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
            said = _last_error(lines)
            ended = HydraError(f"{me.name} ended at once: {said.get('error') or ' '.join(lines[-1:]) or 'no word'}",
                               f"{said.get('hint', '')} Its log: {log}.".strip())
            ended.exit_code = process.returncode if process.returncode > 0 else HydraError.exit_code
            raise ended
        # A peer listens before its device is found to be usable, and says so once it is; a head listens and waits.
        if who_listens(port).pid and (me.role == "head" or b"Serving " in log.read_bytes()[begin:]):
            break
        time.sleep(POLL_S)
    _pid_file(me.name).write_text(json.dumps({"pid": process.pid, "config": str(cfg.path.absolute())}))
    console.note(f"{me.name} runs in the background (process {process.pid}). `hydra logs -f` shows it, "
                 "`hydra down` stops it.")


def _last_error(lines: list[str]) -> dict[str, str]:
    """error and hint of a log's last error, whichever form the log has."""
    said: dict[str, str] = {}
    for line in lines:
        if line.startswith(("error: ", "hint: ")):
            mark, _, text = line.partition(": ")
            said[mark] = text.strip()
        elif line.startswith('{"level": "error"'):
            record = json.loads(line)
            said = {"error": str(record["message"]), "hint": str(record.get("hint", ""))}
    return said


def down(file: str | None, node: str | None) -> None:
    """Stop this box's node in order, as Ctrl-C would. Raises: HydraError where none runs or it does not end."""
    cfg, me, pid = _running(file, node)
    os.kill(pid, signal.SIGTERM)
    limit_s = cfg.head.grace_s + STOP_MARGIN_S
    deadline = time.monotonic() + limit_s
    while _is_ours(pid):
        if time.monotonic() > deadline:
            raise HydraError(f"{me.name} (process {pid}) has not ended within {limit_s:.0f} s.",
                             f"`kill -9 {pid}` ends it at once.")
        time.sleep(POLL_S)
    _pid_file(me.name).unlink(missing_ok=True)
    console.note(f"{me.name} has stopped.")


def reload(file: str | None, node: str | None) -> None:
    """Have the running head read hydra.toml again. Raises: ConfigError on a peer box or for a faulty file."""
    cfg, me, pid = _running(file, node)
    if me.role != "head":
        raise ConfigError(f"{me.name} is a peer: there is nothing to reload without a new start.",
                          "Use `hydra down` and `hydra up`.")
    os.kill(pid, signal.SIGHUP)
    console.note(f"{me.name} (process {pid}) reads {cfg.path} again; its log says how that goes.")


def logs(file: str | None, node: str | None, lines: int, follow: bool) -> None:
    """The last lines of the background log, and with `follow` what comes after them until Ctrl-C."""
    me = nodes.this_node(config.load(file), node).node
    path = log_file(me.name)
    if not path.exists():
        raise HydraError(f"There is no log of {me.name} ({path}).", "It is written by `hydra up --detach`.")
    for line in tail(path, lines, follow):
        console.result(line)


def tail(path: Path, lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` lines of a file, then, with follow, new ones as they come."""
    with path.open(encoding="utf-8", errors="replace") as file:
        kept = file.readlines()
        yield from (line.rstrip("\n") for line in kept[-lines:])
        rest = ""
        while follow:
            rest += file.readline()
            if rest.endswith("\n"):
                yield rest.rstrip("\n")
                rest = ""
            else:
                time.sleep(POLL_S)


def process_of(cfg: config.Config, node: config.NodeConfig) -> int:
    """The process that runs as this node: from the file that --detach left, else whoever has its port; 0 = none."""
    try:
        pid = int(json.loads(_pid_file(node.name).read_text())["pid"])
        if _is_ours(pid):
            return pid
    except (OSError, ValueError, KeyError, TypeError):
        pass
    pid = who_listens(node.port if node.role == "peer" else cfg.head.api_port).pid
    return pid if pid and _is_ours(pid) else 0


def _running(file: str | None, node: str | None) -> tuple[config.Config, config.NodeConfig, int]:
    cfg = config.load(file)
    me = nodes.this_node(cfg, node).node
    pid = process_of(cfg, me)
    if not pid:
        raise HydraError(f"{me.name} does not run on this box.", "Start it with `hydra up`.")
    return cfg, me, pid


def _pid_file(node: str) -> Path:
    return state_dir() / f"{node}.pid"


def _is_ours(pid: int) -> bool:
    """A live `hydra up`: a process number may have been given to another program since."""
    import psutil

    try:
        process = psutil.Process(pid)
        words: list[Any] = process.cmdline()
        return process.status() != psutil.STATUS_ZOMBIE and "up" in words and any("hydra" in word for word in words)
    except psutil.Error:
        return False
