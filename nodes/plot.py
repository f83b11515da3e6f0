"""Trajectory Plot: what a sampler's window did to its groups, as a picture."""

from __future__ import annotations

import numpy
import torch
from comfy_api.latest import io, ui

from ..backend.flow.rollout import Trajectory
from ..backend.plot import Line, Plot, draw_panels
from .types import CATEGORY, TrajectoryType

WIDTH = 1024
_COLUMNS = 2


def trajectory_panels(trajectory: Trajectory) -> list[Plot]:
    """The sigma table; and of the window's steps the std, the log-prob, and how far the members of a group are apart."""
    stored = len(trajectory.means)
    start, first = trajectory.window.start, trajectory.first_step
    steps, bounds = range(start, start + stored), range(start, start + stored + 1)
    names = {"whole_x": True, "note": _why_empty(trajectory)}
    alone = {"note": "a group of one sample has no spread"} if stored and trajectory.group_size == 1 else {}
    table = range(first, first + len(trajectory.sigmas))
    noise, log_probs = Line(steps, trajectory.stds), _log_prob_line(steps, trajectory)
    spreads = [] if alone else [spread_in_groups(state, trajectory) for state in trajectory.states]
    spread = Line(bounds[: len(spreads)], spreads)
    scale = trajectory.mode.log_prob.replace("_", " ")
    return [
        Plot(
            "sigma table", "steps done", [Line(table, trajectory.sigmas.tolist())], whole_x=True, from_zero=True,
            shaded=[(start, start + stored)] if stored else [],
            shaded_name="window of stochastic steps",
        ),
        Plot("standard deviation of the noise", "step", [noise], from_zero=True, **names),
        Plot(f"log-prob per dimension ({scale})", "step", [log_probs], **names),
        Plot("spread of a group (RMS distance to its mean)", "steps done", [spread], from_zero=True, **names | alone),
    ]  # fmt: skip


def spread_in_groups(state: torch.Tensor, trajectory: Trajectory) -> float:
    """Root mean square distance, per dimension, of latents (P G, …) to the mean of their group; 0 of (P, …), when G > 1."""
    if len(state) < trajectory.groups * trajectory.group_size:
        return 0.0
    members = state.reshape(trajectory.groups, trajectory.group_size, -1).double()
    return (members - members.mean(1, keepdim=True)).square().mean().sqrt().item()


def _log_prob_line(steps: range, trajectory: Trajectory) -> Line:
    """Mean over all samples; the band is the standard deviation within a group, root mean square over the groups."""
    samples = trajectory.log_probs.double()
    mean = samples.mean(1)
    name = "one sample" if samples.shape[1] == 1 else f"mean of {samples.shape[1]} samples"
    if trajectory.group_size == 1 or not len(steps):
        return Line(steps, mean.tolist(), name)
    std = samples.unflatten(1, (trajectory.groups, trajectory.group_size)).var(2).mean(1).sqrt()
    name += ", ± standard deviation within a group"
    return Line(steps, mean.tolist(), name, (mean - std).tolist(), (mean + std).tolist())


def _why_empty(trajectory: Trajectory) -> str:
    reason = "the window is empty" if trajectory.window.size == 0 else "eta is 0"
    return f"no step is stochastic: {reason}"


class TrajectoryPlot(io.ComfyNode):
    """Draws a trajectory as four charts in one picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_TrajectoryPlot",
            display_name="Trajectory Plot",
            category=CATEGORY,
            description="Draws what happened in a sampler's window: sigmas, noise, log-probabilities, and how a group parts.",
            inputs=[
                TrajectoryType.Input("trajectory", tooltip="From MixGRPO Sampler."),
                io.Int.Input(
                    "width", default=WIDTH, min=768, max=2048, step=64, optional=True,
                    tooltip="Width of the picture in pixels; text and lines grow with it.",
                ),
            ],
            outputs=[io.Image.Output("plot", display_name="plot", tooltip="Four charts in one picture.")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(cls, trajectory, width=WIDTH) -> io.NodeOutput:
        picture = draw_panels(trajectory_panels(trajectory), _COLUMNS, width)
        image = torch.from_numpy(numpy.array(picture)).float().div(255)[None]
        return io.NodeOutput(image, ui=ui.PreviewImage(image, cls=cls))
