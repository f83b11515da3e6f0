"""Reward nodes: each adds one scorer to a list, which Score Images and the trainer read."""

from __future__ import annotations

from comfy_api.latest import io

from ..backend.errors import MixGRPOError
from ..backend.specs import RewardSpec
from ..backend.specs.job import parse_reward
from .types import CATEGORY, Rewards


class RewardsError(MixGRPOError):
    """A list of rewards that cannot be mixed."""


def add_reward(rewards: tuple[RewardSpec, ...] | None, scorer: str, weight: float, **options: object) -> tuple[RewardSpec, ...]:
    """The list with one reward more.

    Raises:
        RewardsError: the scorer is in the list already.
        SpecError: the weight or an option is out of range.
    """
    if any(reward.scorer == scorer for reward in rewards or ()):
        raise RewardsError(f"the reward {scorer} is in the chain twice; take one away and set the weight of the other")
    return (*(rewards or ()), parse_reward({"scorer": scorer, "weight": weight, "options": options}))


def _inputs(*options: io.Input) -> list[io.Input]:
    return [
        io.Float.Input(
            "weight", default=1.0, min=0.001, max=1000.0, step=0.01, tooltip="How much this reward counts among several."
        ),
        *options,
        Rewards.Input("rewards", optional=True, tooltip="Rewards that this one is added to."),
    ]


def _outputs() -> list[io.Output]:
    return [Rewards.Output("rewards_out", display_name="REWARDS", tooltip="For Score Images, or another reward's input.")]


class SceneAccuracy(io.ComfyNode):
    """1 when a picture of the starter's world shows exactly what its prompt says."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_SceneAccuracy",
            display_name="Scene Accuracy",
            category=CATEGORY,
            description="Rewards pictures of the starter model that show exactly what their prompt says.",
            inputs=_inputs(
                io.Boolean.Input(
                    "partial", default=False,
                    tooltip="Off: 1 for a right picture, else 0. On: a wrong picture earns up to 0.75 for the facts it shows.",
                )
            ),
            outputs=_outputs(),
        )  # fmt: skip

    @classmethod
    def execute(cls, weight, partial, rewards=None) -> io.NodeOutput:
        return io.NodeOutput(add_reward(rewards, "scene_accuracy", weight, partial=partial))


class JpegCompressibility(io.ComfyNode):
    """Minus the bits per pixel of the picture as a JPEG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_JpegCompressibility",
            display_name="JPEG Compressibility",
            category=CATEGORY,
            description="Rewards plain pictures: minus the bits per pixel of a JPEG of quality 95.",
            inputs=_inputs(),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, weight, rewards=None) -> io.NodeOutput:
        return io.NodeOutput(add_reward(rewards, "jpeg_compressibility", weight))


class JpegIncompressibility(io.ComfyNode):
    """The bits per pixel of the picture as a JPEG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_JpegIncompressibility",
            display_name="JPEG Incompressibility",
            category=CATEGORY,
            description="Rewards busy pictures: the bits per pixel of a JPEG of quality 95.",
            inputs=_inputs(),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, weight, rewards=None) -> io.NodeOutput:
        return io.NodeOutput(add_reward(rewards, "jpeg_incompressibility", weight))


class HeldOutJudge(io.ComfyNode):
    """A second opinion on scenes, which no training may use as its reward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_HeldOutJudge",
            display_name="Held-Out Judge",
            category=CATEGORY,
            description="A small trained judge of the starter's scenes. It only watches: connect it to Score Images or to the "
            "monitors of GRPO Train Step, to see whether a reward is being gamed.",
            inputs=_inputs(),
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, weight, rewards=None) -> io.NodeOutput:
        return io.NodeOutput(add_reward(rewards, "held_out_judge", weight))
