"""Write the findings and verdicts as JSON types and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..core.spelling import markdown_text
from .abilities import Verdict
from .probes import Finding

SIGNS = {"ok": "✓", "limited": "!", "missing": "-", "broken": "✗"}


def as_dict(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return findings and verdicts as JSON types."""
    return {
        "findings": [{**asdict(finding), "items": list(finding.items)} for finding in findings],
        "commands": [
            {
                "command": verdict.ability.command,
                "does": verdict.ability.does,
                "able": verdict.able,
                "lacks": list(verdict.lacks),
                "add": list(verdict.add),
            }
            for verdict in verdicts
        ],
    }


def as_markdown(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Write two tables and the commands that add what is missing, for a bug report."""
    lines = ["# localattn doctor", "", "| | what | version | found | for |", "|---|---|---|---|---|"]
    for finding in findings:
        row = (finding.title, finding.version, found_text(finding), finding.serves)
        lines.append(_row(SIGNS[finding.status], *map(markdown_text, row)))
    lines += ["", "| | command | does | lacks |", "|---|---|---|---|"]
    for verdict in verdicts:
        sign = SIGNS["ok" if verdict.able else "missing"]
        command = f"`localattn {verdict.ability.command}`"
        lines.append(_row(sign, command, *map(markdown_text, (verdict.ability.does, ", ".join(verdict.lacks)))))
    commands = commands_to_add(verdicts)
    if commands:
        lines += ["", "To add what is missing:", "", "```sh", *commands, "```"]
    return "\n".join(lines)


def found_text(finding: Finding) -> str:
    """Write status, detail and items of a finding in one line."""
    said = [finding.detail, *finding.items]
    if finding.status in ("missing", "broken"):
        said.insert(0, finding.status)
    return "; ".join(part for part in said if part)


def commands_to_add(verdicts: Sequence[Verdict]) -> list[str]:
    """List every command that adds something, once, in the order of the commands that need it."""
    return list(dict.fromkeys(line for verdict in verdicts for line in verdict.add))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
