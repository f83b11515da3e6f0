"""Sampler Entry: one sampler of a comparison, described by widgets or given as SAMPLER and SIGMAS."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..backend.flow.plan import MIXGRPO
from ..backend.flow.sigmas import check_sigmas
from ..backend.lab.entries import Entry, LabError
from ..backend.lab.spec import EntrySpec, parse_entry
from .checks import GraphError
from .mode import group_inputs, mode_inputs
from .schedule import SCHEDULES, schedule_inputs, sigma_table
from .types import CATEGORY, CompareEntries

_WINDOW = ("eta", "window_start", "window_size")


@dataclass(frozen=True)
class GraphEntry:
    """A sampler of a graph: settings and the schedule that their table is made by, or a SAMPLER with its SIGMAS."""

    label: str
    spec: EntrySpec | None = None
    schedule: str = SCHEDULES[0]
    sampler: Any = None
    sigmas: torch.Tensor | None = None

    def built(self, model: Any, latent: torch.Tensor) -> Entry:
        """The entry on this model and latent, with its cost where the settings tell it.

        Raises:
            LabError: its settings do not fit together; names the entry.
        """
        spec = self.spec
        try:
            if spec is None:
                check_sigmas(self.sigmas)
                return Entry(self.label, f"{_name_of(self.sampler)} (SAMPLER)", self.sigmas)
            shift = 1.0 if spec.shift == "dynamic" else spec.shift
            return spec.entry(lambda steps: sigma_table(self.schedule, steps, shift, model, latent))
        except LabError:
            raise
        except ValueError as error:
            raise LabError(f"the entry {self.label!r}: {error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """What it is, as plain data."""
        if self.spec is None:
            return {"label": self.label, "sampler": _name_of(self.sampler), "sigmas": self.sigmas.tolist()}
        return self.spec.model_dump(mode="json") | {"schedule": self.schedule}


def _name_of(sampler: Any) -> str:
    """What a SAMPLER is called."""
    function = getattr(sampler, "sampler_function", None)
    return getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")


class CompareEntry(io.ComfyNode):
    """One sampler more for Compare Samplers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        window = [entry for entry in group_inputs() if entry.id in _WINDOW]
        mode = [entry for entry in mode_inputs() if entry.id == "mode"]
        return io.Schema(
            node_id="MixGRPO_CompareEntry",
            display_name="Sampler Entry",
            category=CATEGORY,
            description="One sampler for Compare Samplers: MixGRPO's with the settings below, or any SAMPLER with its SIGMAS.",
            inputs=[
                io.String.Input("label", default="sampler", tooltip="What it is called in grid, table and chart; each its own."),
                *schedule_inputs(),
                *window,
                *mode,
                io.Sampler.Input(
                    "sampler", optional=True,
                    tooltip="Compared instead of MixGRPO's sampler with the settings above; needs sigmas.",
                ),
                io.Sigmas.Input("sigmas", optional=True, tooltip="The table of the connected sampler."),
                CompareEntries.Input("entries", optional=True, tooltip="Samplers that this one is added to."),
            ],
            outputs=[
                CompareEntries.Output("entries_out", display_name="ENTRIES", tooltip="For Compare Samplers, or the next entry."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, label, steps, schedule, shift, eta, window_start, window_size, mode=MIXGRPO, sampler=None, sigmas=None, entries=None
    ) -> io.NodeOutput:
        if (sampler is None) != (sigmas is None):
            given, missing = ("sampler", "sigmas") if sigmas is None else ("sigmas", "sampler")
            raise GraphError(
                f"the entry {label!r} has {given} but no {missing}; connect both, or none to use the settings on the node"
            )
        window = {"start": window_start, "size": window_size}
        fields = {"label": label, "steps": steps, "shift": "dynamic" if schedule == "dynamic shift" else shift, "eta": eta}
        spec = parse_entry(fields | {"window": window, "mode": dataclasses.asdict(mode)})
        if sampler is None:
            entry = GraphEntry(spec.label, spec, schedule)
        else:
            entry = GraphEntry(spec.label, sampler=sampler, sigmas=sigmas)
        return io.NodeOutput((*(entries or ()), entry))
