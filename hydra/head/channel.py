"""Frames between the parent and its engine child: ``u32 length (little-endian) | UTF-8 JSON object``, both ways.

Knows nothing of what the frames mean (docs/architecture.md has the table) and nothing of llama.cpp. One reader thread
and any number of writers may use a channel.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

from hydra.errors import EngineError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


class FrameReader:
    """Bytes in, frames out, in whatever pieces the bytes come.

    Raises: EngineError for a frame that is too long or is not a JSON object.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The frames completed by ``data``."""
        self._buffer += data
        frames: list[dict[str, Any]] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"A frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}.")
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(decode(bytes(self._buffer[at + _LENGTH.size:end])))
            at = end
        del self._buffer[:at]
        return frames


def encode(frame: dict[str, Any]) -> bytes:
    """One frame as bytes."""
    body = json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """One frame's body as a dict. Raises EngineError."""
    try:
        frame = json.loads(body)
    except (UnicodeDecodeError, ValueError) as exc:
        raise EngineError(f"A frame of {len(body)} bytes is not JSON: {exc}.") from exc
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise EngineError("A frame is not a JSON object with a type.")
    return frame


class Channel:
    """A connected stream socket that carries frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._ready: list[dict[str, Any]] = []
        self._write_lock = threading.Lock()

    def send(self, frame: dict[str, Any]) -> None:
        """Send one frame whole. Raises OSError when the other end is gone."""
        data = encode(frame)
        with self._write_lock:
            self._sock.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """The next frame, waiting for it; None when the other end closed between frames.

        Raises: EngineError for a broken frame; OSError from the socket (a timeout set on it included).
        """
        while not self._ready:
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._ready = self._reader.feed(data)
        return self._ready.pop(0)

    def settimeout(self, seconds: float | None) -> None:
        """Bound each wait of ``receive``; it then raises TimeoutError."""
        self._sock.settimeout(seconds)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end closed first
        self._sock.close()
