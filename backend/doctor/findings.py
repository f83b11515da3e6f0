"""What a doctor says: findings, each of them fine, worth knowing, or a fault with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..console import console

Level = Literal["ok", "note", "fault"]
_COLOURS: dict[Level, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it is about, the same word for everything of one kind.
        level: ok; note, when nothing needs to be done; fault, when something does.
        message: what was found.
        remedy: what to do, in one sentence; every fault has one.
        facts: the same for programs, by name.
    """

    topic: str
    level: Level
    message: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level == "fault" and not self.remedy:
            raise ValueError(f"a fault must say what to do: {self.message}")


def ok(topic: str, message: str, **facts: Any) -> Finding:
    """Something that is as it should be."""
    return Finding(topic, "ok", message, facts=facts)


def note(topic: str, message: str, remedy: str = "", **facts: Any) -> Finding:
    """Something worth knowing."""
    return Finding(topic, "note", message, remedy, facts)


def fault(topic: str, message: str, remedy: str, **facts: Any) -> Finding:
    """Something that stands in the way."""
    return Finding(topic, "fault", message, remedy, facts)


def faults(findings: Sequence[Finding]) -> int:
    """How many of them are faults."""
    return sum(finding.level == "fault" for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """One object: ``ok``, the number of ``faults`` and ``notes``, and all ``findings``."""
    rows = [
        {"topic": one.topic, "level": one.level, "message": one.message, "remedy": one.remedy, "facts": one.facts}
        for one in findings
    ]
    notes = sum(one.level == "note" for one in findings)
    counts = {"ok": not faults(findings), "faults": faults(findings), "notes": notes}
    return json.dumps(counts | {"findings": rows}, indent=2, ensure_ascii=False)


def show(findings: Sequence[Finding]) -> None:
    """For people: one line each, the remedy below it, and a last line that counts."""
    width = max(len(one.topic) for one in findings)
    for one in findings:
        console.print(f"[{_COLOURS[one.level]}]{one.level:<5}[/]  {one.topic:<{width}}  ", end="")
        console.print(one.message, markup=False, soft_wrap=True)
        if one.remedy:
            console.print(f"{'':<{width + 9}}→ {one.remedy}", markup=False, soft_wrap=True)
    found = faults(findings)
    console.print("no faults" if not found else f"{found} fault{'s' if found > 1 else ''}; the arrows say what to do")
