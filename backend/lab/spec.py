"""The settings of a comparison, as a file or a graph gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..errors import MixGRPOError
from ..flow.dynamics import SDE_DYNAMICS
from ..flow.plan import RolloutPlan, SamplingMode, plan_rollout
from ..flow.sigmas import dynamic_shift, shifted_sigmas
from ..flow.solvers import SOLVERS
from ..flow.window import Window
from ..specs import ModelSpec, RewardSpec
from ..specs.job import Count, Index, Seed, Shift, _parse, _Spec, read_fields
from .entries import Case, Entry, check_equal_nfe, check_labels, check_memory

Dynamics = Literal[tuple(SDE_DYNAMICS)]
SolverName = Literal[tuple(SOLVERS)]


class EntryWindow(_Spec):
    """The stochastic steps: ``size`` of them from ``start``; size 0 is the plain ODE."""

    start: Index = 0
    size: Index = 4


class EntrySpec(_Spec):
    """One sampler; the fields are those of a schedule, a window and a :class:`~..flow.plan.SamplingMode`."""

    label: str
    steps: Annotated[int, Field(ge=1, le=1000)] = 25
    shift: Shift = 3.0
    eta: Annotated[float, Field(ge=0, le=10)] = 0.7
    window: EntryWindow = EntryWindow()
    dynamics: Dynamics = "flow_sde"
    solver: SolverName = "euler"
    solver_after: SolverName | None = None
    history: Literal["carry", "reset"] = "carry"
    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("label")
    @classmethod
    def _label_says_something(cls, label: str) -> str:
        if not 1 <= len(label.strip()) <= 60:
            raise ValueError("must be 1 to 60 characters")
        return label.strip()

    @property
    def mode(self) -> SamplingMode:
        """How its steps are taken."""
        return SamplingMode(self.dynamics, "gaussian", self.solver, self.solver_after, self.history, self.ratio)

    @property
    def flow_window(self) -> Window:
        """Its window as the rollout takes it."""
        return Window(self.window.start, self.window.size)

    @property
    def words(self) -> str:
        """What it is, in one line: "euler", or "flow_sde 0.7 at 0-3, dpmpp_2m x 0.4"."""
        first, stop = self.window.start, self.window.start + self.window.size
        after = self.mode.after + (f" x {self.ratio:g}" if self.ratio < 1 else "")
        if not self.eta or first == stop:
            return after if not stop or after == self.solver else f"{self.solver} to {stop}, {after}"
        steps = f"{first}" if stop == first + 1 else f"{first}-{stop - 1}"
        before = f"{self.solver}, " if first else ""
        return f"{before}{self.dynamics} {self.eta:g} at {steps}, {after}"

    def entry(self, table: Any) -> Entry:
        """The entry, with its cost.

        Args:
            table: number of steps -> sigmas (steps + 1,).

        Raises:
            SigmaError, WindowError, EtaError, PlanError: the settings do not fit together.
        """

        def plan_of(steps: int) -> RolloutPlan:
            return plan_rollout(table(steps), self.flow_window, self.eta, self.mode)

        return Entry(self.label, self.words, table(self.steps), plan_of(self.steps), plan_of)


class CompareSpec(_Spec):
    """A whole comparison: every entry draws ``group_size`` samples of every prompt and seed, from one initial noise each.

    ``reference_steps`` is the length of the Euler run that latents are compared with (0: none); ``equal_nfe`` refuses entries
    that do not cost what the first costs.
    """

    model: ModelSpec = ModelSpec()
    entries: Annotated[tuple[EntrySpec, ...], Field(min_length=1)]
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    negative_prompt: str = ""
    seed: Seed = 0
    seeds: Count = 4
    group_size: Annotated[int, Field(ge=1, le=4096)] = 2
    guidance: Annotated[float, Field(ge=0, le=100)] = 1.0
    width: Count = 64
    height: Count = 64
    reference_steps: Annotated[int, Field(ge=0, le=10_000)] = 200
    equal_nfe: bool = False
    rewards: tuple[RewardSpec, ...] = ()

    @model_validator(mode="after")
    def _entries_can_be_compared(self) -> CompareSpec:
        check_labels([entry.label for entry in self.entries])
        names = [reward.scorer for reward in self.rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scorer {', '.join(twice)} is named twice; name each once")
        entries = self.built_entries()
        if self.equal_nfe:
            check_equal_nfe(entries)
        check_memory(len(entries), len(self.prompts) * self.seeds * self.group_size, 3 * self.width * self.height)
        return self

    def built_entries(self) -> list[Entry]:
        """All entries; raises :class:`ValueError` that names the first whose settings do not fit together."""
        built = []
        for entry in self.entries:
            shift = dynamic_shift(self.width * self.height // 256) if entry.shift == "dynamic" else entry.shift
            try:
                built.append(entry.entry(lambda steps, shift=shift: shifted_sigmas(steps, shift).float()))
            except MixGRPOError as error:
                raise ValueError(f"entry {entry.label!r}: {error}") from error
        return built

    def cases(self) -> list[Case]:
        """All cases, seed after seed of one prompt after the other."""
        return [Case(prompt, seed) for prompt in self.prompts for seed in range(self.seed, self.seed + self.seeds)]


def parse_compare(fields: Any) -> CompareSpec:
    """Build a comparison from plain data; raises :class:`~..specs.SpecError` with one clause for every field that is wrong."""
    return _parse(CompareSpec, fields, "a comparison")


def parse_entry(fields: Any) -> EntrySpec:
    """Build a sampler's settings from plain data; raises like :func:`parse_compare`."""
    return _parse(EntrySpec, fields, "an entry")


def load_compare(path: Path) -> CompareSpec:
    """Read a comparison from a file, YAML or JSON; raises like :func:`parse_compare`, also when it cannot be read."""
    return parse_compare(read_fields(path))
