"""The settings of a comparison, as a file or a graph gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ..errors import MixGRPOError
from ..flow.plan import RolloutPlan, SamplingMode, plan_rollout
from ..flow.sigmas import dynamic_shift, shifted_sigmas
from ..flow.window import Window
from ..specs import ModelSpec, RewardSpec
from ..specs.base import Count, Index, Seed, Shift, Spec, parse
from ..specs.job import read_fields
from ..specs.sampling import ModeSpec
from .entries import Case, Entry, check_equal_nfe, check_labels, check_memory


class EntryWindow(Spec):
    """The stochastic steps: ``size`` of them from ``start``; size 0 is the plain ODE."""

    start: Index = 0
    size: Index = 4


class EntrySpec(Spec):
    """One sampler: a table of sigmas, a window, its noise level, and what takes the steps; ``mode.log_prob`` has no say."""

    label: str
    steps: Annotated[int, Field(ge=1, le=1000)] = 25
    shift: Shift = 3.0
    eta: Annotated[float, Field(ge=0, le=10)] = 0.7
    window: EntryWindow = EntryWindow()
    mode: ModeSpec = ModeSpec()

    @field_validator("label")
    @classmethod
    def _label_says_something(cls, label: str) -> str:
        if not 1 <= len(label.strip()) <= 60:
            raise ValueError("must be 1 to 60 characters")
        return label.strip()

    @property
    def flow_mode(self) -> SamplingMode:
        """How its steps are taken, as the rollout takes it."""
        return SamplingMode(**self.mode.model_dump())

    @property
    def flow_window(self) -> Window:
        """Its window as the rollout takes it."""
        return Window(self.window.start, self.window.size)

    @property
    def words(self) -> str:
        """What it is, in one line: "euler", or "flow_sde 0.7 at 0-3, dpmpp_2m x 0.4"."""
        first, stop = self.window.start, self.window.start + self.window.size
        solver, after = self.mode.solver, self.flow_mode.after + (f" x {self.mode.ratio:g}" if self.mode.ratio < 1 else "")
        if not self.eta or first == stop:
            return after if not stop or after == solver else f"{solver} to {stop}, {after}"
        steps = f"{first}" if stop == first + 1 else f"{first}-{stop - 1}"
        before = f"{solver}, " if first else ""
        return f"{before}{self.mode.dynamics} {self.eta:g} at {steps}, {after}"

    def entry(self, table: Any) -> Entry:
        """The entry, with its cost.

        Args:
            table: number of steps -> sigmas (steps + 1,).

        Raises:
            SigmaError, WindowError, EtaError, PlanError: the settings do not fit together.
        """

        def plan_of(steps: int) -> RolloutPlan:
            return plan_rollout(table(steps), self.flow_window, self.eta, self.flow_mode)

        return Entry(self.label, self.words, table(self.steps), plan_of(self.steps), plan_of)


class CompareSpec(Spec):
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
    return parse(CompareSpec, fields, "a comparison")


def parse_entry(fields: Any) -> EntrySpec:
    """Build a sampler's settings from plain data; raises like :func:`parse_compare`."""
    return parse(EntrySpec, fields, "an entry")


def load_compare(path: Path) -> CompareSpec:
    """Read a comparison from a file, YAML or JSON; raises like :func:`parse_compare`, also when it cannot be read."""
    return parse_compare(read_fields(path))
