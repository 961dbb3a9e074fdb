"""The link's frames: what crosses the network between a head's link and a hydra peer, instead of plain ggml-RPC.

Knows layouts only; who makes and reads the frames is deltas.py, forwarder.py and hydra.peer.linked. Little-endian,
packed. The rule that all frames follow: what they carry is a plain ggml-RPC stream, byte for byte, said shorter.

    opening, both ways, 32 bytes, the head first
      0  magic "hydralnk"    8  version u16    10  flags u16    12  silence_ms u32    16  store_bytes u64
     24  slots u32          28  zero u32
    The head says the newest version that it speaks, the peer answers with the one that both do (0: none). What both
    have of flags, and the smaller of each number, is in force. The first byte (0x68) is no command, no HTTP verb and
    no TLS record: a stock peer closes the connection at it, and so is recognised.

    head → peer                                                                                      delivers
      0x01 PLAIN    kind u8 | length u32 | bytes                                                     these bytes
      0x02 KEEP     kind u8 | slot u16 | length u32 | a message, or a row of one                     it, and keeps it
      0x03 SAME     kind u8 | slot u16                                                               what is kept there
      0x04 PATCH    kind u8 | slot u16 | count u16 | (offset u32, length u32)[count] | new bytes     it, changed first
      0x05 DROP     kind u8 | slot u16                                                               nothing; forgets it
      0x06 HALF     kind u8 | length u32 | float16[length / 2]                                       as float32
      0x07 HALVE    kind u8 | reply u32                       nothing; that reply (the n-th) comes back as HALF frames

    peer → head
      0x81 PLAIN    kind u8 | length u32 | bytes              bytes of the stream of replies
      0x82 ALIVE    kind u8 | busy_ms u32                     nothing; how long the message at hand has been worked on
      0x83 HALF     kind u8 | length u32 | float16[…]         as float32
      0x84 FAULT    kind u8 | length u32 | UTF-8              nothing; why the peer closes the connection
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from hydra.errors import ProtocolError

VERSION = 1
MAGIC = b"hydralnk"
FIRST_BYTE = MAGIC[0]
HELLO = struct.Struct("<8sHHIQII")

MAX_SLOTS = 4096
MAX_STORE_BYTES = 64 << 20  # of kept messages and rows, at each end of a connection
MAX_KEPT_BYTES = 4 << 20  # of one kept message: a decode step's inputs and graphs, not a prefill's activations
MAX_RANGES = 2048
MAX_FAULT_BYTES = 4096


class Up(IntEnum):
    PLAIN = 0x01
    KEEP = 0x02
    SAME = 0x03
    PATCH = 0x04
    DROP = 0x05
    HALF = 0x06
    HALVE = 0x07


class Down(IntEnum):
    PLAIN = 0x81
    ALIVE = 0x82
    HALF = 0x83
    FAULT = 0x84


class Flag(IntFlag):
    DELTAS = 1
    HALF = 2


LENGTH = struct.Struct("<BI")  # PLAIN, HALF, FAULT; ALIVE and HALVE with a number instead
SLOT = struct.Struct("<BH")  # SAME, DROP
KEEP = struct.Struct("<BHI")
PATCH = struct.Struct("<BHH")
RANGE_SIZE = 8  # offset u32, length u32

UP_HEADS = {
    Up.PLAIN: LENGTH.size,
    Up.KEEP: KEEP.size,
    Up.SAME: SLOT.size,
    Up.PATCH: PATCH.size,
    Up.DROP: SLOT.size,
    Up.HALF: LENGTH.size,
    Up.HALVE: LENGTH.size,
}


@dataclass(frozen=True)
class Hello:
    """What one end offers, or both agreed on. silence_ms: ALIVE comes at least four times as often."""

    version: int = VERSION
    flags: int = int(Flag.DELTAS)
    silence_ms: int = 15000
    store_bytes: int = MAX_STORE_BYTES
    slots: int = MAX_SLOTS

    def pack(self) -> bytes:
        return HELLO.pack(MAGIC, self.version, self.flags, self.silence_ms, self.store_bytes, self.slots, 0)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Raises: ProtocolError when these are not 32 bytes of an opening."""
        if len(data) != HELLO.size or data[: len(MAGIC)] != MAGIC:
            raise ProtocolError("This is not the opening of hydra's link.")
        _, version, flags, silence_ms, store_bytes, slots, _ = HELLO.unpack(data)
        return cls(version, flags, silence_ms, store_bytes, slots)


def agree(offer: Hello) -> Hello:
    """What the peer answers: version 0 where there is none that both speak."""
    known = int(Flag.DELTAS | Flag.HALF)
    return Hello(
        version=min(offer.version, VERSION),
        flags=offer.flags & known,
        silence_ms=max(offer.silence_ms, 100),
        store_bytes=min(offer.store_bytes, MAX_STORE_BYTES),
        slots=min(offer.slots, MAX_SLOTS),
    )
