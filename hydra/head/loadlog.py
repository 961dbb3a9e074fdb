"""Reads llama.cpp's own log: which layer lies where, how many bytes each device holds, and why a load failed.

Knows nothing of ctypes: text lines in, numbers out. libllama has no C call that says where a layer lies (the C++ one
returns a ``std::map``), but it prints it, with the same figures, so its own accounting is what hydra reports.

Source: the format strings in src/llama-model.cpp, llama-kv-cache.cpp, llama-memory-recurrent.cpp and llama-context.cpp
of the pinned llama.cpp; tests/test_head_loadlog.py holds them.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

_LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device (\S+),")
_BUFFER = re.compile(r": +(\S.*?) +(model|KV|RS|compute|output) +buffer size = +([\d.]+) MiB")
_COPIES = re.compile(r"sched copies = (\d+)")
_SPLITS = re.compile(r"splits = (\d+)(?: / (\d+))?")
WARN, ERROR, CONT = 3, 4, 5


@dataclass
class BufferSize:
    """One buffer that llama.cpp reported: the buffer type's name, what for, how large."""

    buffer: str
    kind: str
    size_bytes: int


@dataclass
class LoadLog:
    """What the log of one load said, collected line by line."""

    layers: dict[int, str] = field(default_factory=dict)
    buffers: list[BufferSize] = field(default_factory=list)
    sched_copies: int = 0
    splits: int = 0
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def feed(self, level: int, line: str) -> None:
        """One line of the log with llama.cpp's level (3 = warning, 4 = error)."""
        if level == ERROR:
            self.errors.append(line.strip())
            return
        if match := _LAYER.search(line):
            self.layers[int(match[1])] = match[2]
        elif match := _BUFFER.search(line):
            self.buffers.append(BufferSize(match[1], match[2], int(float(match[3]) * (1 << 20))))
        elif match := _COPIES.search(line):
            self.sched_copies = max(self.sched_copies, int(match[1]))
        elif "graph" in line and (match := _SPLITS.search(line)):
            self.splits = int(match[2] or match[1])

    def by_device(self, kinds: tuple[str, ...] = ("model", "KV", "RS", "compute", "output")) -> dict[str, int]:
        """Bytes by buffer name, over the kinds asked for."""
        total: dict[str, int] = {}
        for item in self.buffers:
            if item.kind in kinds:
                total[item.buffer] = total.get(item.buffer, 0) + item.size_bytes
        return total

    def why(self) -> str:
        """The first error of the last few, which is the cause; the others are its consequences."""
        for line in self.errors:
            if "failed to load model" not in line:
                return re.sub(r"^\w+: ", "", line)
        return self.errors[0] if self.errors else "llama.cpp gave no reason"
