"""Who listens on a port of this box, on which address, and how full its queue is.

Knows Linux' /proc/net/tcp and asks psutil for owners; changes nothing.
Source: Documentation/networking/proc_net_tcp.rst; for a listener rx_queue is the number of connections not yet taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class Listening:
    """A listening TCP socket. waiting: connections it has not taken yet; owner: the process, where we may see it."""

    address: str
    port: int
    waiting: int
    pid: int = 0
    owner: str = ""


def listeners(port: int, proc: Path = Path("/proc/net")) -> list[Listening]:
    """The sockets that listen on `port` of this box."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if fields[3] == _LISTEN and int(number, 16) == port:
                    pid, owner = _owner(port)
                    found.append(Listening(_address(address), port, int(fields[4].partition(":")[2], 16), pid, owner))
    return found


def _address(text: str) -> str:
    words = [int(text[at:at + 8], 16) for at in range(0, len(text), 8)]  # each in the machine's byte order
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _owner(port: int) -> tuple[int, str]:
    import psutil

    with contextlib.suppress(psutil.Error):
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid:
                process = psutil.Process(entry.pid)
                return entry.pid, " ".join(process.cmdline())[:100] or process.name()
    return 0, ""


def overflows(netstat: Path = Path("/proc/net/netstat")) -> tuple[int, int]:
    """(ListenOverflows, ListenDrops) of this box since it started: connections lost because a queue was full."""
    with contextlib.suppress(OSError, ValueError):
        lines = netstat.read_text().splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            if names.startswith("TcpExt:"):
                row = dict(zip(names.split()[1:], map(int, values.split()[1:]), strict=False))
                return row.get("ListenOverflows", 0), row.get("ListenDrops", 0)
    return 0, 0
