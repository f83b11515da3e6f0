"""The plan of a job: sizes, memory, rows, time and disk; or why it cannot run here."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import MixGRPOError
from ..machine import size, total_memory
from ..places import data_dir
from ..rewards import SCORERS, make_scorer
from ..specs import TrainSpec
from ..train.ranks import RankError
from ..train.sharing import first_share
from .memory import Sizes, disk_bytes, phase_bytes, sizes, training_call_rows
from .past import PastRun, find_past_run
from .rows import WindowRows, rows_by_window

OVERHEAD = {"cpu": 600 * 2**20, "cuda": 700 * 2**20}
"""What a process needs besides tensors: Python and PyTorch's libraries, on a GPU its context and kernels (rounded up)."""


class DoesNotFit(MixGRPOError):
    """A job that needs more memory than there is; the message has both, and what to change."""


class BadSize(MixGRPOError):
    """An amount of memory that cannot be read."""


@dataclass(frozen=True)
class Plan:
    """What a job will cost.

    Attributes:
        device: "cuda" or "cpu", as the trainer would choose.
        memory: bytes that the tensors of one rank hold, by phase.
        needed: bytes a device needs: the largest phase and a process's overhead; on the CPU of all ranks together.
        available: bytes of memory that there are; None where the system does not say.
        rows_per_call: what the job says.
        rows: what an iteration costs at every window position, on all ranks together.
        past: what seconds are taken from; None when no run tells.
        disk: bytes of a checkpoint, of a LoRA, and in all.
    """

    name: str
    device: str
    ranks: int
    precision: str
    rows_per_call: int
    parameters: dict[str, int]
    memory: dict[str, int]
    needed: int
    available: int | None
    rows: list[WindowRows]
    pictures: int
    past: PastRun | None
    disk: dict[str, int]

    def seconds(self, rows: WindowRows) -> float | None:
        """Expected seconds of an iteration; None when no run tells."""
        return None if self.past is None else self.past.seconds(rows, self.pictures)

    @property
    def total_seconds(self) -> float | None:
        """Expected seconds of the whole job."""
        return None if self.past is None else sum(self.past.seconds(row, self.pictures) * row.iterations for row in self.rows)

    def as_data(self) -> dict[str, Any]:
        """The same as plain data."""
        fields = asdict(self) | {"seconds": self.total_seconds}
        fields["past"] = None if self.past is None else {**asdict(self.past), "folder": str(self.past.folder)}
        fields["rows"] = [
            {"start": row.window.start, "size": row.window.size, "seconds": self.seconds(row), **_without(asdict(row), "window")}
            for row in self.rows
        ]
        return fields


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def make_plan(spec: TrainSpec, ranks: int = 1, memory: int | None = None, runs: Path = Path("runs")) -> Plan:
    """Plan a job without loading anything.

    Args:
        memory: bytes of one device, when another than this machine's is meant.
        runs: besides the data folder's, the runs that may tell about time.

    Raises:
        DoesNotFit: it needs more memory than there is.
        MixGRPOError: scorer, picture size, window, noise level or ranks do not fit, as the trainer would say.
    """
    first_share(spec, ranks)
    for reward in (*spec.rewards, *spec.monitors):
        if reward.scorer not in SCORERS:
            make_scorer(reward.scorer)  # says which there are
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and ranks > torch.cuda.device_count() and memory is None:
        raise RankError(f"{ranks} ranks need a GPU each, there are {torch.cuda.device_count()}; use fewer, or more machines")
    rows, of = rows_by_window(spec, ranks), sizes(spec, ranks)
    plan = Plan(
        name=spec.name,
        device=device,
        ranks=ranks,
        precision=spec.model.precision,
        rows_per_call=spec.rows_per_call,
        parameters=of.parameters,
        memory=(phases := phase_bytes(spec, of, spec.rows_per_call, ranks)),
        needed=needed(phases, device, ranks),
        available=memory if memory is not None else _available(device),
        rows=rows,
        pictures=spec.prompts_per_iteration * spec.group_size,
        past=find_past_run([data_dir() / "runs", runs], spec, device, ranks),
        disk=disk_bytes(spec, of),
    )
    if plan.available is not None and plan.needed > plan.available:
        raise DoesNotFit(_refusal(plan, spec, of))
    return plan


def needed(phases: dict[str, int], device: str, ranks: int) -> int:
    """Bytes that a device needs; ranks on the CPU share one memory."""
    return (max(phases.values()) + OVERHEAD[device]) * (ranks if device == "cpu" else 1)


def _available(device: str) -> int | None:
    if device == "cpu":
        return total_memory()
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def _refusal(plan: Plan, spec: TrainSpec, of: Sizes) -> str:
    """What is needed, what there is, and the least that has to change."""
    worst = max(plan.memory, key=lambda phase: plan.memory[phase])
    said = (
        f"{plan.name} needs {size(plan.needed)} of memory on {plan.device} (most of it in the phase {worst}, "
        f"{size(plan.memory[worst])} a rank), and there are {size(plan.available or 0)}"
    )
    rows = spec.rows_per_call
    while rows > 1:
        rows //= 2
        least = needed(phase_bytes(spec, of, rows, plan.ranks), plan.device, plan.ranks)
        if least <= (plan.available or 0):
            return f"{said}; set rows_per_call to {rows}, which needs {size(least)} and changes nothing else"
    smallest = training_call_rows(spec, 1)
    return (
        f"{said}; even with rows_per_call 1 it does not fit (a training call has {smallest} rows at least). Use smaller "
        "pictures, fewer prompts_per_iteration, more updates_per_rollout, a smaller lora.rank, or a device with more memory"
    )


def parse_size(text: str) -> int:
    """Bytes from text such as 8GiB, 8GB, 8192 MiB or 8g; raises :class:`BadSize`.

    GB and the like are powers of 1000, GiB and single letters powers of 1024.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    if match is None or float(match.group(1)) <= 0:
        raise BadSize(f"{text!r} is no amount of memory; write it like 8GiB")
    number, unit, binary, byte = match.groups()
    base = 1000 if unit and byte and not binary else 1024
    return int(float(number) * base ** " kmgt".index(unit or " "))

