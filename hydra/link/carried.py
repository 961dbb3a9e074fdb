"""One connection of the engine's and its own to the peer: how both directions run and end, and what they counted.

``Carried`` is what all have in common; ``Plain`` passes bytes, for a stock peer. Frames are forwarder.py's. The first
failure is the reason that is told; what follows it is only how the rest ended.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hydra.errors import HydraError, PeerError
from hydra.link.dial import Upstream
from hydra.link.settings import LinkSettings

_RELAY_BYTES = 1 << 20
_EXPLAIN_S = 1.0


@dataclass
class Counters:
    """What one or all connections have carried. plain_*: of the stock client's protocol; wire_*: of the network."""

    plain_messages: int = 0
    plain_bytes_up: int = 0
    plain_bytes_down: int = 0
    wire_sends: int = 0
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0

    def add(self, other: Counters) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class EngineLeft(Exception):
    """The client closed its connection in the middle of a message: its process died."""


class Carried(abc.ABC):
    """One connection of the client and its own to the peer. ``run`` returns when the client closes it.

    Raises (from run): HydraError with what is wrong with the peer.
    """

    mode = ""

    def __init__(self, client: socket.socket, upstream: Upstream, settings: LinkSettings) -> None:
        self.client = client
        self.upstream = upstream
        self.settings = settings
        self.counters = Counters()
        self.fault_kind = "gone"
        self.closing = False
        self._failure: HydraError | None = None

    def describe(self) -> dict[str, Any]:
        return {"mode": self.mode}

    def run(self) -> None:
        down = threading.Thread(target=self._guarded, args=(self._down,), name="link-down", daemon=True)
        down.start()
        try:
            self._guarded(self._up, down)
        finally:
            down.join()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Ends both directions; safe from any thread, more than once."""
        self.closing = True
        with contextlib.suppress(OSError):
            self.client.shutdown(socket.SHUT_RDWR)
        self.upstream.shutdown()

    @abc.abstractmethod
    def _up(self) -> None:
        """From the client to the peer, until the client closes its connection."""

    @abc.abstractmethod
    def _down(self) -> None:
        """From the peer to the client, until the connection ends."""

    def _guarded(self, direction: Callable[[], None], other: threading.Thread | None = None) -> None:
        """The first failure is the reason; what follows it is only how the rest ended.

        other: the direction that may know better why: what cannot be sent any more was perhaps explained from there.
        """
        try:
            direction()
        except EngineLeft:
            self.closing = True
        except HydraError as exc:
            if not self.closing and self._failure is None:
                self._failure = exc
        except OSError as exc:
            if other is not None:
                other.join(_EXPLAIN_S)
            if not self.closing and self._failure is None:
                self._failure = self._broken(exc)
        finally:
            self.end()

    def _broken(self, exc: OSError) -> PeerError:
        return PeerError(
            f"The connection to peer {self.settings.name} ({self.settings.address}) broke: {exc.strerror or exc}.",
            "Its log, if it is up, says why; else the network does.",
        )

    def _gone(self, said: str = "") -> PeerError:
        where = f"Peer {self.settings.name} ({self.settings.address})"
        if said:
            return PeerError(f"{where} closed the connection: {said.rstrip('.')}.", "The peer's log has more.")
        return PeerError(f"{where} closed the connection.", "Its log says why, or its process died.")

    def _from_client(self, room: memoryview) -> int:
        """Bytes received, 0 at the end: a client that dies with bytes on the way resets the connection."""
        try:
            return self.client.recv_into(room)
        except ConnectionError:
            return 0


class Plain(Carried):
    """Plain ggml-RPC, byte for byte: the peer is a stock one."""

    mode = "plain"

    def _up(self) -> None:
        buffer = memoryview(bytearray(_RELAY_BYTES))
        while count := self._from_client(buffer):
            self.upstream.sock.sendall(buffer[:count])
            self.counters.wire_sends += 1
            self.counters.plain_bytes_up += count
            self.counters.wire_bytes_up += count
        self.closing = True

    def _down(self) -> None:
        buffer = memoryview(bytearray(_RELAY_BYTES))
        while True:
            try:
                count = self.upstream.sock.recv_into(buffer)
            except BlockingIOError:
                continue  # a tick
            if not count:
                raise self._gone()
            self.client.sendall(buffer[:count])
            self.counters.plain_bytes_down += count
            self.counters.wire_bytes_down += count
