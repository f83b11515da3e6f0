"""Sigma tables: the trainer's own, for the sampler node and as SIGMAS."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy_api.latest import io

from ..backend.flow.sigmas import SigmaError, dynamic_shift, shifted_sigmas
from .types import CATEGORY

SCHEDULES = ("shift", "dynamic shift", "model")
SCHEDULE_TOOLTIP = (
    "shift: the trainer's table with the shift below. dynamic shift: Flux's, computed from the latent's size. "
    "model: ComfyUI's 'simple' scheduler with the shift the MODEL carries."
)


def schedule_inputs() -> list[io.Input]:
    """The widgets that describe a table, for every node that has one."""
    return [
        io.Int.Input("steps", default=25, min=1, max=1000, tooltip="Number of steps from noise to picture."),
        io.Combo.Input("schedule", options=list(SCHEDULES), default=SCHEDULES[0], tooltip=SCHEDULE_TOOLTIP),
        io.Float.Input(
            "shift", default=3.0, min=0.01, max=100.0, step=0.01,
            tooltip="Bends the table towards noise; 1 is uniform, 3 is the paper's and SD3's. Used by the schedule 'shift'.",
        ),
    ]  # fmt: skip


def sigma_table(schedule: str, steps: int, shift: float, model: Any | None, latent: torch.Tensor | None) -> torch.Tensor:
    """A table of ``steps`` + 1 sigmas in float32.

    Args:
        schedule: one of :data:`SCHEDULES`.
        model: MODEL, which the schedule "model" needs.
        latent: (rows, channels, …, height, width), which "dynamic shift" needs.

    Raises:
        SigmaError: an unknown schedule, a missing input, or numbers out of range.
    """
    if schedule == "shift":
        return shifted_sigmas(steps, shift).float()
    if schedule == "dynamic shift":
        if latent is None:
            raise SigmaError("the schedule 'dynamic shift' depends on the picture's size; connect the latent, or use 'shift'")
        return shifted_sigmas(steps, dynamic_shift(math.prod(latent.shape[2:]) // 4)).float()  # a token is 2x2 latent pixels
    if schedule == "model":
        if model is None:
            raise SigmaError("the schedule 'model' reads the shift of a MODEL; connect one, or use 'shift'")
        import comfy.samplers

        return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    raise SigmaError(f"there is no schedule {schedule!r}; there are: {', '.join(SCHEDULES)}")


class FlowSigmas(io.ComfyNode):
    """The trainer's sigma table as SIGMAS, which differs from ComfyUI's 'simple' where the steps do not divide 1000."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_Sigmas",
            display_name="MixGRPO Sigmas",
            category=CATEGORY,
            description="The sigma table that MixGRPO trains with, for SamplerCustomAdvanced.",
            inputs=[
                *schedule_inputs(),
                io.Model.Input("model", optional=True, tooltip="Read by the schedule 'model' only."),
                io.Latent.Input("latent_image", optional=True, tooltip="Its size is read by the schedule 'dynamic shift' only."),
            ],
            outputs=[io.Sigmas.Output("sigmas", display_name="SIGMAS", tooltip="steps + 1 numbers that fall from 1 to 0.")],
        )

    @classmethod
    def execute(cls, steps, schedule, shift, model=None, latent_image=None) -> io.NodeOutput:
        latent = None if latent_image is None else latent_image["samples"]
        return io.NodeOutput(sigma_table(schedule, steps, shift, model, latent))
