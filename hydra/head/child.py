"""The engine process: frames in, steps of the engine, frames out. Only this process loads llama.cpp.

Knows frames and the engine; does not know HTTP or hydra.toml. Threads: the main one runs the engine and nothing else
touches llama.cpp's contexts; a reader takes frames (and answers tokenize/detokenize itself, which is thread-safe, so
that they do not wait for a decode); a writer sends, so that no step waits for the parent; a heartbeat says that the
process lives.

Run as ``python -m hydra _engine --fd N`` or ``python -m hydra.head.child N``. Ends when the parent closes the channel.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from hydra.errors import EngineError, HydraError, RequestError

from .channel import Channel
from .spec import EngineSpec

HEARTBEAT_S = 0.5
_EXIT_OK, _EXIT_FAILED = 0, 8


class Child:
    """One engine behind one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._engine: Any = None
        self._ended = threading.Event()
        self._steps = 0

    def run(self) -> int:
        """Serve until the parent says so or goes away; returns the exit code."""
        writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        writer.start()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="engine-heartbeat", daemon=True).start()
        code = _EXIT_OK
        try:
            self._serve()
        except HydraError as exc:
            self._outbox.put(_failed(exc))
            code = _EXIT_FAILED
        except Exception as exc:  # whatever it is, the parent is to hear of it before this process ends
            traceback.print_exc()
            self._outbox.put(_failed(EngineError(f"The engine failed: {type(exc).__name__}: {exc}.")))
            code = _EXIT_FAILED
        finally:
            self._ended.set()
            self._outbox.put(None)
            writer.join(timeout=5)
            if self._engine is not None:
                self._engine.close()
        return code

    # -- threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                if frame["type"] in ("tokenize", "detokenize") and self._engine is not None:
                    self._outbox.put(self._vocabulary(frame))
                else:
                    self._inbox.put(frame)
        except (OSError, HydraError) as exc:
            print(f"hydra engine: the channel broke: {exc}", file=sys.stderr)  # noqa: T201 - no logger in this process yet
        self._inbox.put(None)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._channel.send(frame)
            except OSError:
                return  # the parent is gone; the reader ends the process

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            engine = self._engine
            self._outbox.put({"type": "heartbeat", "step": self._steps,
                              "busy": engine.busy if engine is not None else True,
                              "waiting": engine.n_waiting if engine is not None else 0,
                              "slots": engine.slot_states() if engine is not None else []})

    def _vocabulary(self, frame: dict[str, Any]) -> dict[str, Any]:
        vocab = self._engine.vocab
        try:
            if frame["type"] == "tokenize":
                value: Any = vocab.tokenize(str(frame["text"]), add_special=bool(frame.get("add_special", True)),
                                            parse_special=bool(frame.get("parse_special", True)))
            else:
                tokens = [int(token) for token in frame["tokens"]]
                if any(not 0 <= token < vocab.n_tokens for token in tokens):
                    raise RequestError(f"A token is not in the vocabulary of {vocab.n_tokens}.")
                value = vocab.detokenize(tokens, special=bool(frame.get("special", False)))
        except (KeyError, TypeError, ValueError) as exc:
            return _failed(RequestError(f"A {frame['type']} frame is not understood: {exc!r}."), frame.get("id"))
        except HydraError as exc:
            return _failed(exc, frame.get("id"))
        return {"type": "result", "id": frame.get("id"), "value": value}

    # -- the main thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            frame = self._next_frame()
            while frame is not _NOTHING:
                if frame is None or frame["type"] == "shutdown":
                    return
                self._handle(frame)
                frame = self._poll()
            if self._engine is not None and self._engine.busy:
                for event in self._engine.step():
                    self._outbox.put(_event_frame(event))
                self._steps += 1

    def _next_frame(self) -> dict[str, Any] | None:
        if self._engine is not None and self._engine.busy:
            return self._poll()
        return self._inbox.get()

    def _poll(self) -> dict[str, Any] | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return _NOTHING

    def _handle(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if kind == "load":
            self._load(frame)
        elif self._engine is None:
            self._outbox.put(_failed(EngineError(f"A {kind} frame came before load."), frame.get("id")))
        elif kind == "cancel":
            self._engine.cancel(str(frame.get("id")))
        elif kind == "generate":
            self._generate(frame)
        elif kind == "embed":
            self._embed(frame)
        elif kind in ("tokenize", "detokenize"):
            self._outbox.put(self._vocabulary(frame))
        else:
            self._outbox.put(_failed(EngineError(f"There is no frame of type {kind!r}."), frame.get("id")))

    def _load(self, frame: dict[str, Any]) -> None:
        from .engine import Engine

        spec = EngineSpec.from_dict(frame["spec"])
        self._engine = Engine(spec, lambda fields: self._outbox.put({"type": "progress", **fields}))
        self._outbox.put({"type": "ready", "info": self._engine.info})

    def _generate(self, frame: dict[str, Any]) -> None:
        from .sampling import SamplingParams

        try:
            params = SamplingParams.from_dict(frame.get("params") or {})
            self._engine.submit(str(frame["id"]), [int(t) for t in frame["prompt"]], params,
                                [int(t) for t in frame.get("resume") or ()])
        except (KeyError, TypeError, ValueError) as exc:
            self._outbox.put(_failed(RequestError(f"A generate frame is not understood: {exc!r}."), frame.get("id")))
        except RequestError as exc:
            self._outbox.put(_failed(exc, frame.get("id")))

    def _embed(self, frame: dict[str, Any]) -> None:
        try:
            value = self._engine.embed([int(t) for t in frame["tokens"]])
        except (KeyError, TypeError, ValueError) as exc:
            self._outbox.put(_failed(RequestError(f"An embed frame is not understood: {exc!r}."), frame.get("id")))
        except HydraError as exc:
            self._outbox.put(_failed(exc, frame.get("id")))
        else:
            self._outbox.put({"type": "result", "id": frame.get("id"), "value": value})


_NOTHING: Any = object()


def _failed(exc: HydraError, id: Any = None) -> dict[str, Any]:
    frame: dict[str, Any] = {"type": "failed",
                             "error": {"kind": type(exc).__name__, "message": exc.message, "hint": exc.hint}}
    if id is not None:
        frame["id"] = id
    return frame


def _event_frame(event: Any) -> dict[str, Any]:
    name = type(event).__name__
    if name == "Chunk":
        frame = {"type": "chunk", "id": event.id, "tokens": event.tokens, "text": event.text}
        if event.logprobs:
            frame["logprobs"] = event.logprobs
        return frame
    if name == "Done":
        return {"type": "done", "id": event.id, "reason": event.reason, "stop": event.stop, "stats": event.stats}
    return {"type": "failed", "id": event.id,
            "error": {"kind": event.kind, "message": event.message, "hint": event.hint}}


def main(fd: int) -> int:
    """The engine process on an inherited socket. Returns the exit code."""
    # Ctrl-C in a terminal goes to the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with socket.socket(fileno=fd) as sock:
        return Child(Channel(sock)).run()


if __name__ == "__main__":
    # os._exit: threads of a peer's connection may still wait in libggml, and nothing is left to be saved.
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
