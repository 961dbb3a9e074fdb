"""How the head is: /health, /v1/models, /props, /slots, /metrics, and /hydra/status for `hydra ps`.

Reads the supervisor; changes nothing. /props and /slots have llama-server's shape, so that its users' tools go on
working. Source: tools/server/README.md of the pinned llama.cpp.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hydra import __version__, hardware
from hydra.api import metrics
from hydra.api.state import HeadState, head_of

_WORDS = {
    "waiting": "Waiting for a peer",
    "loading": "Loading model",
    "stopping": "Shutting down",
    "stopped": "Stopped",
    "failed": "Failed",
}


async def health(request: Request) -> Response:
    """200 when requests are answered at once; else 503 with what is missing, for people and for load balancers."""
    head = head_of(request)
    status = head.supervisor.status()
    body: dict[str, Any] = {
        "status": "ok" if status["state"] == "ready" else status["state"],
        **{key: status[key] for key in ("state", "reason", "recovering", "node", "stage", "percent", "eta_s")},
        **{key: status[key] for key in ("restarts", "last_failure", "slots", "queued", "uptime_s")},
        "model": head.model_name,
        "version": __version__,
        "peers": [{key: peer.get(key) for key in ("name", "state", "detail", "rtt_ms")} for peer in status["peers"]],
    }
    if status["state"] == "ready":
        return JSONResponse(body)
    message = f"{_WORDS.get(status['state'], status['state'])}: {status['reason']}".rstrip(": ")
    body["error"] = {"code": 503, "message": message, "type": "unavailable_error"}
    eta = status["eta_s"]
    return JSONResponse(body, 503, {"Retry-After": str(max(1, min(60, round(eta)))) if eta else "2"})


async def models(request: Request) -> Response:
    head = head_of(request)
    return JSONResponse({"object": "list", "data": [_model(head)]})


async def model(request: Request) -> Response:
    """One model by name. There is one, and it answers to any name, as in llama-server."""
    return JSONResponse(_model(head_of(request)))


def _model(head: HeadState) -> dict[str, Any]:
    info = head.supervisor.info
    meta = {key: info.get(key) for key in ("architecture", "n_ctx", "n_ctx_train", "n_embd", "n_vocab", "size_bytes")}
    return {
        "id": head.model_name,
        "object": "model",
        "created": head.created,
        "owned_by": "hydra",
        "meta": {**meta, "n_layer": info.get("n_layer"), "layers": info.get("layers"), "name": info.get("model")},
    }


async def props(request: Request) -> Response:
    head = head_of(request)
    info = head.supervisor.info
    template = head.template
    return JSONResponse(
        {
            "default_generation_settings": {"id": 0, "n_ctx": info.get("n_ctx"), "params": {}},
            "total_slots": head.supervisor.board.parallel,
            "model_alias": head.model_name,
            "model_path": head.supervisor.spec.model_path,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.source,
            "chat_template_own": template.own,
            "tool_format": template.marks.tools,
            "bos_token": template.bos,
            "eos_token": template.eos,
            "build_info": f"hydra {__version__}",
            "layers": info.get("layers"),
            "memory": info.get("memory"),
            "mtp": info.get("mtp"),
            "notes": info.get("notes"),
            "is_sleeping": False,
        }
    )


async def slots(request: Request) -> Response:
    head = head_of(request)
    board = head.supervisor.board
    rows: list[dict[str, Any]] = []
    for index, stream in enumerate(board.active.values()):
        rows.append(
            {
                "id": index,
                "id_task": int(stream.id),
                "n_ctx": head.supervisor.info.get("n_ctx"),
                "speculative": bool(head.supervisor.info.get("drafter")),
                "is_processing": True,
                "params": {key: value for key, value in stream.params.items() if key != "json_schema"},
                "n_prompt_tokens": len(stream.prompt),
                "next_token": [{"n_decoded": len(stream.sent), "has_next_token": True}],
            }
        )
    while len(rows) < board.parallel:
        rows.append(
            {"id": len(rows), "id_task": -1, "n_ctx": head.supervisor.info.get("n_ctx"), "is_processing": False}
        )
    if request.query_params.get("fail_on_no_slot") == "1" and len(board.active) >= board.parallel:
        error = {"code": 503, "message": "no slot available", "type": "unavailable_error"}
        return JSONResponse({"error": error}, 503)
    return JSONResponse(rows)


async def prometheus(request: Request) -> Response:
    return Response(metrics.render(head_of(request)), media_type=metrics.CONTENT_TYPE)


async def status(request: Request) -> Response:
    """Everything `hydra ps` shows: nodes, requests, the supervisor's own account."""
    head = head_of(request)
    found = head.supervisor.status()
    return JSONResponse(
        {
            "version": __version__,
            "model": _model(head),
            **{key: value for key, value in found.items() if key != "peers"},
            "totals": metrics.totals(head),
            "nodes": [_head_node(head, found), *(_peer_node(head, peer) for peer in found["peers"])],
            "requests": [_request(stream) for stream in head.supervisor.board.open()],
        }
    )


def _head_node(head: HeadState, found: dict[str, Any]) -> dict[str, Any]:
    info = head.supervisor.info
    name = head.supervisor.spec.head
    devices = hardware.local_devices()
    return {
        "name": name,
        "role": "head",
        "state": found["state"],
        "detail": found["reason"],
        "layers": (info.get("layers") or {}).get(name),
        "devices": devices,
        "device": devices[0]["name"] if devices else None,
        "memory_used": sum(device["memory_used"] for device in devices),
        "memory_total": sum(device["memory_total"] for device in devices),
        "rtt_ms": None,
        "restarts": found["restarts"],
        "uptime_s": found["uptime_s"],
    }


def _peer_node(head: HeadState, peer: dict[str, Any]) -> dict[str, Any]:
    health, layers = peer.get("health") or {}, head.supervisor.info.get("layers") or {}
    devices = health.get("devices") or []
    first = devices[0] if devices else {}
    used, total = _memory(first)
    return {
        "name": peer["name"],
        "role": "peer",
        "endpoint": peer["endpoint"],
        "state": peer["state"],
        "detail": peer.get("detail"),
        "layers": layers.get(peer["name"]),
        "devices": devices,
        "device": (first.get("description") or first.get("name")) if isinstance(first, dict) else str(first),
        "memory_used": used,
        "memory_total": total,
        "rtt_ms": peer.get("rtt_ms"),
        "restarts": health.get("restarts"),
        "uptime_s": health.get("uptime_s"),
        "stock": peer.get("stock", False),
    }


def _memory(device: Any) -> tuple[int | None, int | None]:
    """(used, total) in bytes of a device as a hydra peer's /health has it, now; else as it was when the peer started,
    where `memory` is [free, total]."""
    if isinstance(device, dict) and device.get("memory_total"):
        return int(device.get("memory_used") or 0), int(device["memory_total"])
    memory = device.get("memory") if isinstance(device, dict) else None
    if not isinstance(memory, list) or len(memory) != 2:
        return None, None
    return int(memory[1]) - int(memory[0]), int(memory[1])


def _request(stream: Any) -> dict[str, Any]:
    now = time.monotonic()
    first = stream.first_token_at
    speed = (len(stream.sent) - 1) / (now - first) if first is not None and len(stream.sent) > 1 else None
    return {
        "id": stream.id,
        "state": "waiting" if not stream.active else "decode" if stream.sent else "prefill",
        "pause": stream.pause,
        "prompt_tokens": len(stream.prompt),
        "generated_tokens": len(stream.sent),
        "tokens_per_s": round(speed, 2) if speed else None,
        "age_s": round(now - stream.created, 1),
        "resumed": stream.resumed,
    }
