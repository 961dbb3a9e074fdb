"""The one tree of errors that hydra raises on purpose.

    HydraError                 exit code 1
    ├── ConfigError            2   hydra.toml, environment or command line cannot be used
    ├── LibraryError           3   llama.cpp's shared libraries are missing, wrong or of another version
    ├── DeviceError            4   a compute device is missing, out of memory or failed
    │   └── DeviceMissing      4   the one asked for is not there, and will not be at the next try either
    ├── PeerError              5   something about the other box
    │   ├── PeerUnreachable    5   nobody answers there
    │   └── VersionMismatch    5   both ends work, but not with each other
    ├── ProtocolError          6   bytes on the wire that the protocol does not allow
    ├── ModelError             7   a GGUF file that cannot be fetched, read, split or fitted
    ├── EngineError            8   the engine child failed
    └── RequestError           9   one request cannot be served (bad parameters, context full)

Every error is a message (what happened, with the numbers) and a hint (what to do). Foreign errors are translated once,
at the boundary, with ``raise … from``. Only ``hydra.cli`` turns them into exit codes; nothing here prints or exits.
"""

from __future__ import annotations

from collections.abc import Iterable


class HydraError(Exception):
    """Base of all errors that a user may see: one line of what happened, one of what to do."""

    exit_code = 1
    usual_hint = "--debug shows where it comes from; `hydra doctor` examines this box."
    """What the terminal says where an error has no hint of its own."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class ConfigError(HydraError):
    exit_code = 2
    usual_hint = "`hydra config check` says what was understood; docs/config.md has every key."


class LibraryError(HydraError):
    exit_code = 3
    usual_hint = "`hydra doctor` examines the libraries; install the release that constraints.txt names."


class DeviceError(HydraError):
    exit_code = 4
    usual_hint = "`hydra doctor` examines the devices of this box."


class DeviceMissing(DeviceError):
    @classmethod
    def among(cls, name: str, here: Iterable[str]) -> DeviceMissing:
        """Device ``name`` was asked for; ``here`` are the names that there are."""
        return cls(
            f"There is no device {name}; this box has {', '.join(here) or 'none'}.",
            "Set the node's `device` in hydra.toml to one of these. A missing GPU: see `hydra doctor`.",
        )


class PeerError(HydraError):
    exit_code = 5
    usual_hint = "`hydra doctor` examines the peers and the wire between."


class PeerUnreachable(PeerError):
    pass


class VersionMismatch(PeerError):
    pass


class ProtocolError(HydraError):
    exit_code = 6
    usual_hint = "Both boxes need the same release: compare `hydra version` on each."


class ModelError(HydraError):
    exit_code = 7
    usual_hint = "`hydra plan` reads the file; fetch it again, or take another."


class EngineError(HydraError):
    exit_code = 8
    usual_hint = "Its log says more, with --debug all of it; `hydra doctor` examines this box."


class RequestError(HydraError):
    exit_code = 9
    usual_hint = "Change the request: docs/api.md has what it may be."
