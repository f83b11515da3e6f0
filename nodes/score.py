"""Score Images: the rewards applied to pictures of a graph."""

from __future__ import annotations

import math

import torch
from comfy_api.latest import io

from ..backend.errors import MixGRPOError
from ..backend.lab.scores import score_pictures, weighted_sum
from ..backend.specs import RewardSpec
from .types import CATEGORY, Rewards


class ScoreError(MixGRPOError):
    """Pictures, prompts and rewards that do not go together."""


def prompts_for(text: str, images: int) -> list[str]:
    """One prompt per picture from one prompt per line: lines are repeated in place, as the sampler orders its groups.

    Raises:
        ScoreError: no prompt, or the number of pictures is not a multiple of the prompts'.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ScoreError("there is no prompt to score the pictures against; write one line for all, or one for each group")
    if images % len(lines):
        raise ScoreError(
            f"{images} pictures cannot be divided among {len(lines)} prompts; give one prompt, or one for each group of pictures"
        )
    return [line for line in lines for _ in range(images // len(lines))]


def score_images(images: torch.Tensor, prompts: list[str], rewards: tuple[RewardSpec, ...]) -> dict[str, torch.Tensor]:
    """Values (N,) of every reward; NaN where a picture could not be scored. ``images``: (N, height, width, 3) in [0, 1]."""
    return score_pictures(images.movedim(-1, 1), prompts, rewards)


def json_number(value: torch.Tensor) -> float | None:
    """A finite number or None: JSON has no NaN, and the page's parser stops at one."""
    return value.item() if value.isfinite() else None


class ScoreImages(io.ComfyNode):
    """Scores every picture with the weighted sum of the rewards and sorts by it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_ScoreImages",
            display_name="Score Images",
            category=CATEGORY,
            description="Scores pictures with rewards and sorts them, best first.",
            inputs=[
                io.Image.Input("images", tooltip="The pictures, in the sampler's order: group after group."),
                Rewards.Input("rewards", tooltip="One reward or a chain of them."),
                io.String.Input(
                    "prompts", multiline=True, default="",
                    tooltip="What the pictures should show: one line for all, or one line for each group.",
                ),
            ],
            outputs=[
                io.Image.Output("ranked", display_name="ranked", tooltip="All pictures, best first."),
                io.Float.Output(
                    "scores", display_name="scores", is_output_list=True,
                    tooltip="Their scores in the same order: the sum of weight x reward. Not a number: could not be scored.",
                ),
                io.Image.Output("best", display_name="best", tooltip="The first of the ranked pictures."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, images, rewards, prompts) -> io.NodeOutput:
        values = score_images(images, prompts_for(prompts, len(images)), rewards)
        total = weighted_sum(values, rewards)
        order = total.nan_to_num(-math.inf).argsort(descending=True, stable=True)
        rows = [
            {"image": row, "score": json_number(total[row]), **{name: json_number(value[row]) for name, value in values.items()}}
            for row in order.tolist()
        ]
        ranked = images[order.to(images.device)]
        return io.NodeOutput(ranked, total[order].tolist(), ranked[:1], ui={"mixgrpo_scores": rows})
