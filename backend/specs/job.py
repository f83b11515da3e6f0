"""The training job: what is trained, on what, towards what, and for how long."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from .base import Count, Digest, Index, NotNegative, Option, Positive, Seed, Spec, SpecError, parse
from .objective import AdvantageSpec, ObjectiveSpec
from .presets import with_preset
from .sampling import SamplingSpec

_NO_NUMBERS = {
    "name", "iterations", "checkpoint_every", "keep_checkpoints", "keep_loras_every", "rows_per_call", "groups_at_once",
    "offload", "gradient_checkpointing", "fixed_pictures",
}  # fmt: skip
_IDENTITY = 1


class ModelSpec(Spec):
    """The base model. ``starter`` is the small one that comes with the project."""

    family: Literal["starter"] = "starter"
    precision: Literal["float32", "bfloat16", "float64"] = "float32"


class RewardSpec(Spec):
    """One scorer by name, with its options; ``weight`` is its say in the mixed advantage."""

    scorer: str
    weight: Positive = 1.0
    options: dict[str, Option] = {}


class LoraSpec(Spec):
    """The adapter. Its update is scaled by alpha / rank, or alpha / sqrt(rank) with ``rslora``.

    ``start_from`` names the LoRA file whose tensors training begins with, by its bytes: a path would mean another file on
    another machine. Its rank, alpha and layers are those given here. Without it training begins at the base model.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Positive = 32.0
    targets: Literal["attention", "attention+mlp"] = "attention"
    rslora: bool = False
    start_from: Digest = None


class EmaSpec(Spec):
    """A moving average of the adapter, taken after ``every`` updates; ``export``: do LoRA files hold it, or what is trained."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    every: Count = 8
    export: Literal["ema", "raw"] = "ema"


class OptimizerSpec(Spec):
    """AdamW on the clipped objective. ``clip_range_high`` is the upper end of the clip range; left out, as the lower.

    The learning rate rises over ``warmup`` updates and, with ``cosine``, falls to 0 at that update: a number of its own, since
    ``iterations`` may be raised later. An iteration has ``updates_per_rollout`` updates.
    """

    learning_rate: Positive = 3e-4
    weight_decay: NotNegative = 1e-4
    max_grad_norm: Positive = 1.0
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    clip_range_high: Annotated[float, Field(gt=0, lt=1)] | None = None
    advantage_clip: Positive = 5.0
    updates_per_rollout: Count = 4
    warmup: Index = 0
    cosine: Count | None = None

    @model_validator(mode="after")
    def _cosine_ends_after_the_warm_up(self) -> OptimizerSpec:
        if self.cosine is not None and self.cosine <= self.warmup:
            raise ValueError(f"cosine {self.cosine}, where the learning rate is 0, must be above warmup {self.warmup}")
        return self

    @model_validator(mode="after")
    def _one_spelling_of_a_symmetric_range(self) -> OptimizerSpec:
        if self.clip_range_high == self.clip_range:
            object.__setattr__(self, "clip_range_high", None)
        return self


class TrainSpec(Spec):
    """A whole job. ``iterations`` says how far to train: the same number again changes nothing, a larger one continues.

    ``groups_at_once`` has a process draw so many groups, and score them while it draws the next; left out, all at once.
    With ``offload`` several processes keep what they have of the weights in the computer's memory while it is not computed with.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "mixgrpo"
    model: ModelSpec = ModelSpec()
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    negative_prompt: str = ""
    sampling: SamplingSpec = SamplingSpec()
    group_size: Annotated[int, Field(ge=2, le=4096)] = 12
    prompts_per_iteration: Count = 8
    rewards: Annotated[tuple[RewardSpec, ...], Field(min_length=1)]
    monitors: tuple[RewardSpec, ...] = ()
    lora: LoraSpec = LoraSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    ema: EmaSpec | None = None
    advantage: AdvantageSpec = AdvantageSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    seed: Seed = 0
    iterations: Count = 300
    checkpoint_every: Count = 10
    keep_checkpoints: Count = 2
    keep_loras_every: Count | None = None
    rows_per_call: Count = 256
    groups_at_once: Count | None = None
    offload: bool = False
    gradient_checkpointing: bool = False
    fixed_pictures: Annotated[int, Field(ge=0, le=64)] = 8

    @field_validator("prompts")
    @classmethod
    def _prompts_say_something(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        empty = [str(index) for index, prompt in enumerate(prompts) if not prompt.strip()]
        if empty:
            raise ValueError(f"prompt {', '.join(empty[:5])} is empty; every prompt must say what to draw")
        return prompts

    @property
    def trained_of_a_group(self) -> int:
        """How many members of every group are trained."""
        return self.advantage.best_and_worst or self.group_size

    @property
    def exported_weights(self) -> Literal["ema", "raw"]:
        """What LoRA files hold: the moving average, or what is trained."""
        return "raw" if self.ema is None else self.ema.export

    @model_validator(mode="after")
    def _parts_fit_together(self) -> TrainSpec:
        misfit = self.advantage.misfit(self.group_size, self.prompts_per_iteration, len(self.rewards))
        if misfit:
            raise ValueError(misfit)
        trained, size = self.objective.trained_steps, self.sampling.window.size
        if trained is not None and trained >= size:
            raise ValueError(
                f"objective.trained_steps {trained} must be less than the window's {size} steps; leave it out to train them all"
            )
        if self.trained_of_a_group % self.optimizer.updates_per_rollout:
            which = "group_size" if self.advantage.best_and_worst is None else "advantage.best_and_worst"
            raise ValueError(
                f"{which} {self.trained_of_a_group} cannot be split into {self.optimizer.updates_per_rollout} equal updates; "
                "choose an updates_per_rollout that divides it"
            )
        return self

    @model_validator(mode="after")
    def _the_learning_rate_lasts(self) -> TrainSpec:
        each, end = self.optimizer.updates_per_rollout, self.optimizer.cosine
        if end is not None and (self.iterations - 1) * each >= end:
            raise ValueError(
                f"optimizer.cosine {end}: the learning rate is 0 from update {end} on, and {self.iterations} iterations of "
                f"{each} updates go on after it; train at most {-(-end // each)} iterations, or set cosine to "
                f"{self.iterations * each}"
            )
        return self

    @model_validator(mode="after")
    def _scorers_are_named_once(self) -> TrainSpec:
        names = [reward.scorer for reward in (*self.rewards, *self.monitors)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scorer {', '.join(twice)} is named twice; name each scorer once, as a reward or as a monitor")
        return self

    def identity_fields(self) -> dict[str, Any]:
        """The fields that determine the numbers: not how far, how often saved, how split into calls, or the name."""
        return self.model_dump(mode="json", exclude=_NO_NUMBERS)

    def identity(self) -> str:
        """Hexadecimal hash of :meth:`identity_fields`, the same for equal jobs on every machine.

        Fields at their defaults are left out, so that a field that is added later does not change the identity of older jobs. A
        default must therefore never be changed without raising :data:`_IDENTITY`.
        """
        fields = self.model_dump(mode="json", exclude=_NO_NUMBERS, exclude_defaults=True)
        text = json.dumps({"identity": _IDENTITY, **fields}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_job(fields: Any) -> TrainSpec:
    """Build a job from plain data; raises :class:`SpecError` with one clause for every field that is wrong.

    A field ``preset`` names published settings, which the other fields change.
    """
    return parse(TrainSpec, with_preset(fields), "a job")


def parse_sampling(fields: Any) -> SamplingSpec:
    """Build sampling settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return parse(SamplingSpec, fields, "sampling")


def parse_reward(fields: Any) -> RewardSpec:
    """Build a reward from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return parse(RewardSpec, fields, "a reward")


def parse_lora(fields: Any) -> LoraSpec:
    """Build an adapter's settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return parse(LoraSpec, fields, "lora")


def parse_optimizer(fields: Any) -> OptimizerSpec:
    """Build an optimiser's settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return parse(OptimizerSpec, fields, "optimizer")


def mixed_reward(means: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the rewards' means, the number that curves show; None while a mean is missing."""
    known = [means.get(name) for name in weights]
    return None if None in known else sum(mean * weight for mean, weight in zip(known, weights.values(), strict=True))


class _JobLoader(yaml.SafeLoader):
    """Without any power to run code, and a key given twice is an error: YAML's own rule, and PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise SpecError(
                    f"{key.value[:80]!r} in line {line} was given in line {lines[key.value]} already; keep one of them"
                )
            lines[key.value] = line
        return node


def load_job(path: Path) -> TrainSpec:
    """Read a job file; raises :class:`SpecError` like :func:`parse_job`, and when :func:`read_fields` cannot read it."""
    return parse_job(read_fields(path))


def read_fields(path: Path) -> Any:
    """What a job file holds: JSON where it is called so, else YAML.

    Raises:
        SpecError: the file is missing or cannot be parsed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.load(text, _JobLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: PyYAML's for a date like 2026-13-01
        raise SpecError(f"cannot read the job file {path}: {' '.join(str(error).split())}") from error
