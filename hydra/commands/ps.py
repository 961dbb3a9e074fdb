"""`hydra ps`: a row per node and a line per running request, as the head's API tells them; once, or again and again.

On another box than the head's, where the API is for the head's own box alone, the peers are asked themselves. A table
where it fits, a few lines a node where it does not. Knows nothing of how the screen is drawn (hydra/console.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import config, console, nodes
from ..errors import ConfigError, HydraError, PeerUnreachable
from .chat import head_address
from .chat_client import HeadClient

COLUMNS = ["NAME", "ROLE", "STATE", "DEVICE", "LAYERS", "MEMORY", "GPU", "RTT", "RESTARTS", "UP"]
EVERY_S = 2.0
ASK_S = 3.0
WELL = ("ready", "up", "ok")
Status = dict[str, Any]


def run(file: str | None, url: str, watch: bool, every_s: float | None, *, as_json: bool) -> None:
    """Once; or, to watch, again every `every_s` seconds until q or Ctrl-C. Raises: HydraError."""
    if every_s is not None and not watch:
        raise ConfigError("command line: SECONDS is given without --watch.", "Write hydra ps --watch SECONDS.")
    with _source(file, url) as ask:
        status = ask()
        if not watch:
            _tell(status, as_json=as_json)
        elif as_json or not console.out().is_terminal:
            while True:
                _tell(status, as_json=as_json)
                time.sleep(every_s or EVERY_S)
                status = ask()
        else:
            _watch(ask, status, every_s or EVERY_S)


def _tell(status: Status, *, as_json: bool) -> None:
    if as_json:
        console.result_json(status)
    else:
        console.print_lines(view(status, console.width()))


def _watch(ask: Callable[[], Status], status: Status, every_s: float) -> None:
    """On a screen of its own, until q or Ctrl-C. A head that goes away meanwhile is told and waited for."""
    fault = ""
    try:
        with console.Screen() as screen:
            while not screen.left:
                screen.show(_page(status, fault, f"{time.strftime('%H:%M:%S')}, every {every_s:g} s; q leaves"))
                screen.wait(every_s)
                if not screen.left:
                    try:
                        status, fault = ask(), ""
                    except HydraError as error:
                        fault = error.message
    except KeyboardInterrupt:
        return  # the usual way to leave, and no failure


def _page(status: Status, fault: str, foot: str) -> Callable[[int], list[console.Line]]:
    def lines(columns: int) -> list[console.Line]:
        told = [(fault, "bold red"), ("", "")] if fault else []
        return [*told, *view(status, columns), ("", ""), (foot, "dim")]

    return lines


# ---- whom to ask ---------------------------------------------------------------------------------------------------


@contextmanager
def _source(file: str | None, url: str) -> Iterator[Callable[[], Status]]:
    """What gives the newest state: the head, or where its API cannot be reached from this box, the peers."""
    address, key = head_address(file, url)
    cfg = None if url else _elsewhere(file, address)
    if cfg is not None:
        console.note(f"The API of {cfg.head_node.name} is for its own box ([head] api_host = {cfg.head.api_host}): "
                     "asking the peers.")
        yield lambda: peers_alone(cfg)
        return
    with HeadClient(address, key) as head:
        yield head.status


def _elsewhere(file: str | None, address: str) -> config.Config | None:
    """hydra.toml, where it says that this box is not the head's and that the API is on the head's loopback."""
    if not nodes.is_loopback(address.partition("://")[2].rpartition(":")[0].strip("[]")):
        return None
    try:
        cfg = config.load(file)
        me = nodes.this_node(cfg).node
    except ConfigError:
        return None  # the API of this box, then, which says so where it is not there
    return cfg if me.role == "peer" else None


def peers_alone(cfg: config.Config) -> Status:
    """As far as the peers know it, in the form of the head's own answer. Raises: PeerUnreachable where none answers."""
    from ..doctor.ask import NoAnswer, get
    from .links import probe_context
    from .translate import peer_targets

    rows: list[dict[str, Any]] = []
    answered = 0
    for node, target in zip(cfg.peers, peer_targets(cfg, probe_context(cfg)), strict=True):
        row: dict[str, Any] = {"name": node.name, "role": "peer", "devices": [],
                               "layers": None if node.layers == "auto" else node.layers}
        try:
            answer = get(target, "/health", ASK_S)
        except NoAnswer as error:
            rows.append({**row, "state": error.trouble, "detail": error.message})
            continue
        answered += 1
        devices = answer.body.get("devices") or []
        first = devices[0] if devices else {}
        heads = answer.body.get("connections")
        rows.append({**row, "state": answer.body.get("state", "stock"), "devices": devices, "heads": heads,
                     "device": first.get("description") or first.get("name"),
                     **{key: first.get(key) for key in ("memory_used", "memory_total")},
                     **{key: answer.body.get(key) for key in ("restarts", "uptime_s")},
                     "rtt_ms": round(answer.took_s * 1e3, 2)})
    if not answered:
        raise PeerUnreachable(f"No peer answers, and the API of {cfg.head_node.name} is for its own box.",
                              "`hydra doctor` looks why; with [head] api_host = \"0.0.0.0\" and an api_key the head "
                              "can be asked from here.")
    head = {"name": cfg.head_node.name, "role": "head", "state": "not asked", "devices": []}
    return {"state": "unknown", "nodes": [head, *rows], "requests": []}


# ---- in words ------------------------------------------------------------------------------------------------------


def view(status: Status, columns: int | None) -> list[console.Line]:
    """Everything, as lines with a style each. columns: of the terminal, None = as wide as it gets."""
    found = status.get("nodes") or ()
    table = console.text_table(COLUMNS, [row(node) for node in found])
    if columns is None or max(map(len, table)) <= columns:
        styles = ["bold", *(_style(node) for node in found)]
        lines = list(zip(table, styles, strict=True))
    else:
        lines = [line for node in found for line in block(node, columns)]
    if status.get("reason"):
        lines.append((f"{status.get('state')}: {status['reason']}", "yellow"))
    return [*lines, *((line(request), "") for request in status.get("requests") or ())]


def _style(node: dict[str, Any]) -> str:
    state = node.get("state")
    return "" if state in WELL or state == "not asked" else "red" if state in ("failed", "degraded") else "yellow"


def row(node: dict[str, Any]) -> list[str]:
    """One node's cells; `-` for what is not known."""
    device = (node.get("devices") or [{}])[0]
    rtt, up = node.get("rtt_ms"), node.get("uptime_s")
    return [str(node.get("name")), str(node.get("role")), str(node.get("state")), _device(node),
            _or_dash(node.get("layers")), _memory_text(node, device) or "-", _use(device) or "-",
            f"{rtt:.1f} ms" if rtt is not None else "-", _or_dash(node.get("restarts")),
            up_text(up) if up is not None else "-"]


def block(node: dict[str, Any], columns: int) -> list[console.Line]:
    """The same in a few lines, where a row is too wide; what is not known is left out."""
    device = (node.get("devices") or [{}])[0]
    rtt, up, layers, restarts = (node.get(key) for key in ("rtt_ms", "uptime_s", "layers", "restarts"))
    parts = [_device(node) if node.get("device") else "", f"{layers} layers" if layers is not None else "",
             _memory_text(node, device), _use(device), f"rtt {rtt:.1f} ms" if rtt is not None else "",
             f"{restarts} restarts" if restarts is not None else "", f"up {up_text(up)}" if up is not None else ""]
    lines: list[console.Line] = [(f"{node.get('name')}  {node.get('role')}  {node.get('state')}",
                                  f"bold {_style(node)}".strip())]
    now = ""
    for part in filter(None, parts):
        longer = f"{now}  {part}"
        if now and len(longer) > columns:
            lines.append((now, ""))
            longer = f"  {part}"
        now = longer
    return [*lines, (now, "")] if now else lines


def _device(node: dict[str, Any]) -> str:
    name = str(node.get("device") or "-").removeprefix("NVIDIA ").removeprefix("GeForce ")
    more = len(node.get("devices") or ()) - 1
    return f"{name} +{more}" if more > 0 else name


def _memory_text(node: dict[str, Any], device: dict[str, Any]) -> str:
    used, total = memory(node, device)
    return f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB" if total else ""


def _use(device: dict[str, Any]) -> str:
    use = [f"{device['utilisation']} %"] if device.get("utilisation") is not None else []
    if device.get("temperature") is not None:
        use.append(f"{device['temperature']} °C")
    return " ".join(use)


def memory(node: dict[str, Any], device: dict[str, Any]) -> tuple[int, int]:
    """Used and total bytes; a peer tells [free, total] of its device."""
    if node.get("memory_total"):
        return int(node.get("memory_used") or 0), int(node["memory_total"])
    if isinstance(device.get("memory"), list):
        free, total = device["memory"]
        return int(total) - int(free), int(total)
    return 0, 0


def up_text(seconds: float) -> str:
    """75 → 1:15, 3700 → 1:01:40, 200000 → 2 d 7 h."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return console.seconds_text(whole)
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def line(request: dict[str, Any]) -> str:
    """`request 7: decode, 120 tokens of prompt, 45 generated, 29.2 tok/s, 3.1 s`."""
    parts = [f"request {request.get('id')}: {request.get('state')}", f"{request.get('prompt_tokens')} tokens of prompt",
             f"{request.get('generated_tokens')} generated"]
    if request.get("tokens_per_s"):
        parts.append(f"{request['tokens_per_s']:.1f} tok/s")
    parts.append(f"{request.get('age_s')} s")
    if request.get("resumed"):
        parts.append(f"continued {request['resumed']} times")
    return ", ".join(parts) + (f" ({request['pause']})" if request.get("pause") else "")


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
