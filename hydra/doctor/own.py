"""This box's own end of the wire: what an accepted socket of ours gets, and who listens on the port of our node.

Opens one loopback connection to itself; knows nothing of other boxes.
"""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable, Iterator

from hydra.config import NodeConfig
from hydra.doctor.finding import Finding, fail, ok, warn
from hydra.doctor.listening import listeners, overflows
from hydra.doctor.peers import judge
from hydra.peer import sockets


def accepted_socket(make_ready: Callable[[socket.socket], None] = sockets.make_ready) -> Finding:
    """What hydra's one function for accepted sockets achieves on this kernel, read back from an accepted socket."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        port = server.socket.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5.0), server.get_request()[0] as accepted:
            make_ready(accepted)
            return judge("accepted sockets of this box", sockets.read_options(accepted))


def api_port(port: int) -> Iterator[Finding]:
    """Who has the port of this head's API. Nothing where nobody listens."""
    for item in listeners(port):
        owner = f"process {item.pid} ({item.owner})" if item.pid else "a process of another user"
        text = f"{item.address}:{item.port} is served by {owner}"
        if item.pid and "hydra" not in item.owner:
            yield fail("sockets", f"port {port} (API)", text, "Stop that program, or choose another [head] api_port.",
                       pid=item.pid)
        else:
            yield ok("sockets", f"port {port} (API)", text, pid=item.pid)


def port(node: NodeConfig) -> Iterator[Finding]:
    """The listener on the port of this box's own peer: where, whose, how full. Nothing where nobody listens."""
    found = listeners(node.port)
    wanted = node.bind or node.host
    for item in found:
        owner = f"process {item.pid} ({item.owner})" if item.pid else "a process of another user"
        text = f"{item.address}:{item.port} is served by {owner}"
        if item.pid and "hydra" not in item.owner:
            yield fail("sockets", f"port {node.port}", text, "Stop that program, or give the node another port.",
                       pid=item.pid)
        elif item.address in ("0.0.0.0", "::") and wanted not in ("0.0.0.0", "::"):
            yield warn("sockets", f"port {node.port}", f"{text}, on every address; hydra.toml says {wanted}",
                       "Restart it: it was started with another file.", pid=item.pid)
        else:
            yield ok("sockets", f"port {node.port}", text, pid=item.pid)
        if item.waiting:
            yield warn("sockets", f"port {node.port}: backlog", f"{item.waiting} connections wait to be accepted",
                       "The process hangs: restart it.", waiting=item.waiting)
    overflowed, dropped = overflows()
    if found and overflowed:
        yield warn("sockets", "backlog of this box", f"{overflowed} connections overflowed a listener's queue and "
                   f"{dropped} were dropped since it started", "Some server here is overrun or hangs now and then.",
                   overflows=overflowed, drops=dropped)
