"""Is a port free, and if not, who has it: so that a second `hydra up` says which process already serves."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from ..errors import ConfigError, HydraError


@dataclass(frozen=True)
class Listener:
    """A process that listens; pid 0 where the system does not let us see whose socket it is."""

    pid: int
    name: str
    command: str

    def __str__(self) -> str:
        if not self.pid:
            return "a process of another user"
        return f"process {self.pid} ({self.name}: {self.command})"


def ensure_free(host: str, port: int, what: str) -> None:
    """Return when `host:port` can be listened on.

    what: for the message, such as "the peer mini".
    Raises: HydraError naming the process that has it; ConfigError where the address is not this box's.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"The address {host!r} for {what} does not resolve: {error.strerror}.",
                          "Write an IP address of this box.") from error
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise HydraError(f"{host}:{port} is already served by {who_listens(port)}; {what} cannot start.",
                                 _mend(port)) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{host} is not an address of this box, so {what} cannot listen there.",
                                  "Correct the host of the node, or give it a bind address.") from error
            if error.errno == errno.EACCES:
                raise ConfigError(f"Port {port} for {what} needs more rights than this user has.",
                                  "Use a port above 1023.") from error
            raise HydraError(f"{what} cannot listen on {host}:{port}: {error.strerror}.") from error


def who_listens(port: int) -> Listener:
    """The process that listens on this TCP port of the box."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
                continue
            if connection.laddr.port == port:
                process = psutil.Process(connection.pid)
                return Listener(connection.pid, process.name(), " ".join(process.cmdline())[:120])
    except psutil.Error:
        pass
    return Listener(0, "", "")


def _mend(port: int) -> str:
    listener = who_listens(port)
    if "hydra" in listener.command and listener.pid != os.getpid():
        return f"It runs already: use it, or stop it first with `kill {listener.pid}`."
    return "Stop that program, or choose another port in hydra.toml."
