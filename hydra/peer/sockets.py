"""The one function that makes an accepted socket ready, and the one that reads back what a socket really has.

This is where the project began: a merged server accepted sockets without TCP_NODELAY, Nagle's algorithm held back the
second half of every reply until the head's delayed ACK, 40 ms later, and decode was nine times slower than with the
stock server. So options are set in one place, at once, on every accepted socket, before a byte is served;
``hydra.peer.listener`` accepts in one place, and a test reads the options back from the server's own descriptor on
every path.

Buffer sizes are left alone on purpose: an explicit SO_RCVBUF is capped at net.core.rmem_max (208 KiB by default) and
turns off the kernel's own tuning, which goes up to tcp_rmem's 6 MiB.
"""

from __future__ import annotations

import socket
import struct

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 4


def make_ready(sock: socket.socket) -> None:
    """Sets what every accepted TCP socket must have."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.set_inheritable(False)


def read_options(sock: socket.socket) -> dict[str, int]:
    """What the kernel has for this socket: nodelay and keepalive (0/1), rcvbuf and sndbuf (bytes), rtt_us.

    Empty for the plain end of a TLS tunnel: the options of the connection itself are in the listener's list then.
    """
    if sock.family == socket.AF_UNIX:
        return {}
    options = {
        "nodelay": int(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))),
        "keepalive": int(bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))),
        "rcvbuf": sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
        "sndbuf": sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
    }
    info_option = getattr(socket, "TCP_INFO", None)
    if info_option is not None:
        info = sock.getsockopt(socket.IPPROTO_TCP, info_option, 104)
        if len(info) >= 72:
            options["rtt_us"] = struct.unpack_from("I", info, 68)[0]  # tcpi_rtt
    return options
