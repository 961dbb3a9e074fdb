"""An engine child without a model: speaks the frames of docs/architecture.md, computes a fixed function of the tokens.

`python tests/fake_engine.py --fd N`. Its next token depends on all tokens before it and, when sampled, on the seed, so
that an answer that was continued in the wrong place shows. A prompt may hold directives: `[[say64:BASE64]]` (these
bytes, then the end), `[[delay:MS]]` (a pause before each token), `[[poison]]` (the engine dies of it). Environment:
FAKE_ENGINE_DIR, a folder for the count of lives; FAKE_ENGINE_FAULTS, a JSON list of {"life": n, "after": tokens, "do":
what} with what one of abort, exit, stall, pause, silent, garbage, failed, load_failed, load_hang.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra.head.channel import Channel
from hydra.head.streaming import TextStream

EOS = 257
VOCAB = 300
LETTERS = b"abcdefghijklmnopqrstuvwxyz      ,.\xc3\xa9"
CHATML = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> reply with"
    " <tool_call>{json}</tool_call><|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def say(text: str) -> str:
    """A directive for a prompt: the model will say exactly this."""
    return f"[[say64:{base64.b64encode(text.encode()).decode()}]]"


def script_of(prompt: list[int], params: dict[str, Any]) -> tuple[bytes | None, float]:
    text = bytes(t for t in prompt if t < 256).decode("utf-8", "replace")
    said = re.findall(r"\[\[say64:([A-Za-z0-9+/=]*)\]\]", text)
    delay = re.findall(r"\[\[delay:([0-9.]+)\]\]", text)
    script = base64.b64decode(said[-1]) if said else None
    if params.get("json_schema") is not None and script is None:
        script = json.dumps(example(params["json_schema"])).encode()
    return script, float(delay[-1]) / 1e3 if delay else 0.0


def example(schema: dict[str, Any]) -> Any:
    """The least instance of a JSON schema (as far as the tests need)."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    if "oneOf" in schema:
        return example(schema["oneOf"][0])
    kind = schema.get("type", "object")
    if kind == "object":
        return {key: example(value) for key, value in schema.get("properties", {}).items()}
    return {"string": "text", "integer": 7, "number": 1.5, "boolean": True, "null": None, "array": []}[kind]


class Slot:
    def __init__(self, frame: dict[str, Any]) -> None:
        self.id = frame["id"]
        self.params = frame["params"]
        self.prompt = frame["prompt"]
        self.made: list[int] = list(frame["resume"])
        self.script, self.delay = script_of(self.prompt, self.params)
        self.text = TextStream(tuple(self.params.get("stop") or ()))
        for token in self.made:
            self.text.push(bytes([token]))
        self.poison = b"[[poison]]" in bytes(t for t in self.prompt if t < 256)
        self.next_at = time.monotonic() + self.delay

    def step(self) -> int:
        if self.script is not None:
            at = len(self.made)
            return self.script[at] if at < len(self.script) else EOS
        seed = self.params.get("seed") if (self.params.get("temperature") or 0) > 0 else None
        history = json.dumps([self.prompt, self.made, seed]).encode()
        number = zlib.crc32(history)
        if self.made and self.made[-1] == 0xC3:
            return 0xA9  # the second half of é: an answer may be cut in the middle of a character
        return LETTERS[number % (len(LETTERS) - 1)]


class FakeEngine:
    def __init__(self, fd: int) -> None:
        self.channel = Channel(socket.socket(fileno=fd))
        self.slots: dict[int, Slot] = {}
        self.queue: list[Slot] = []
        self.steps = 0
        self.tokens = 0
        self.parallel = 1
        self.frozen = threading.Event()
        self.life = self._count_life()
        self.faults = [
            f for f in json.loads(os.environ.get("FAKE_ENGINE_FAULTS", "[]")) if f.get("life", 1) == self.life
        ]
        self.inbox: list[dict[str, Any]] = []
        self.lock = threading.Condition()

    def _count_life(self) -> int:
        folder = os.environ.get("FAKE_ENGINE_DIR")
        if not folder:
            return 1
        path = Path(folder) / "lives"
        life = int(path.read_text() or 0) + 1 if path.exists() else 1
        path.write_text(str(life))
        (Path(folder) / f"pid-{life}").write_text(str(os.getpid()))
        return life

    def heartbeat(self) -> None:
        while not self.frozen.is_set():
            self.channel.send({"type": "heartbeat", "step": self.steps, "busy": bool(self.slots), "slots": []})
            time.sleep(0.1)

    def read(self) -> None:
        while True:
            try:
                frame = self.channel.receive()
            except OSError:
                frame = None
            if frame is None:
                os._exit(0)
            with self.lock:
                self.inbox.append(frame)
                self.lock.notify()

    def fault(self, where: str) -> None:
        for fault in list(self.faults):
            what = fault["do"]
            if where == "load" and what in ("load_failed", "load_hang"):
                if what == "load_hang":
                    time.sleep(3600)
                self.channel.send(
                    {
                        "type": "failed",
                        "error": {
                            "kind": fault.get("kind", "EngineError"),
                            "message": fault.get("message", "it does not fit"),
                            "hint": "try less",
                        },
                    }
                )
                time.sleep(0.05)
                os._exit(8)
            if where == "step" and not what.startswith("load") and self.tokens >= fault.get("after", 0):
                self.faults.remove(fault)
                if what == "abort":
                    print("Remote RPC server crashed or returned malformed response", file=sys.stderr, flush=True)
                    os.abort()
                elif what == "exit":
                    print("ggml_cuda_error: out of memory", file=sys.stderr, flush=True)
                    os._exit(3)
                elif what == "stall":
                    time.sleep(3600)
                elif what == "pause":
                    time.sleep(1.5)
                elif what == "silent":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif what == "garbage":
                    self.channel._sock.sendall(b"\xff\xff\xff\xff no frame")
                    time.sleep(3600)
                elif what == "failed":
                    self.channel.send(
                        {"type": "failed", "error": {"kind": "DeviceError", "message": "CUDA error 700", "hint": ""}}
                    )
                    time.sleep(3600)

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        threading.Thread(target=self.heartbeat, daemon=True).start()
        while True:
            with self.lock:
                if not self.inbox and not self.slots:
                    self.lock.wait(1.0)
                frames, self.inbox = self.inbox, []
            for frame in frames:
                self.handle(frame)
            while self.queue and len(self.slots) < self.parallel:
                slot = self.queue.pop(0)
                self.slots[slot.id] = slot
            if self.slots:
                self.steps += 1
                self.fault("step")
                for slot in list(self.slots.values()):
                    self.advance(slot)
                time.sleep(0.001)

    def handle(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if kind == "load":
            spec = frame["spec"]
            self.fault("load")
            if "missing" in spec["model_path"]:
                self.channel.send(
                    {
                        "type": "failed",
                        "error": {
                            "kind": "ModelError",
                            "message": f"{spec['model_path']} does not exist.",
                            "hint": "Check model.path.",
                        },
                    }
                )
                time.sleep(0.05)
                os._exit(7)
            self.parallel = spec["parallel"]
            for done in (0, 5, 10):
                self.channel.send(
                    {
                        "type": "progress",
                        "stage": "weights",
                        "node": "mini",
                        "layers_done": done,
                        "layers_total": 10,
                        "bytes_done": done * 100,
                        "bytes_total": 1000,
                        "eta_s": 1.0,
                    }
                )
                time.sleep(float(os.environ.get("FAKE_ENGINE_LOAD_S", "0")) / 3)
            template = os.environ.get("FAKE_ENGINE_TEMPLATE")
            self.channel.send(
                {
                    "type": "ready",
                    "info": {
                        "model": Path(spec["model_path"]).name,
                        "n_layer": 10,
                        "n_ctx": spec["ctx_size"],
                        "n_vocab": VOCAB,
                        "n_embd": 8,
                        "bos": 256,
                        "eos": EOS,
                        "bos_text": "",
                        "eos_text": "<|im_end|>",
                        "add_bos": False,
                        "chat_template": Path(template).read_text() if template else CHATML,
                        "layers": {"mini": 4, "head": 6},
                        "mtp": {"enabled": False},
                        "memory": {},
                    },
                }
            )
        elif kind == "generate":
            self.queue.append(Slot(frame))
        elif kind == "cancel":
            slot = self.slots.pop(frame["id"], None) or next((s for s in self.queue if s.id == frame["id"]), None)
            if slot in self.queue:
                self.queue.remove(slot)
            if slot is not None:
                self.done(slot, "cancelled")
        elif kind == "tokenize":
            self.result(frame, list(frame["text"].encode()))
        elif kind == "detokenize":
            self.result(frame, bytes(t for t in frame["tokens"] if t < 256).decode("utf-8", "replace"))
        elif kind == "embed":
            tokens = frame["tokens"]
            if b"[[poison]]" in bytes(t for t in tokens if t < 256):
                os.abort()
            self.result(frame, [(zlib.crc32(bytes([i, *(t & 255 for t in tokens)])) % 1000) / 1000 for i in range(8)])
        elif kind == "shutdown":
            os._exit(0)

    def result(self, frame: dict[str, Any], value: Any) -> None:
        self.channel.send({"type": "result", "id": frame["id"], "value": value})

    def advance(self, slot: Slot) -> None:
        if time.monotonic() < slot.next_at:
            return
        slot.next_at = time.monotonic() + slot.delay
        if slot.poison:
            print("GGML_ASSERT(grammar) failed", file=sys.stderr, flush=True)
            os.abort()
        token = slot.step()
        if token == EOS:
            self.done(slot, "stop")
            return
        slot.made.append(token)
        self.tokens += 1
        chunk: dict[str, Any] = {"type": "chunk", "id": slot.id, "tokens": [token]}
        chunk["text"] = slot.text.push(bytes([token]))
        if slot.params.get("logprobs") is not None:
            likely = [(token, -0.1), (120, -2.5), (121, -3.0)][: slot.params["logprobs"]]
            chunk["logprobs"] = [{**self.logprob(token, -0.1), "top": [self.logprob(*each) for each in likely]}]
        self.channel.send(chunk)
        if slot.text.stopped is not None:
            self.done(slot, "stop")
        elif len(slot.made) >= (slot.params.get("max_tokens") or 1 << 30):
            self.done(slot, "length")

    @staticmethod
    def logprob(token: int, value: float) -> dict[str, Any]:
        return {"token": token, "text": bytes([token]).decode("latin-1"), "bytes": [token], "logprob": value}

    def done(self, slot: Slot, reason: str) -> None:
        self.slots.pop(slot.id, None)
        held = slot.text.finish()
        if held:
            self.channel.send({"type": "chunk", "id": slot.id, "tokens": [], "text": held})
        self.channel.send(
            {
                "type": "done",
                "id": slot.id,
                "reason": reason,
                "stats": {
                    "prompt_tokens": len(slot.prompt),
                    "completion_tokens": len(slot.made),
                    "prefill_tps": 100.0,
                    "decode_tps": 50.0,
                    "drafted": 4,
                    "accepted": 3,
                },
            }
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    FakeEngine(parser.parse_args().fd).run()
