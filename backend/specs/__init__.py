"""Everything a user can set, as frozen pydantic models: unknown keys are errors, JSON in, JSON out."""

from .base import SpecError
from .job import EmaSpec, LoraSpec, ModelSpec, OptimizerSpec, RewardSpec, TrainSpec, load_job
from .objective import AdvantageSpec, KlSpec, ObjectiveSpec
from .sampling import ModeSpec, SamplingSpec, WindowSpec

__all__ = [
    "AdvantageSpec",
    "KlSpec",
    "EmaSpec",
    "LoraSpec",
    "ModeSpec",
    "ModelSpec",
    "ObjectiveSpec",
    "OptimizerSpec",
    "RewardSpec",
    "SamplingSpec",
    "SpecError",
    "TrainSpec",
    "WindowSpec",
    "load_job",
]
