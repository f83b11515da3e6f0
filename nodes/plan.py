"""What a run costs before it runs: its steps, model calls and model rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from comfy_api.latest import io

from ..backend.flow.plan import MIXGRPO, RolloutPlan
from ..backend.flow.sigmas import shifted_sigmas
from ..backend.flow.window import Window
from .mode import group_inputs, mode_inputs
from .sampling import GroupSettings
from .types import CATEGORY

_HEAD = ("step", "sigma", "to", "kind", "method", "order", "calls", "std")


def step_rows(plan: RolloutPlan) -> list[dict[str, Any]]:
    """One mapping for every step, as ``/history`` keeps them; ``std`` is None for deterministic steps."""
    return [
        {
            "step": step.index,
            "sigma": step.sigma,
            "to": step.sigma_next,
            "kind": step.kind,
            "method": step.method,
            "order": step.order,
            "calls": step.calls,
            "std": step.coefficients.s if step.coefficients else None,
        }
        for step in plan.steps
    ]


class SamplingPlan(io.ComfyNode):
    """The plan of a run, without a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_SamplingPlan",
            display_name="Sampling Plan",
            category=CATEGORY,
            description="What a MixGRPO Sampler with these settings would do and cost, before anything is drawn. Needs no model.",
            is_output_node=True,
            inputs=[
                io.Int.Input("steps", default=25, min=1, max=1000, tooltip="Number of steps from noise to picture."),
                io.Float.Input(
                    "shift", default=3.0, min=0.01, max=100.0, step=0.01,
                    tooltip="Of the trainer's table; for other tables connect SIGMAS.",
                ),
                io.Float.Input(
                    "cfg", default=1.0, min=0.0, max=100.0, step=0.1,
                    tooltip="Classifier-free guidance; anything but 1 counts every row twice.",
                ),
                *group_inputs(),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Used instead of steps and shift when connected."),
                *mode_inputs(),
            ],
            outputs=[
                io.String.Output("plan", display_name="plan", tooltip="A table of all steps in Markdown, for Preview as Text."),
                io.Int.Output("nfe", display_name="NFE", tooltip="Model calls: what a sample drawn alone costs."),
                io.Int.Output("rows", display_name="rows", tooltip="Model rows of one group; multiply by the batch size."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, steps, shift, cfg, group_size, shared_noise, eta, window_start, window_size, sigmas=None, mode=MIXGRPO, first_step=0,
    ) -> io.NodeOutput:  # fmt: skip
        settings = GroupSettings(group_size, shared_noise, eta, Window(window_start, window_size), mode, first_step)
        plan = settings.plan(shifted_sigmas(steps, shift).float() if sigmas is None else sigmas)
        guided = not math.isclose(cfg, 1.0)
        rows = plan.rows(group_size, shared=settings.shared, cfg=guided)
        apart = plan.rows(group_size, shared=False, cfg=guided)
        text = _text(plan, group_size, rows, apart)
        summary = {"steps": step_rows(plan), "nfe": plan.nfe, "rows": rows, "rows_apart": apart, "mode": dataclasses.asdict(mode)}
        return io.NodeOutput(text, plan.nfe, rows, ui={"mixgrpo_plan": [summary]})


def _text(plan: RolloutPlan, group_size: int, rows: int, apart: int) -> str:
    """Two lines of totals and a table of columns that line up, as Markdown, which ComfyUI's page renders in Preview as Text."""
    stochastic = sum(step.kind == "sde" for step in plan.steps)
    shared = f", of {apart} without its shared beginning" if rows < apart else ""
    totals = [
        f"- {len(plan.steps)} steps, {stochastic} of them stochastic; {plan.nfe} model calls for a sample",
        f"- {rows} model rows for a group of {group_size}{shared}",
    ]
    cells = [_HEAD, *(tuple(_cell(value) for value in row.values()) for row in step_rows(plan))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head, *body = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    line = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([*totals, "", head, line, *body])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
