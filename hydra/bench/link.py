"""A slower network on one machine: two network namespaces, a veth pair between them, each end shaped by ``tc``.

The rate is a token bucket (tbf) on both ends, so that each direction has its own. The delay is netem's where the
kernel has it; where not, a relay of the benchmark's own (relay.py) holds every byte for as long, and the report says
so. Needs root (or CAP_NET_ADMIN); says so plainly where it has not. Knows nothing of what is measured over it.

Rules: tc-tbf(8), tc-netem(8), ip-netns(8). Addresses are TEST-NET-1 (RFC 5737), reachable from inside the namespaces
only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.bench.process import Child, free_port, worker_command
from hydra.errors import ConfigError, HydraError

_RATE_UNITS = {"": 1, "bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Small enough that a step's messages are not let through unshaped, large enough for one segment of the largest offload.
_BURST_BYTES = 64 << 10
_UNSHAPED_BITS = 30e9


def parse_rate(text: str) -> float:
    """ "1gbit" → bits per second. Raises: ConfigError."""
    return _number(text, _RATE_UNITS, "rate", "1gbit or 100mbit")


def parse_delay(text: str) -> float:
    """ "0.2ms" → seconds. Raises: ConfigError."""
    return _number(text, _DELAY_UNITS, "delay", "0.2ms, 200us or 0")


def parse_link(text: str) -> tuple[float, float]:
    """ "RATE,DELAY" → (bits per second, one-way delay in seconds). Raises: ConfigError."""
    rate, comma, delay = text.partition(",")
    return parse_rate(rate), parse_delay(delay) if comma else 0.0


def _number(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units:
        raise ConfigError(f"{text!r} is no {what}.", f"Write it like {example}.")
    return float(match[1]) * units[match[2]]


class Link:
    """A shaped link that exists while a ``with`` block runs; ``description`` says how it was made.

    ``delay_s`` is one way; a round trip takes twice that.

    Raises (on entry): HydraError when this machine or user cannot make namespaces.
    """

    head_address = "192.0.2.1"
    peer_address = "192.0.2.2"

    def __init__(self, rate_bits: float, delay_s: float) -> None:
        self.rate_bits = rate_bits
        self.delay_s = delay_s
        tag = f"hydra{os.getpid()}"
        self.head_netns, self.peer_netns = f"{tag}h", f"{tag}p"
        self._relay_delay_s = 0.0
        self.description = ""

    def __enter__(self) -> Link:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise HydraError(f"--link needs `{tool}`, which is not installed here.", "Install iproute2.")
        _remove_abandoned()
        try:
            self._make()
        except HydraError:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @contextmanager
    def unshaped(self) -> Iterator[None]:
        """Meanwhile the rate is as good as none: for what is not measured, such as a load."""
        self._set_rate(_UNSHAPED_BITS)
        try:
            yield
        finally:
            self._set_rate(self.rate_bits)

    def _set_rate(self, bits: float) -> None:
        for netns in (self.head_netns, self.peer_netns):
            _tc(netns, "change", "dev", "veth0", "root", "handle", "1:", "tbf", *_tbf(bits))

    @contextmanager
    def relayed(self, host: str, port: int) -> Iterator[str]:
        """What a head in ``head_netns`` connects to for a peer at ``host:port``: the relay, where one is needed."""
        if not self._relay_delay_s:
            yield f"{host}:{port}"
            return
        own = free_port()
        arguments = ["--listen", f"{host}:{own}", "--forward", f"{host}:{port}", "--delay", repr(self._relay_delay_s)]
        with Child(worker_command("relay", arguments), netns=self.peer_netns) as relay:
            relay.wait_listening(own)
            yield f"{host}:{own}"

    def _make(self) -> None:
        ends = ((self.head_netns, self.head_address), (self.peer_netns, self.peer_address))
        for netns, _ in ends:
            _ip("netns", "add", netns)
        _ip(
            "link",
            "add",
            "veth0",
            "netns",
            self.head_netns,
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            self.peer_netns,
        )
        for netns, address in ends:
            _ip("-n", netns, "address", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", netns, "link", "set", "lo", "up")
            _ip("-n", netns, "link", "set", "veth0", "up")
            _tc(netns, "add", "dev", "veth0", "root", "handle", "1:", "tbf", *_tbf(self.rate_bits))
        netem = bool(self.delay_s) and all(self._netem(netns) for netns, _ in ends)
        if self.delay_s and not netem:
            self._relay_delay_s = self.delay_s
        by = "netem" if netem else "a relay of the benchmark's own, because this kernel has no netem"
        self.description = f"{self.rate_bits / 1e6:g} Mbit/s each way (tc tbf)"
        self.description += f", {self.delay_s * 1e3:g} ms each way by {by}" if self.delay_s else ", no added delay"

    def _netem(self, netns: str) -> bool:
        """Under the token bucket, so that the rate is kept and then the bytes wait."""
        arguments = (
            "add",
            "dev",
            "veth0",
            "parent",
            "1:1",
            "netem",
            "delay",
            f"{self.delay_s * 1e6:.0f}us",
            "limit",
            "100000",
        )
        with contextlib.suppress(HydraError):
            _tc(netns, *arguments)
            return True
        return False

    def _remove(self) -> None:
        for netns in (self.head_netns, self.peer_netns):
            subprocess.run(["ip", "netns", "delete", netns], capture_output=True, check=False)


def _tbf(bits: float) -> list[str]:
    return ["rate", f"{bits:.0f}bit", "burst", str(_BURST_BYTES), "latency", "200ms"]


def _remove_abandoned() -> None:
    """Namespaces of a benchmark that was killed: nothing else would ever remove them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=False).stdout
    for pid, end in re.findall(r"^hydra(\d+)([hp])\b", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "delete", f"hydra{pid}{end}"], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _tc(netns: str, *arguments: str) -> None:
    _run("tc", "-n", netns, "qdisc", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise HydraError(
            f"`{' '.join(command)}` failed: {said}.",
            "--link needs the rights to make network namespaces (root or CAP_NET_ADMIN).",
        )
