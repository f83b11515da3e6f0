"""The training job: what is trained, on what, towards what, and for how long."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..errors import MixGRPOError


def _shift(value: Any) -> Any:
    """One sentence instead of one for every member of the union."""
    try:
        fits = value == "dynamic" or 0 < float(value) < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError("must be a finite number above 0, or the word dynamic")
    return value


def _digest(value: Any) -> Any:
    """One spelling, since it counts for the identity."""
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError("must be the SHA-256 of a LoRA file's bytes, 64 hexadecimal digits, or null")
    return value.lower()


def _option(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("must be true or false, a finite number, or text")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=999_999)]  # six digits in file names, which therefore sort
Index = Annotated[int, Field(ge=0, le=999_999)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Digest = Annotated[str | None, BeforeValidator(_digest)]
Shift = Annotated[float | Literal["dynamic"], BeforeValidator(_shift)]
Option = Annotated[bool | int | float | str, BeforeValidator(_option)]


class SpecError(MixGRPOError):
    """A job that cannot be run as written; the message names every field, what was given and what is allowed."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Text such as "1e-4" is taken as a number, because YAML calls it text; but ``yes`` would be taken as 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("cannot be true or false")
        return value


_Parsed = TypeVar("_Parsed", bound=_Spec)


class ModelSpec(_Spec):
    """The base model. ``starter`` is the small one that comes with the project."""

    family: Literal["starter"] = "starter"
    precision: Literal["float32", "bfloat16", "float64"] = "float32"


class WindowSpec(_Spec):
    """The steps that are stochastic and trained: ``size`` steps from ``start``, moved by ``stride`` every ``every`` iterations.

    The window stops where it still fits before the last step, which is never stochastic. Stride 0 keeps it in place.
    """

    start: Index = 0
    size: Count = 4
    stride: Index = 0
    every: Count = 25


class SamplingSpec(_Spec):
    """How pictures are drawn in training; ``guidance`` 1 means no classifier-free guidance (half the cost)."""

    steps: Annotated[int, Field(ge=2, le=1000)] = 25
    shift: Shift = 3.0
    guidance: Annotated[float, Field(ge=0, le=100)] = 1.0
    eta: Annotated[float, Field(gt=0, le=10)] = 0.7
    width: Count = 64
    height: Count = 64
    shared_noise: bool = True
    window: WindowSpec = WindowSpec()

    @model_validator(mode="after")
    def _window_fits(self) -> SamplingSpec:
        if self.window.start + self.window.size > self.steps - 1:
            raise ValueError(
                f"a window of {self.window.size} from step {self.window.start} does not fit {self.steps} steps: "
                f"start + size may be at most {self.steps - 1}, since the last step is never stochastic"
            )
        return self


class RewardSpec(_Spec):
    """One scorer by name, with its options; ``weight`` is its say in the mixed advantage."""

    scorer: str
    weight: Positive = 1.0
    options: dict[str, Option] = {}


class LoraSpec(_Spec):
    """The adapter. Its update is scaled by alpha / rank, or alpha / sqrt(rank) with ``rslora``.

    ``start_from`` names the LoRA file whose tensors training begins with, by its bytes: a path would mean another file on
    another machine. Its rank, alpha and layers are those given here. Without it training begins at the base model.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Positive = 32.0
    targets: Literal["attention", "attention+mlp"] = "attention"
    rslora: bool = False
    start_from: Digest = None


class OptimizerSpec(_Spec):
    """AdamW on the clipped objective."""

    learning_rate: Positive = 3e-4
    weight_decay: NotNegative = 1e-4
    max_grad_norm: Positive = 1.0
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    advantage_clip: Positive = 5.0
    updates_per_rollout: Count = 4


class TrainSpec(_Spec):
    """A whole job. ``iterations`` says how far to train: the same number again changes nothing, a larger one continues."""

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
    seed: Seed = 0
    iterations: Count = 300
    checkpoint_every: Count = 10
    keep_checkpoints: Count = 2
    rows_per_call: Count = 256

    @field_validator("prompts")
    @classmethod
    def _prompts_say_something(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        empty = [str(index) for index, prompt in enumerate(prompts) if not prompt.strip()]
        if empty:
            raise ValueError(f"prompt {', '.join(empty[:5])} is empty; every prompt must say what to draw")
        return prompts

    @model_validator(mode="after")
    def _numbers_divide(self) -> TrainSpec:
        if self.group_size % self.optimizer.updates_per_rollout:
            raise ValueError(
                f"group_size {self.group_size} cannot be split into {self.optimizer.updates_per_rollout} equal updates; "
                "choose an updates_per_rollout that divides it"
            )
        names = [reward.scorer for reward in (*self.rewards, *self.monitors)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scorer {', '.join(twice)} is named twice; name each scorer once, as a reward or as a monitor")
        return self

    def identity_fields(self) -> dict[str, Any]:
        """The fields that determine the numbers: not how far, how often saved, how split into calls, or the name.

        A job that starts from the base model does not say so: its identity is older than ``lora.start_from``.
        """
        ignored: dict[str, Any] = dict.fromkeys(
            ("name", "iterations", "checkpoint_every", "keep_checkpoints", "rows_per_call"), True
        )
        if self.lora.start_from is None:
            ignored["lora"] = {"start_from"}
        return self.model_dump(mode="json", exclude=ignored)

    def identity(self) -> str:
        """Hexadecimal hash of :meth:`identity_fields`, the same for equal jobs on every machine."""
        text = json.dumps(self.identity_fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_job(fields: Any) -> TrainSpec:
    """Build a job from plain data; raises :class:`SpecError` with one clause for every field that is wrong."""
    return _parse(TrainSpec, fields, "a job")


def parse_sampling(fields: Any) -> SamplingSpec:
    """Build sampling settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return _parse(SamplingSpec, fields, "sampling")


def parse_reward(fields: Any) -> RewardSpec:
    """Build a reward from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return _parse(RewardSpec, fields, "a reward")


def parse_lora(fields: Any) -> LoraSpec:
    """Build an adapter's settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return _parse(LoraSpec, fields, "lora")


def parse_optimizer(fields: Any) -> OptimizerSpec:
    """Build an optimiser's settings from plain data; raises :class:`SpecError` like :func:`parse_job`."""
    return _parse(OptimizerSpec, fields, "optimizer")


def mixed_reward(means: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the rewards' means, the number that curves show; None while a mean is missing."""
    known = [means.get(name) for name in weights]
    return None if None in known else sum(mean * weight for mean, weight in zip(known, weights.values(), strict=True))


def _parse(kind: type[_Parsed], fields: Any, what: str) -> _Parsed:
    if not isinstance(fields, dict):
        raise SpecError(f"{what} is a mapping of fields, got {type(fields).__name__}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError("; ".join(_sentence(problem) for problem in _causes(error.errors()))) from None


def _causes(problems: list[Any]) -> list[Any]:
    """Without "too few entries" where an entry was refused: pydantic counts only the good ones."""
    refused = {problem["loc"][:-depth] for problem in problems for depth in range(1, len(problem["loc"]))}
    return [problem for problem in problems if not (problem["type"] == "too_short" and problem["loc"] in refused)]


_ALLOWED = {
    "extra_forbidden": "there is no such field; check the spelling",
    "missing": "is required",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "too_short": "needs at least {min_length} entry",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of fields",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "may hold up to 64 letters, digits, _ and -, and begins with a letter or digit",
}


def _sentence(problem: Any) -> str:
    """What is allowed there, and what was given (unless there is nothing, or the sentence is about a part of it)."""
    kind, given = problem["type"], problem["input"]
    field = ".".join(str(part) for part in problem["loc"]) or "job"
    message = problem["msg"].removeprefix("Value error, ")
    allowed = _ALLOWED[kind].format(**problem.get("ctx", {})) if kind in _ALLOWED else message
    of_a_part = kind == "value_error" and isinstance(given, (BaseModel, dict, list, tuple))
    hidden = of_a_part or kind in ("extra_forbidden", "missing")
    return f"{field}: {allowed}" + ("" if hidden else f" (given: {str(given)[:80]!r})")


def load_job(path: Path) -> TrainSpec:
    """Read a job file; raises :class:`SpecError` like :func:`parse_job`, and when :func:`read_fields` cannot read it."""
    return parse_job(read_fields(path))


def read_fields(path: Path) -> Any:
    """What a job file holds: JSON where it is called so, else YAML, which is loaded without any power to run code.

    Raises:
        SpecError: the file is missing or cannot be parsed.
    """
    path = Path(path)
    parse = json.loads if path.suffix.lower() == ".json" else yaml.safe_load
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: PyYAML's for a date like 2026-13-01
        raise SpecError(f"cannot read the job file {path}: {' '.join(str(error).split())}") from error
