"""`hydra ps`: a row per node and a line per running request, as the head's API tells them."""

from __future__ import annotations

import time
from typing import Any

from .. import console
from .chat import head_address
from .chat_client import HeadClient

COLUMNS = ["NAME", "ROLE", "STATE", "DEVICE", "LAYERS", "MEMORY", "GPU", "RTT", "RESTARTS", "UP"]


def run(file: str | None, url: str, watch: float, *, as_json: bool) -> None:
    """Once, or again every `watch` seconds until Ctrl-C. Raises: PeerUnreachable."""
    with HeadClient(*head_address(file, url)) as head:
        while True:
            status = head.status()
            if as_json:
                console.result_json(status)
            else:
                if watch:
                    console.clear_screen()
                console.table(COLUMNS, [row(node) for node in status.get("nodes") or ()])
                if status.get("reason"):
                    console.result(f"{status.get('state')}: {status['reason']}")
                for request in status.get("requests") or ():
                    console.result(line(request))
            if not watch:
                return
            time.sleep(watch)


def row(node: dict[str, Any]) -> list[str]:
    """One node's cells; `-` for what is not known."""
    device = (node.get("devices") or [{}])[0]
    used, total = memory(node, device)
    use = [f"{device['utilisation']} %"] if device.get("utilisation") is not None else []
    if device.get("temperature") is not None:
        use.append(f"{device['temperature']} °C")
    rtt, up = node.get("rtt_ms"), node.get("uptime_s")
    return [str(node.get("name")), str(node.get("role")), str(node.get("state")), str(node.get("device") or "-"),
            _or_dash(node.get("layers")), f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB" if total else "-",
            " ".join(use) or "-", f"{rtt:.1f} ms" if rtt is not None else "-", _or_dash(node.get("restarts")),
            console.seconds_text(up) if up is not None else "-"]


def memory(node: dict[str, Any], device: dict[str, Any]) -> tuple[int, int]:
    """Used and total bytes; a peer tells [free, total] of its device."""
    if node.get("memory_total"):
        return int(node.get("memory_used") or 0), int(node["memory_total"])
    if isinstance(device.get("memory"), list):
        free, total = device["memory"]
        return int(total) - int(free), int(total)
    return 0, 0


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
