"""`hydra doctor`: the findings of hydra/doctor, grouped, each with its evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from .. import console
from ..doctor.examine import examine
from ..doctor.finding import GROUPS, Finding, count, summary

MARKS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def run(file: str | None, node: str | None, peers: Sequence[str], *, as_json: bool) -> int:
    """Returns 1 when anything failed, else 0. Raises: ConfigError for a node or peer that cannot be meant."""
    findings: list[Finding] = []
    with console.Status() as status:
        for finding in examine(file, node, peers, status.update):
            findings.append(finding)
    findings.sort(key=lambda finding: GROUPS.index(finding.group))
    if as_json:
        console.result_json({"findings": [finding.to_dict() for finding in findings], "counts": count(findings),
                             "summary": summary(findings)})
    else:
        group = ""
        for finding in findings:
            if finding.group != group:
                group = finding.group
                console.heading(group)
            console.marked(finding.status, MARKS[finding.status], f"{finding.check}: {finding.seen}")
            if finding.fix:
                console.marked("", "", f"→ {finding.fix}")
        console.result("")
        console.result(summary(findings))
    return 1 if count(findings)["fail"] else 0
