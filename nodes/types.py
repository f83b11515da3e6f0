"""The socket types of our own, and what travels on them. All payloads are frozen.

Upper case only: comfy-cli takes a type with a lower-case letter for a widget and shifts every later value.
"""

from __future__ import annotations

from comfy_api.latest import io

CATEGORY = "MixGRPO"

ModelReference = io.Custom("MIXGRPO_MODEL")
"""A :class:`~..backend.specs.ModelSpec`: which base model a trainer loads. The MODEL socket's weights never travel to it."""

Rewards = io.Custom("MIXGRPO_REWARDS")
"""A tuple of :class:`~..backend.specs.RewardSpec`, one per scorer."""

PictureRows = io.Custom("MIXGRPO_ROWS")
"""A tuple of :class:`~.rows.PictureRow`: pictures on the CPU, a label and, when rewards were connected, scores."""

CompareEntries = io.Custom("MIXGRPO_ENTRIES")
"""A tuple of :class:`~.compare_entry.GraphEntry`: the samplers of a comparison, in order."""

TrajectoryType = io.Custom("MIXGRPO_TRAJECTORY")
"""A :class:`~..backend.flow.rollout.Trajectory` on the CPU: window latents, means, stds and log-probabilities."""

Mode = io.Custom("MIXGRPO_MODE")
"""A :class:`~..backend.flow.plan.SamplingMode`: how the steps inside and outside the window are taken."""

Sampling = io.Custom("MIXGRPO_SAMPLING")
"""A :class:`~..backend.specs.SamplingSpec`: how a trainer draws pictures."""

LoraSettings = io.Custom("MIXGRPO_LORA_SETTINGS")
"""A :class:`~..backend.specs.LoraSpec`: the adapter to train."""

OptimizerSettings = io.Custom("MIXGRPO_OPTIMIZER")
"""A :class:`~..backend.specs.OptimizerSpec`."""
