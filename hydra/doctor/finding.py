"""What a check hands back: what was looked at, what was seen, and what to do about it.

Knows nothing of any check. A finding is a sentence for a person and, in `data`, the same in figures for `--json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]
# The order of groups in a report: from what the box is to what two boxes do together.
GROUPS = ("config", "library", "gpu", "system", "network", "peer", "protocol", "sockets", "link", "compute")


@dataclass(frozen=True)
class Finding:
    """One check's outcome.

    check: what was looked at (with the peer's name where there are several); seen: the evidence, with its numbers;
    fix: what to do, empty where nothing is to be done; data: the figures. skip: could not be looked at, and seen says
    why.
    """

    group: str
    check: str
    status: Status
    seen: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(group: str, check: str, seen: str, **data: Any) -> Finding:
    return Finding(group, check, "ok", seen, "", data)


def warn(group: str, check: str, seen: str, fix: str, **data: Any) -> Finding:
    return Finding(group, check, "warn", seen, fix, data)


def fail(group: str, check: str, seen: str, fix: str, **data: Any) -> Finding:
    return Finding(group, check, "fail", seen, fix, data)


def skip(group: str, check: str, seen: str) -> Finding:
    return Finding(group, check, "skip", seen)


def count(findings: Iterable[Finding]) -> dict[str, int]:
    """How many of each status: ok, warn, fail, skip."""
    result = {"ok": 0, "warn": 0, "fail": 0, "skip": 0}
    for finding in findings:
        result[finding.status] += 1
    return result


def summary(findings: Iterable[Finding]) -> str:
    """The last line of a report: `1 failure, 2 warnings, 31 checks passed, 3 not possible.`"""
    counts = count(findings)
    parts = []
    if counts["fail"]:
        parts.append(f"{counts['fail']} failure{'s' if counts['fail'] > 1 else ''}")
    if counts["warn"]:
        parts.append(f"{counts['warn']} warning{'s' if counts['warn'] > 1 else ''}")
    parts.append(f"{counts['ok']} checks passed")
    if counts["skip"]:
        parts.append(f"{counts['skip']} not possible")
    return ", ".join(parts) + "."
