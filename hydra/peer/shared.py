"""What the connections of one worker share, and how much of it one of them may take.

Knows no socket and no message. Written by connection threads: numbers and dictionary entries are replaced whole.
"""

from __future__ import annotations

from hydra.errors import ProtocolError
from hydra.ggml.backend import Backend, Device
from hydra.ggml.library import Ggml
from hydra.peer import rules
from hydra.peer.settings import PeerSettings
from hydra.peer.weights import WeightCache

MAX_TOPOLOGIES = 512  # of about 60 KB each


class Budget:
    """Bytes that all connections together may hold of messages too long for their buffers."""

    def __init__(self, limit_bytes: int) -> None:
        self.free = limit_bytes

    def take(self, size: int) -> None:
        self.free -= size
        if self.free < 0:
            self.free += size
            raise ProtocolError(
                f"{size} bytes in flight would exceed the {self.free} that are left to all connections."
            )

    def give(self, size: int) -> None:
        self.free += size


class SharedState:
    """What the connections of one worker share: library, devices, budget, weight cache, known topologies."""

    def __init__(
        self, ggml: Ggml, devices: list[Device], settings: PeerSettings, cache: WeightCache | None, private_layout: bool
    ) -> None:
        self.ggml = ggml
        self.devices = devices
        self.settings = settings
        self.cache = cache
        self.private_layout = private_layout
        self.budget = Budget(settings.max_inflight_bytes)
        self.topologies: dict[tuple[int, bytes], rules.Layout | None] = {}
        self.info = [Backend(ggml, device, settings.threads) for device in devices]

    def close(self) -> None:
        for backend in self.info:
            backend.close()
