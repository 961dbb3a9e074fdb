"""Is each peer there, does it speak our protocol, and what are the options of the sockets it really accepted?

Asks a running peer over its own port: a hydra peer tells by HTTP, a stock server only by HELLO. A peer that is down,
hung, firewalled, refusing or unknown by name gives five different findings (hydra.doctor.ask tells them apart).
The option that matters most is TCP_NODELAY on the accepted connection: without it decode was nine times slower, and
nothing said why (docs/doctor.md).
"""

from __future__ import annotations

import email.utils
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra import __version__
from hydra.doctor.ask import Answer, NoAnswer, PeerClient, Target, get, open_client
from hydra.doctor.finding import Finding, fail, ok, skip, warn
from hydra.errors import HydraError, VersionMismatch
from hydra.ggml.library import PINNED_OP_COUNT
from hydra.rpc import wire

CLOCK_WARN_S = 5.0
_PROTOCOL = ".".join(map(str, wire.PROTOCOL_VERSION))


@dataclass
class Seen:
    """What was learnt of one peer. client: an open compute connection, for the checks that follow; close it."""

    target: Target
    findings: list[Finding] = field(default_factory=list)
    health: Mapping[str, Any] = field(default_factory=dict)
    hydra: bool = False
    client: PeerClient | None = None
    connect_s: float = 0.0

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


def look(target: Target, *, own: bool = False, digest: str = "") -> Seen:
    """Everything a peer says of itself. own: it is this very box; digest: of our hydra.toml, empty = do not compare."""
    seen = Seen(target)
    add = seen.findings.append
    name = f"peer {target.name}"
    try:
        answer = get(target, "/health")
    except NoAnswer as exc:
        if exc.trouble == "closed":
            _look_at_stock(seen, exc)
        elif own and exc.trouble == "refused":
            add(skip("peer", name, f"nothing serves {target.endpoint} on this box yet: start `hydra up`, ask again"))
        else:
            add(fail("peer", name, exc.message, exc.hint, trouble=exc.trouble))
        return seen
    if "protocol" not in answer.body:
        add(fail("peer", name, f"{target.endpoint} speaks HTTP (status {answer.status}) and is no hydra peer",
                 "Another program has that port: correct the port, or move one of them.", trouble="not a peer"))
        return seen
    seen.hydra, seen.health, seen.connect_s = True, answer.body, answer.connect_s
    seen.findings += _health(target, answer, digest)
    try:
        seen.client = open_client(target)
    except NoAnswer as exc:
        add(fail("protocol", name, f"HELLO: {exc.message}", exc.hint, trouble=exc.trouble))
    except HydraError as exc:
        full = answer.body.get("connections", 0) >= answer.body.get("max_connections", 1)
        plain = " With security.tls on there and off here it looks like this too." if target.tls is None else ""
        add((warn if full else fail)("protocol", name, f"HELLO: {exc.message}", exc.hint + plain if not full else
                                     "All its connections are taken by heads: the compute checks have to wait."))
    else:
        seen.findings += _version(seen.client, name)
    return seen


def _health(target: Target, answer: Answer, digest: str) -> Iterator[Finding]:
    body, name = answer.body, f"peer {target.name}"
    devices = ", ".join(f"{d.get('name')} ({d.get('description')})" for d in body.get("devices", ()))
    if body.get("state") == "ok":
        restarts = int(body.get("restarts") or 0)
        text = (f"hydra peer, up for {float(body.get('uptime_s') or 0):.0f} s, {devices or 'no device'}, "
                f"{body.get('connections')} of {body.get('max_connections')} connections")
        if restarts:
            yield warn("peer", name, f"{text}; its device worker died {restarts} times", "Its log says of what.",
                       restarts=restarts)
        else:
            yield ok("peer", name, text, health=dict(body))
    else:
        yield fail("peer", name, f"it is up and cannot compute: {body.get('reason') or body.get('state')}",
                   "See its log; it tries again by itself.", health=dict(body))
    version = body.get("version")
    if version is not None and version != __version__:
        yield fail("protocol", f"{name}: release", f"hydra {version} there, {__version__} here",
                   "Install the same hydra release on both boxes.")
    theirs = str(body.get("config_digest") or "")
    if digest and theirs:
        if digest == theirs:
            yield ok("config", f"{name}: hydra.toml", f"the same on both boxes (digest {digest})")
        else:
            yield fail("config", f"{name}: hydra.toml", f"differs: digest {digest} here, {theirs} there",
                       "Copy the file, and restart `hydra up` there: it read another one when it started.",
                       here=digest, there=theirs)
    elif digest:
        yield skip("config", f"{name}: hydra.toml", "that peer runs without a hydra.toml (`hydra peer`)")
    yield from _clock(name, answer)


def _clock(name: str, answer: Answer) -> Iterator[Finding]:
    """The boxes' clocks: from the time in /health, else from HTTP's Date, which has whole seconds."""
    theirs, slack = answer.body.get("time"), 0.0
    if not isinstance(theirs, (int, float)):
        try:
            theirs = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5
            slack = 0.5
        except (KeyError, ValueError, TypeError):
            return
    skew = float(theirs) - answer.at
    off = max(0.0, abs(skew) - answer.took_s / 2 - slack)
    if off > CLOCK_WARN_S:
        way = "ahead of" if skew > 0 else "behind"
        yield warn("network", f"{name}: clock", f"{abs(skew):.1f} s {way} this box's",
                   "Run a time service on both (timedatectl set-ntp true): logs do not line up, certificates may fail.",
                   skew_s=round(skew, 3))
    else:
        yield ok("network", f"{name}: clock", f"within {max(abs(skew), slack):.1f} s of this box's",
                 skew_s=round(skew, 3))


def _look_at_stock(seen: Seen, why: NoAnswer) -> None:
    """It closes on HTTP: a stock ggml-rpc-server does; HELLO decides."""
    name = f"peer {seen.target.name}"
    try:
        seen.client = open_client(seen.target)
    except VersionMismatch as exc:
        seen.findings.append(fail("protocol", name, f"a stock server or another release: {exc.message}", exc.hint))
    except NoAnswer as exc:
        seen.findings.append(fail("peer", name, f"it closes on HTTP, and HELLO: {exc.message}", exc.hint,
                                  trouble=exc.trouble))
    except HydraError as exc:
        seen.findings.append(fail("peer", name, f"{why.message}, and so does HELLO ({exc.message})", why.hint,
                                  trouble="closed"))
    else:
        seen.findings.append(ok("peer", name, "a stock ggml-rpc-server (or another plain ggml-RPC server): it "
                                "computes, and tells nothing of itself", stock=True))
        seen.findings += _version(seen.client, name)
        seen.findings.append(skip("sockets", name, "a stock server does not tell its socket options; the link check "
                                  "below measures what they do"))


def _version(client: PeerClient, name: str) -> Iterator[Finding]:
    theirs = ".".join(map(str, client.version or ()))
    text = f"ggml-RPC {theirs} there, {_PROTOCOL} here ({PINNED_OP_COUNT} ops)"
    if client.version != wire.PROTOCOL_VERSION:
        # A lower minor or another patch is let through by HELLO, and may still number its ops differently.
        yield warn("protocol", name, text, "Install the same release on both boxes.")
    else:
        yield ok("protocol", name, text)


def sockets(seen: Seen) -> Iterator[Finding]:
    """The options of the connections that this peer has accepted: HTTP's, ours for computing, and the heads'.

    To be asked last, when the compute connection has been in use for a while.
    """
    target = seen.target
    name = f"peer {target.name}"
    if not seen.hydra:
        return
    try:
        control = get(target, "/sockets").body.get("options") or {}
        stats = get(target, "/stats").body
    except NoAnswer as exc:
        yield fail("sockets", name, exc.message, exc.hint, trouble=exc.trouble)
        return
    if control:
        yield judge(f"{name}: health connection", control)
    own = None
    if seen.client is not None and target.tls is None:
        own = seen.client.socket.getsockname()
    for connection in stats.get("connections") or ():
        where = str(connection.get("peer", ""))
        ours = own is not None and where.rpartition(":")[0].strip("[]") == own[0] and where.endswith(f":{own[1]}")
        what = "this compute connection" if ours else f"head at {where}"
        yield judge(f"{name}: {what}", connection.get("options") or {})
    if stats.get("error"):
        yield warn("sockets", name, str(stats["error"]), "Its device worker does not answer: see its log.")


def judge(check: str, options: Mapping[str, Any]) -> Finding:
    """One accepted socket, as its server's kernel has it. options: as hydra.peer.sockets.read_options gives them."""
    if not options:
        return skip("sockets", check, "it does not tell its options")
    buffers = f"receive {int(options.get('rcvbuf', 0)) >> 10} KiB, send {int(options.get('sndbuf', 0)) >> 10} KiB"
    rtt = f", round trip {options['rtt_us'] / 1e3:.2f} ms" if options.get("rtt_us") else ""
    words = f"TCP_NODELAY {_on(options, 'nodelay')}, SO_KEEPALIVE {_on(options, 'keepalive')}, {buffers}{rtt}"
    data = dict(options)
    if not options.get("nodelay"):
        return fail("sockets", check, words, "Nagle's algorithm holds small replies back for up to 40 ms (decode up to "
                    "9x slower). Serve with `hydra up`, which sets it on every accepted socket.", **data)
    if not options.get("keepalive"):
        return warn("sockets", check, words, "A head that vanishes is never noticed: restart that peer with this "
                    "release of hydra.", **data)
    return ok("sockets", check, words, **data)


def _on(options: Mapping[str, Any], name: str) -> str:
    return "on" if options.get(name) else "OFF"
