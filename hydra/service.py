"""The systemd unit of this box's node: its text, and where it lies. hydra/commands/service.py acts on it.

The node runs as the user who installs it and not as a user of its own: its weights, its certificates and, as one file,
its program lie in that user's home. Everything else is taken away: it writes to its cache and its state alone, gains no
privileges, and of all devices has the GPU's.

Source: systemd.exec(5), systemd.service(5), systemd.resource-control(5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

NAME = "hydra.service"
UNIT_FILE = Path("/etc/systemd/system") / NAME
ENVIRONMENT_FILE = "/etc/hydra/environment"
NVIDIA_MODPROBE = Path("/usr/bin/nvidia-modprobe")

UNIT = """\
# Written by `hydra service install`; `hydra service uninstall` removes it.
[Unit]
Description=hydra: {node} ({role})
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={user}
{prepare}ExecStart={command}
{reload}# Settings and secrets that are not in hydra.toml, as HYDRA_HEAD_API_KEY=…
EnvironmentFile=-{environment}
# With code 2 hydra.toml is at fault, and another start does not mend that.
Restart=on-failure
RestartPreventExitStatus=2
RestartSec=2
# It ends its own children; what is left after the time is killed.
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
UMask=0077
LimitNOFILE=65536

NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={writable}
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
DevicePolicy=closed
{devices}
[Install]
WantedBy=multi-user.target
"""
# By the names of /proc/devices: the numbers of some are given out when the driver is loaded.
GPU_DEVICES = "DeviceAllow=char-nvidia* rw\n"
# The driver makes its device files at the first use, by a set-uid program that NoNewPrivileges keeps from doing so.
PREPARE = "ExecStartPre=-+{program} -c 0 -u\n"
# The shell's own kill: the program of that name is not on every box.
RELOAD = "ExecReload=/bin/sh -c 'kill -HUP $MAINPID'\n"


@dataclass(frozen=True)
class Service:
    """What the unit is made of. command: the words of `hydra up …`; writable: folders; stop_s: longest time to end."""

    node: str
    role: str
    user: str
    command: tuple[str, ...]
    writable: tuple[str, ...]
    stop_s: float
    gpu: bool
    modprobe: str = ""

    def text(self) -> str:
        """The unit file. Raises: ConfigError where a value cannot stand in one."""
        return UNIT.format(
            node=literal(self.node), role=self.role, user=self.user, command=command_line(self.command),
            environment=ENVIRONMENT_FILE, stop_s=self.stop_s, reload=RELOAD if self.role == "head" else "",
            writable=" ".join(f"{quoted(folder)}" for folder in self.writable),
            prepare=PREPARE.format(program=self.modprobe) if self.gpu and self.modprobe else "",
            devices=GPU_DEVICES if self.gpu else "",
        )


def literal(text: str) -> str:
    """Text in which systemd is to see no specifier. Raises: ConfigError for control characters."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ConfigError(f"{text!r} cannot stand in a systemd unit: it has control characters.", "Rename it.")
    return text.replace("%", "%%")


def quoted(word: str) -> str:
    """One word of a list, in quotes where it needs them."""
    text = literal(word)
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def command_line(words: Sequence[str]) -> str:
    """The words of ExecStart: quoted, and with no variable to be expanded.

    Raises: ConfigError where the program is not named by its whole path.
    """
    if not words or not words[0].startswith("/"):
        raise ConfigError(f"systemd starts programs by their whole path, and this is {' '.join(words[:1]) or 'none'}.")
    return " ".join(quoted(word.replace("$", "$$")) for word in words)


def summary(properties: str) -> dict[str, str]:
    """`systemctl show`'s KEY=VALUE lines as a dict."""
    return dict(line.split("=", 1) for line in properties.splitlines() if "=" in line)
