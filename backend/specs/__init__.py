"""Everything a user can set, as frozen pydantic models: unknown keys are errors, JSON in, JSON out."""

from .job import LoraSpec, ModelSpec, OptimizerSpec, RewardSpec, SamplingSpec, SpecError, TrainSpec, WindowSpec, load_job

__all__ = [
    "LoraSpec",
    "ModelSpec",
    "OptimizerSpec",
    "RewardSpec",
    "SamplingSpec",
    "SpecError",
    "TrainSpec",
    "WindowSpec",
    "load_job",
]
