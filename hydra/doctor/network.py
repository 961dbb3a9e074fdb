"""The way to a peer: which interface, how fast, wired or not, MTU, and whether both boxes mean the same box.

Asks the kernel; sends nothing but one name look-up. Knows nothing of ggml-RPC.
Rules: sysfs-class-net of Linux; ip(7) for IP_MTU.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydra.doctor.finding import Finding, fail, ok, skip, warn
from hydra.nodes import resolve

_IP_MTU = 14
SLOW_MBIT = 1000


@dataclass(frozen=True)
class Interface:
    """A network interface. speed_mbit: 0 where it has none (virtual, Wi-Fi); errors: receive and send errors so far."""

    name: str
    speed_mbit: int
    duplex: str
    mtu: int
    wireless: bool
    up: bool
    errors: int
    packets: int


def interface_to(host: str) -> str:
    """The name of the interface by which this box reaches a host; empty where it cannot be told."""
    import psutil

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # sends nothing: it only asks the routing table
            local = sock.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == local.split("%")[0] for entry in addresses):
            return str(name)
    return ""


def interface(name: str, sys: Path = Path("/sys/class/net")) -> Interface:
    """What the kernel says of an interface."""
    folder = sys / name

    def number(path: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / path).read_text())
        return 0

    def text(path: str) -> str:
        with contextlib.suppress(OSError):
            return (folder / path).read_text().strip()
        return ""

    return Interface(name, max(0, number("speed")), text("duplex"), number("mtu"),
                     (folder / "wireless").exists() or (folder / "phy80211").exists(),
                     # Empty: a root without /sys, where nothing is told. A route leads through it, so it is up.
                     text("operstate") in ("up", "unknown", ""),
                     number("statistics/rx_errors") + number("statistics/tx_errors"),
                     number("statistics/rx_packets") + number("statistics/tx_packets"))


def judge_interface(check: str, found: Interface) -> Finding:
    parts = [found.name, "Wi-Fi" if found.wireless else f"{found.speed_mbit} Mbit/s" if found.speed_mbit else
             "speed not told"]
    if found.duplex and found.duplex != "unknown":
        parts.append(f"{found.duplex} duplex")
    parts.append(f"MTU {found.mtu}" if found.mtu else "MTU not told")
    words = ", ".join(parts)
    data = {"interface": found.name, "speed_mbit": found.speed_mbit, "duplex": found.duplex, "mtu": found.mtu,
            "wireless": found.wireless, "errors": found.errors}
    if not found.up:
        return fail("network", check, f"{words}: it is down", f"Plug it in; ip link set {found.name} up.", **data)
    if found.wireless:
        return warn("network", check, words, "Use a cable: Wi-Fi costs milliseconds a token, and loads break.",
                    **data)
    if found.duplex == "half":
        return warn("network", check, words, "Half duplex: the settings of the two ends do not match. Set both to "
                    "automatic, change the cable.", **data)
    if 0 < found.speed_mbit < SLOW_MBIT:
        return warn("network", check, words, "Use a gigabit port and a cable with all four pairs.", **data)
    if found.mtu and found.mtu < 1280:
        return warn("network", check, words, "That is very small: every message takes many packets.", **data)
    if found.errors > 100 and found.errors > found.packets // 10_000:
        return warn("network", check, f"{words}; {found.errors} errors in {found.packets} packets",
                    "Change the cable or the port.", **data)
    return ok("network", check, words, **data)


def path_mtu(check: str, sock: socket.socket, local_mtu: int) -> Finding:
    """What the kernel knows of the smallest MTU on the way of this connection."""
    try:
        mtu = sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return skip("network", check, "the system does not tell the MTU of the way")
    if local_mtu and mtu < local_mtu:
        return warn("network", check, f"MTU of the way is {mtu}, of this box's interface {local_mtu}",
                    "Set the same MTU on both boxes and the switch.", path_mtu=mtu)
    return ok("network", check, f"MTU of the way is {mtu}", path_mtu=mtu)


def names(hosts: Mapping[str, str], told: Mapping[str, Iterable[str]] | None = None) -> Iterator[Finding]:
    """Host names of hydra.toml: they resolve, not to loopback, and to what the peers see.

    hosts: node → its host; told: peer → every node's address as that peer resolved it when it started.
    """
    for node, host in hosts.items():
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            continue
        check = f"name {host}"
        addresses = resolve(host)
        if not addresses:
            yield fail("network", check, f"the host of {node} does not resolve on this box",
                       "Write its IP address in hydra.toml, or mend the name service.")
            continue
        loopback = sorted(a for a in addresses if ipaddress.ip_address(a).is_loopback)
        if loopback and len(hosts) > 1 and host != "localhost":
            yield warn("network", check, f"resolves to {', '.join(loopback)} here, which is this box alone",
                       "Remove that line from /etc/hosts, or write IP addresses in hydra.toml.")
            continue
        different = [peer for peer, theirs in (told or {}).items() if not addresses & frozenset(theirs)]
        if different:
            yield fail("network", check, f"is {', '.join(sorted(addresses))} here and another address on "
                       f"{', '.join(different)}", "Write IP addresses in hydra.toml: the name services disagree.")
        else:
            yield ok("network", check, f"is {', '.join(sorted(addresses))}")
