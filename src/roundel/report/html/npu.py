"""The predicted split between NPU and CPU, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundel.report.html.numbers import short

if TYPE_CHECKING:
    from roundel.check.types import CheckReport, Finding, NodePlace


def npu_values(check: CheckReport) -> dict[str, Any]:
    """Islands, the nodes that stay outside, and the findings by rule."""
    split = check.before
    return {
        "device": check.device,
        "format": check.format,
        "islands": split.islands,
        "npu": split.npu_nodes,
        "cpu": split.cpu_nodes,
        "macs": split.macs,
        "share": short(split.npu_share),
        "strip": [[node.name, node.op, -1 if node.island is None else node.island] for node in split.nodes],
        "outside": _outside(split.nodes),
        "findings": _findings(check.findings),
        "notes": list(check.notes),
    }


def _outside(nodes: tuple[NodePlace, ...]) -> list[dict[str, Any]]:
    """Nodes on the CPU, by reason."""
    groups: dict[tuple[str, str], list[NodePlace]] = {}
    for node in nodes:
        if node.island is None:
            groups.setdefault((node.rule or "", node.reason), []).append(node)
    return [
        {"rule": rule, "reason": reason, "nodes": [[node.name, node.op] for node in members]}
        for (rule, reason), members in groups.items()
    ]


def _findings(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity.value, finding.fix), []).append(finding)
    return [
        {
            "rule": rule,
            "level": level,
            "title": members[0].title,
            "why": members[0].why,
            "fix": fix,
            "hits": [[hit.subject, hit.message] for hit in members],
        }
        for (rule, level, fix), members in groups.items()
    ]
