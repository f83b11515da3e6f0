"""The sampling mode of a graph: what takes the steps inside and outside the window; and the widgets that go with it."""

from __future__ import annotations

from comfy_api.latest import io

from ..backend.flow.dynamics import LOG_PROBS, SDE_DYNAMICS
from ..backend.flow.plan import MIXGRPO, SamplingMode
from ..backend.flow.solvers import SOLVERS
from .types import CATEGORY, Mode

SAME = "same"


def group_inputs() -> list[io.Input]:
    """The widgets that say how groups are drawn, for every node that draws them."""
    return [
        io.Int.Input("group_size", default=4, min=1, max=4096, tooltip="Samples per group; a reward compares them."),
        io.Boolean.Input(
            "shared_noise", default=True,
            tooltip="On: a group begins from one noise and parts inside the window; the steps before it are computed once. "
            "Off: every sample has its own noise.",
        ),
        io.Float.Input(
            "eta", default=0.7, min=0.0, max=10.0, step=0.01,
            tooltip="Noise level of the window's steps; 0.7 is the paper's. 0 is the plain ODE, exactly ComfyUI's euler unless a "
            "mode is connected.",
        ),
        io.Int.Input("window_start", default=0, min=0, max=999, tooltip="First stochastic step, counted from 0."),
        io.Int.Input(
            "window_size", default=4, min=0, max=999,
            tooltip="Number of stochastic steps, which are the ones training learns from; 0 is the plain ODE. "
            "The last step is never stochastic.",
        ),
    ]  # fmt: skip


def mode_inputs() -> list[io.Input]:
    """Behind all others, and optional: graphs that were saved before these existed mean their defaults."""
    return [
        Mode.Input("mode", optional=True, tooltip="Other dynamics, solvers or Flash, from Sampling Mode; without it, MixGRPO's."),
        io.Int.Input(
            "first_step", default=0, min=0, max=999, optional=True,
            tooltip="The step that the sigmas begin with, when they are a part of a split table; the window counts from the "
            "whole table's first step.",
        ),
    ]  # fmt: skip


class SamplingModeNode(io.ComfyNode):
    """Dynamics, log-prob, solvers and Flash's shorter end, as one frozen value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_SamplingMode",
            display_name="Sampling Mode",
            category=CATEGORY,
            description="How steps are taken: the noise inside the window, the solvers around it, and Flash's shorter end.",
            inputs=[
                io.Combo.Input(
                    "dynamics", options=list(SDE_DYNAMICS), default=MIXGRPO.dynamics,
                    tooltip="The window's steps. flow_sde: Flow-GRPO and MixGRPO. dance_sde: DanceGRPO. cps: keeps the "
                    "schedule's amount of noise, eta at most 1. precise: the exact integral of flow_sde, no limit on eta.",
                ),
                io.Combo.Input(
                    "log_prob", options=list(LOG_PROBS), default=MIXGRPO.log_prob,
                    tooltip="The scale of the log-probabilities in TRAJECTORY. gaussian: the step's density. variance_free: as "
                    "published for cps. ratio_norm: RatioNorm's, 0 while drawing. Pictures do not depend on it.",
                ),
                io.Combo.Input(
                    "solver", options=list(SOLVERS), default=MIXGRPO.solver,
                    tooltip="The steps before the window (all of them when there is none). heun asks the model twice a step; "
                    "dpmpp_1m, _2m, _3m are multistep DPM-Solver++ of orders 1 to 3.",
                ),
                io.Combo.Input(
                    "solver_after", options=[SAME, *SOLVERS], default=SAME,
                    tooltip="The steps after the window; MixGRPO-Flash uses dpmpp_2m.",
                ),
                io.Combo.Input(
                    "history", options=["carry", "reset"], default=MIXGRPO.history,
                    tooltip="What a multistep solver (dpmpp_2m, _3m) after the window knows. carry: the predictions made before "
                    "and inside the window. reset: nothing, so that its first step is of order 1.",
                ),
                io.Float.Input(
                    "ratio", default=MIXGRPO.ratio, min=0.01, max=1.0, step=0.01,
                    tooltip="The share of the steps after the window that are taken, rounded up; 1 takes all. "
                    "MixGRPO-Flash: 0.4. Flash*: 0.2, with the window at step 0.",
                ),
            ],
            outputs=[Mode.Output("mode", display_name="MIXGRPO_MODE", tooltip="For the sampler nodes and Sampling Plan.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, dynamics, log_prob, solver, solver_after, history, ratio) -> io.NodeOutput:
        after = None if solver_after == SAME else solver_after
        return io.NodeOutput(SamplingMode(dynamics, log_prob, solver, after, history, ratio))
