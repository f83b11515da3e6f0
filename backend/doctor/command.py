"""``mixgrpo doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import console
from .findings import Finding, as_json, faults, show


def doctor(
    comfyui: Annotated[Path | None, typer.Option(help="Folder of a ComfyUI to look at, too.")] = None,
    comfyui_python: Annotated[Path | None, typer.Option(help="ComfyUI's Python, where it is not in that folder.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what keeps this machine from training, and say what to do about it; exit code 1 when there is a fault."""
    findings = examine(comfyui, comfyui_python)
    if json:
        console.print(as_json(findings), markup=False, soft_wrap=True)
    else:
        show(findings)
    if faults(findings):
        raise typer.Exit(1)


def examine(comfyui: Path | None = None, comfyui_python: Path | None = None) -> list[Finding]:
    """All findings about this machine, and about a ComfyUI if its folder is given."""
    from . import checks, pythons
    from .comfyui import comfyui_findings

    findings = [
        *checks.project_findings(),
        *pythons.python_findings(),
        *checks.memory_findings(),
        *checks.disk_findings(),
        *checks.settings_findings(),
        *checks.backend_findings(),
        *checks.starter_findings(),
    ]
    return findings if comfyui is None else [*findings, *comfyui_findings(comfyui, comfyui_python)]
