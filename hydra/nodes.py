"""Which node of hydra.toml is this box?

Knows the box's own addresses and names, nothing of what runs on it. A wrong guess would serve the wrong role, so an
answer that is not the only one is an error that says what was looked at; `--node NAME` (or HYDRA_NODE) settles it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config import Config, NodeConfig
from .errors import ConfigError

RESOLVE_LIMIT_S = 3.0


@dataclass(frozen=True)
class Box:
    """What this box calls itself: `addresses` without zone and without loopback, `names` in lower case."""

    addresses: frozenset[str]
    names: frozenset[str]


@dataclass(frozen=True)
class Recognised:
    """The node, and in words how it was recognised."""

    node: NodeConfig
    how: str


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, stands for this box alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def this_box() -> Box:
    """Addresses of the interfaces that are up, and the host's names."""
    import psutil

    addresses = set()
    for family in psutil.net_if_addrs().values():
        for entry in family:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.split("%")[0])
                if not address.is_loopback:
                    addresses.add(str(address))
    names = {socket.gethostname().lower(), socket.gethostname().lower().split(".")[0]}
    return Box(frozenset(addresses), frozenset(names))


def resolve(host: str, limit_s: float = RESOLVE_LIMIT_S) -> frozenset[str]:
    """Addresses of a host name; empty when it has none or the name service does not answer in time."""
    found: set[str] = set()

    def ask() -> None:
        try:
            found.update(str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None))
        except (OSError, UnicodeError):
            pass

    # getaddrinfo has no deadline of its own: a dead name server would hold `hydra up` for half a minute.
    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(limit_s)
    return frozenset() if thread.is_alive() else frozenset(found)


def this_node(
    config: Config,
    name: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    box: Box | None = None,
    lookup: Callable[[str], frozenset[str]] = resolve,
) -> Recognised:
    """Find the node of `config` that this box is.

    name: from --node; then HYDRA_NODE; then the box itself. box, lookup: for tests.
    Raises: ConfigError where the name is unknown, no node fits, or more than one does.
    """
    env = os.environ if env is None else env
    if name:
        return Recognised(config.node(name), "named by --node")
    if env.get("HYDRA_NODE"):
        return Recognised(config.node(env["HYDRA_NODE"]), "named by HYDRA_NODE")
    box = box or this_box()
    matches: list[Recognised] = []
    looked: list[str] = []
    for node in config.nodes:
        how, seen = _match(node, box, lookup)
        looked.append(f"{node.name} is {seen}")
        if how:
            matches.append(Recognised(node, how))
    if not matches:  # weaker evidence, so only where addresses say nothing
        matches = [Recognised(node, f"its name is this box's host name {node.name}")
                   for node in config.nodes if node.name.lower() in box.names]
    if len(matches) == 1:
        return matches[0]
    own = f"addresses {', '.join(sorted(box.addresses)) or 'none'}; host name {', '.join(sorted(box.names))}"
    if not matches:
        raise ConfigError(f"This box is no node of {config.path}: it has {own}; {'; '.join(looked)}.",
                          "Correct the host of its node, or say which it is with --node NAME.")
    fits = " and ".join(f"{match.node.name} ({match.how})" for match in matches)
    raise ConfigError(f"This box could be {fits}.", "Say which with --node NAME (or HYDRA_NODE=NAME).")


def _match(node: NodeConfig, box: Box, lookup: Callable[[str], frozenset[str]]) -> tuple[str, str]:
    """How the node fits the box (empty: it does not), and what its host is, in words."""
    try:
        addresses = frozenset({str(ipaddress.ip_address(node.host))})
        seen = node.host
    except ValueError:
        if node.host.lower() in box.names:
            return f"its host {node.host} is this box's host name", node.host
        addresses = lookup(node.host)
        seen = f"{node.host} ({', '.join(sorted(addresses)) or 'a name that does not resolve'})"
    own = sorted(addresses & box.addresses)
    if own:
        return f"its host {seen} is an address of this box", seen
    if addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return f"its host {seen} is loopback", seen
    return "", seen
