"""Shows what presets set."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .console import console
from .specs.presets import PRESETS, Preset, find_preset, merged, settings


def presets(name: Annotated[str | None, typer.Argument(help="Show what this preset sets.")] = None) -> None:
    """List published settings that a job can begin with, or show one."""
    if name is None:
        for title, preset in PRESETS.items():
            console.print(f"{title:<20}{preset.says}", markup=False, soft_wrap=True)
        return
    show_preset(name, {})


def show_preset(name: str, own: dict[str, Any]) -> None:
    """Print what a preset sets, and where the job's ``own`` fields say otherwise."""
    preset = find_preset(name)
    console.print(f"{name}: {preset.says} ({preset.source})", markup=False, soft_wrap=True)
    job = dict(settings(merged(preset.fields, own)))
    for where, value in settings(preset.fields):
        note = _note(where, preset)
        if job.get(where) != value:
            note = f"the job's: {job[where]}" if where in job else "the job's own"
        console.print(f"  {where:<32}{value!s:<14}{note}", markup=False, highlight=False, soft_wrap=True)


def _note(where: str, preset: Preset) -> str:
    if where == "optimizer.learning_rate" and preset.full_learning_rate is not None:
        return f"for a LoRA; published for all parameters: {preset.full_learning_rate:g}"
    return ""
