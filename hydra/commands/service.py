"""`hydra service`: this box's node as a systemd service. Says each thing that it does before it does it.

The unit's text is hydra/service.py's; here are root's steps: write, enable, remove, ask. The unit is checked by
systemd-analyze before it is put in its place, where that program is there.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import config, console, nodes, service
from ..errors import ConfigError, HydraError

STOP_MARGIN_S = 15.0
COMMAND_S = 120.0
SHOWN = ("LoadState", "UnitFileState", "ActiveState", "SubState", "MainPID", "NRestarts", "ExecMainStatus",
         "ActiveEnterTimestamp")


def install(file: str | None, node: str | None, user: str, *, start: bool, dry_run: bool) -> None:
    """Write the unit, enable it and start it. Raises: HydraError where this box has no systemd or refuses the unit."""
    account = _account(user)
    os.environ["HOME"] = account.pw_dir  # ~ in hydra.toml is to be that of the user whom the service runs as
    path = config.find(file).absolute()
    unit = plan(config.load(path), node, account.pw_name, Path(account.pw_dir), program()).text()
    _not_in_tmp(path)
    if dry_run:
        console.result(unit.rstrip("\n"))
        return
    _need_root()
    verify(unit)
    for folder in _folders(Path(account.pw_dir)):
        if not folder.is_dir():
            console.note(f"Making {folder}, of {account.pw_name}.")
            _make(folder, account)
    console.note(f"Writing {service.UNIT_FILE}:")
    console.note("".join(f"    {line}\n" for line in unit.splitlines()).rstrip("\n"))
    temporary = service.UNIT_FILE.with_name(f".{service.NAME}.new")
    temporary.write_text(unit, encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(service.UNIT_FILE)
    _systemctl("daemon-reload")
    _systemctl("enable", service.NAME)
    if start:
        _systemctl("restart", service.NAME)  # a start would leave an older unit's process running
    console.note("`hydra service status` says how it is; `journalctl -u hydra -f` shows its log.")


def uninstall(*, dry_run: bool) -> None:
    """Stop the service and remove the unit; weights, configuration and certificates stay."""
    if not service.UNIT_FILE.exists():
        raise HydraError(f"There is no service of hydra on this box ({service.UNIT_FILE}).")
    if dry_run:
        console.result(f"systemctl disable --now {service.NAME}")
        console.result(f"rm {service.UNIT_FILE}")
        console.result("systemctl daemon-reload")
        return
    _need_root()
    _systemctl("disable", "--now", service.NAME)
    console.note(f"Removing {service.UNIT_FILE}.")
    service.UNIT_FILE.unlink()
    _systemctl("daemon-reload")


def status(*, as_json: bool) -> int:
    """Returns 0 when the service runs, else 1."""
    found = {"LoadState": "not-found", "ActiveState": "inactive"}
    if shutil.which("systemctl"):
        done = subprocess.run(["systemctl", "show", service.NAME, f"--property={','.join(SHOWN)}"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            raise HydraError(f"systemd does not answer: {done.stderr.strip() or done.returncode}.",
                             "Is systemd what this box was started with?")
        found |= service.summary(done.stdout)
    elif service.UNIT_FILE.exists():
        raise HydraError(f"{service.UNIT_FILE} is there, and this box has no systemctl.", "Install systemd.")
    running = found["ActiveState"] == "active"
    if as_json:
        console.result_json({"unit": str(service.UNIT_FILE), "installed": found["LoadState"] != "not-found",
                             "enabled": found.get("UnitFileState") == "enabled", "running": running,
                             "state": found["ActiveState"], "substate": found.get("SubState", ""),
                             "pid": int(found.get("MainPID") or 0), "restarts": int(found.get("NRestarts") or 0),
                             "exit_status": int(found.get("ExecMainStatus") or 0),
                             "since": found.get("ActiveEnterTimestamp", "")})
    elif found["LoadState"] == "not-found":
        console.result("not installed (`hydra service install`)")
    else:
        words = [f"{found['ActiveState']} ({found.get('SubState', '')})", found.get("UnitFileState") or "not enabled"]
        words += [f"process {found['MainPID']}", f"since {found.get('ActiveEnterTimestamp', '')}"] if running else [
            f"last exit code {found.get('ExecMainStatus', '0')}"]
        words += [f"{found.get('NRestarts') or 0} restarts"]
        console.result(", ".join(words))
    return 0 if running else 1


def plan(cfg: config.Config, name: str | None, user: str, home: Path, words: Sequence[str]) -> service.Service:
    """The service of this box's node. words: how this program is started, without arguments."""
    me = nodes.this_node(cfg, name).node
    writable = _folders(home)
    if me.role == "peer" and cfg.peer.cache_dir:
        writable.append(Path(cfg.peer.cache_dir))
    kept = [str(folder) for folder in writable
            if not any(other != folder and folder.is_relative_to(other) for other in writable)]
    modprobe = str(service.NVIDIA_MODPROBE) if service.NVIDIA_MODPROBE.exists() else ""
    # A cache_dir of the user's own choice may be on a disk that is not there yet; "-": then it is not an error.
    writable_words = [folder if Path(folder) in _folders(home) else f"-{folder}" for folder in dict.fromkeys(kept)]
    return service.Service(
        me.name, me.role, user, (*words, "up", "--config", str(cfg.path.absolute()), "--node", me.name),
        tuple(writable_words), cfg.head.grace_s + STOP_MARGIN_S, me.device.upper() != "CPU", modprobe)


def program() -> list[str]:
    """The words that start this program: the one file, the installed script, or Python with the package."""
    if getattr(sys, "frozen", False):
        return [os.environ.get("_HYDRA_FILE") or sys.executable]
    script = Path(sys.executable).with_name("hydra")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "hydra"]


def verify(unit: str) -> None:
    """Have systemd read the unit before it is installed. Raises: HydraError with its words."""
    if not shutil.which("systemd-analyze"):
        console.note("systemd-analyze is not on this box: the unit is installed unchecked.")
        return
    with tempfile.TemporaryDirectory(prefix="hydra-service-") as folder:
        path = Path(folder) / service.NAME
        path.write_text(unit, encoding="utf-8")
        console.note("Checking the unit with systemd-analyze verify.")
        # Not the units that it names, which are the system's own affair.
        done = subprocess.run(["systemd-analyze", "verify", "--recursive-errors=no", str(path)],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise HydraError(f"systemd refuses the unit: {' '.join((done.stderr or done.stdout).split())}.",
                         "`hydra service install --dry-run` shows it.")


def _folders(home: Path) -> list[Path]:
    """What the node writes besides weights: its unpacked program and models, its state."""
    return [home / ".cache" / "hydra", home / ".local" / "state" / "hydra"]


def _account(user: str) -> pwd.struct_passwd:
    """The user whom the service runs as: the one named, else whoever called sudo, else this one."""
    name = user or os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"This box has no user {name!r}.", "Name one with --user.") from None


def _make(folder: Path, account: pwd.struct_passwd) -> None:
    """The folder, and those above it that are missing, as the user's own."""
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        os.chown(each, account.pw_uid, account.pw_gid)


def _not_in_tmp(path: Path) -> None:
    for each in (path, Path(program()[0])):
        if each.is_relative_to("/tmp") or each.is_relative_to("/var/tmp"):
            raise ConfigError(f"{each} would not be there for the service, which has a /tmp of its own.",
                              "Move it to the home or to /opt.")


def _need_root() -> None:
    if os.geteuid() != 0:
        raise HydraError("Services are root's.", f"Run it with sudo: sudo {program()[0]} service …")
    if not Path("/run/systemd/system").is_dir():
        raise HydraError("This box was not started by systemd, so there is nothing to install a service in.",
                         "`hydra up --detach` runs the node in the background.")


def _systemctl(*arguments: str) -> None:
    console.note(f"Running systemctl {' '.join(arguments)}.")
    done = subprocess.run(["systemctl", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=COMMAND_S)
    if done.returncode:
        raise HydraError(f"systemctl {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}.",
                         "`systemctl status hydra` and `journalctl -u hydra` say more.")
