"""``mixgrpo plan``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import console
from ..machine import size

if TYPE_CHECKING:
    from .plan import Plan


def plan(
    job: Annotated[Path, typer.Argument(help="Job file, YAML or JSON.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train with, one per GPU.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory of one device, such as 24GiB (default: this machine's).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a job will cost before anything is loaded: memory by phase, model rows, time, disk; refuse what cannot fit."""
    from ..specs import load_job
    from .plan import make_plan, parse_size

    made = make_plan(load_job(job), ranks, None if memory is None else parse_size(memory))
    if json:
        console.print(json_format.dumps(made.as_data(), indent=2), markup=False, soft_wrap=True)
    else:
        _show(made)


def _show(plan: Plan) -> None:
    counts = ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items())
    _line("parameters", counts)
    _line("choice", f"{plan.device}, {plan.precision}, {plan.rows_per_call} rows a call, {plan.ranks} rank{_s(plan.ranks)}")
    phases = ", ".join(f"{name} {size(count)}" for name, count in plan.memory.items())
    _line("memory", f"{phases} (tensors of one rank; without scorers)")
    there = "unknown" if plan.available is None else size(plan.available)
    _line("", f"needed {size(plan.needed)} with PyTorch itself, available {there}")
    for row in plan.rows:
        seconds = plan.seconds(row)
        last = row.window.start + row.window.size - 1
        where = f"window {row.window.start}–{last}, {row.iterations} iteration{_s(row.iterations)}"
        time = "" if seconds is None else f", {seconds:.3g} s"
        base = f" + {row.reference} rows of the base" if row.reference else ""
        _line("an iteration", f"{where}: {row.rollout} rows rollout + {row.training} rows training{base} (NFE {row.nfe}){time}")
    if plan.past is None:
        _line("time", "unknown: no run of this model, size, device and number of ranks is in the data folder or in runs/")
    else:
        _line("time", f"{plan.total_seconds:.3g} s in all, from {plan.past.iterations} iterations of {plan.past.folder}")
    disk = plan.disk
    loras = f"{disk['loras']} LoRA{_s(disk['loras'])} of {size(disk['lora'])}"
    _line("disk", f"{size(disk['total'])}: {loras}, checkpoints of {size(disk['checkpoint'])}")


def _line(topic: str, text: str) -> None:
    console.print(f"{topic:<12}  {text}", markup=False, soft_wrap=True)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
