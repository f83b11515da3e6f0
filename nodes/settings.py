"""What a training needs beyond prompts and rewards: how pictures are drawn, which adapter, which optimiser."""

from __future__ import annotations

import dataclasses

from comfy_api.latest import io

from ..backend.specs import LoraSpec, OptimizerSpec, SamplingSpec, WindowSpec
from ..backend.specs.job import parse_lora, parse_optimizer, parse_sampling
from .schedule import SCHEDULES
from .types import CATEGORY, LoraSettings, Mode, OptimizerSettings, Sampling

_SAMPLING, _WINDOW, _LORA, _OPTIMIZER = SamplingSpec(), WindowSpec(), LoraSpec(), OptimizerSpec()
TRAINED_SCHEDULES = SCHEDULES[:2]  # a trainer has no MODEL whose shift it could read
WINDOW_POLICIES = ("progressive", "decay", "exp_decay", "random", "frozen")  # a list of starts is for job files
WINDOW_ENDS = ("hold", "wrap", "bounce")
TARGETS = ("attention", "attention+mlp")


class TrainingSampling(io.ComfyNode):
    """How the trainer draws pictures; the same words as in the sampler node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_SamplingSettings",
            display_name="Training Sampling Settings",
            category=CATEGORY,
            description="How pictures are drawn while training: steps, guidance, and the window of stochastic, trained steps.",
            inputs=[
                io.Int.Input("steps", default=_SAMPLING.steps, min=2, max=1000, tooltip="Number of steps from noise to picture."),
                io.Combo.Input(
                    "schedule", options=list(TRAINED_SCHEDULES), default=TRAINED_SCHEDULES[0],
                    tooltip="shift: the table with the shift below. dynamic shift: Flux's, computed from the picture's size.",
                ),
                io.Float.Input(
                    "shift", default=_SAMPLING.shift, min=0.01, max=100.0, step=0.01,
                    tooltip="Bends the table towards noise; 1 is uniform, 3 is the paper's. For the schedule 'shift'.",
                ),
                io.Float.Input(
                    "cfg", default=_SAMPLING.guidance, min=0.0, max=100.0, step=0.1,
                    tooltip="Classifier-free guidance; 1 ignores the negative prompt and costs half.",
                ),
                io.Int.Input("width", default=_SAMPLING.width, min=16, max=16384, step=8, tooltip="Width of the pictures."),
                io.Int.Input("height", default=_SAMPLING.height, min=16, max=16384, step=8, tooltip="Height of the pictures."),
                io.Boolean.Input(
                    "shared_noise", default=_SAMPLING.shared_noise,
                    tooltip="On: a group begins from one noise and parts inside the window. Off: every sample has its own noise.",
                ),
                io.Float.Input(
                    "eta", default=_SAMPLING.eta, min=0.01, max=10.0, step=0.01,
                    tooltip="Noise level of the window's steps; 0.7 is the paper's. More explores more.",
                ),
                io.Int.Input(
                    "window_start", default=_WINDOW.start, min=0, max=999, tooltip="First stochastic step, counted from 0."
                ),
                io.Int.Input(
                    "window_size", default=_WINDOW.size, min=1, max=999, tooltip="Number of stochastic steps, which are trained."
                ),
                io.Int.Input(
                    "window_stride", default=_WINDOW.stride, min=0, max=999,
                    tooltip="Steps by which the window moves; 0 leaves it where it is. It stops where it still fits.",
                ),
                io.Int.Input(
                    "window_every", default=_WINDOW.every, min=1, max=999_999,
                    tooltip="Iterations between two moves; for a decay the longest stay.",
                ),
                io.Combo.Input(
                    "window_policy", options=list(WINDOW_POLICIES), default=WINDOW_POLICIES[0],
                    tooltip="progressive: moves as said above. decay, exp_decay: stays shorter the later it is. random: any "
                    "place from window_start on, anew in every iteration. frozen: stays at window_start.",
                ),
                io.Combo.Input(
                    "window_end", options=list(WINDOW_ENDS), default=WINDOW_ENDS[0],
                    tooltip="Where it last fits: stay there (hold), begin again (wrap), go back and forth (bounce).",
                ),
                Mode.Input(
                    "mode", optional=True, tooltip="From Sampling Mode: other dynamics and solvers, Flash. Default: MixGRPO's."
                ),
            ],
            outputs=[Sampling.Output("sampling", display_name="MIXGRPO_SAMPLING", tooltip="For GRPO Train Step.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, steps, schedule, shift, cfg, width, height, shared_noise, eta,
        window_start, window_size, window_stride, window_every, window_policy, window_end, mode=None,
    ) -> io.NodeOutput:  # fmt: skip
        moves = {"stride": window_stride, "every": window_every, "end": window_end}
        place = {"first": window_start} if window_policy == "random" else {"start": window_start}
        fields = {
            "steps": steps,
            "shift": {"shift": shift, "dynamic shift": "dynamic"}.get(schedule, schedule),
            "guidance": cfg,
            "width": width,
            "height": height,
            "shared_noise": shared_noise,
            "eta": eta,
            "window": {
                "policy": window_policy,
                "size": window_size,
                **place,
                **({} if window_policy in ("frozen", "random") else moves),
            },
            "mode": {} if mode is None else dataclasses.asdict(mode),
        }
        return io.NodeOutput(parse_sampling(fields))


class TrainingLora(io.ComfyNode):
    """The adapter to train."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_LoraSettings",
            display_name="LoRA Settings",
            category=CATEGORY,
            description="The adapter that GRPO Train Step trains.",
            inputs=[
                io.Int.Input("rank", default=_LORA.rank, min=1, max=1024, tooltip="Rank of the adapter's matrices."),
                io.Float.Input(
                    "alpha", default=_LORA.alpha, min=0.01, max=65536.0, step=0.5,
                    tooltip="The adapter counts alpha / rank. The LoRA file says so, and loads at full strength 1.",
                ),
                io.Combo.Input(
                    "targets", options=list(TARGETS), default=_LORA.targets,
                    tooltip="Which layers are adapted: the attention's, or the feed-forward ones as well.",
                ),
                io.Boolean.Input(
                    "rslora", default=_LORA.rslora, tooltip="Rank-stabilised: counts alpha / square root of rank instead."
                ),
            ],
            outputs=[LoraSettings.Output("lora_settings", display_name="MIXGRPO_LORA_SETTINGS", tooltip="For GRPO Train Step.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, rank, alpha, targets, rslora) -> io.NodeOutput:
        return io.NodeOutput(parse_lora({"rank": rank, "alpha": alpha, "targets": targets, "rslora": rslora}))


class TrainingOptimizer(io.ComfyNode):
    """AdamW on the clipped objective."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_OptimizerSettings",
            display_name="Optimizer Settings",
            category=CATEGORY,
            description="AdamW and the clipping of GRPO's objective, for GRPO Train Step.",
            inputs=[
                io.Float.Input(
                    "learning_rate", default=_OPTIMIZER.learning_rate, min=1e-8, max=1.0, step=1e-6, round=False,
                    tooltip="Step size of AdamW. A LoRA takes more than full fine-tuning would.",
                ),
                io.Float.Input(
                    "weight_decay", default=_OPTIMIZER.weight_decay, min=0.0, max=1.0, step=1e-5, round=False,
                    tooltip="Pull of the adapter's weights towards 0.",
                ),
                io.Float.Input(
                    "max_grad_norm", default=_OPTIMIZER.max_grad_norm, min=0.001, max=1000.0, step=0.01, round=False,
                    tooltip="Longer gradients are shortened to this.",
                ),
                io.Float.Input(
                    "clip_range", default=_OPTIMIZER.clip_range, min=1e-7, max=0.99, step=1e-5, round=False,
                    tooltip="How far the probability of a step may move from its old value before it earns nothing more.",
                ),
                io.Float.Input(
                    "advantage_clip", default=_OPTIMIZER.advantage_clip, min=0.1, max=1000.0, step=0.1,
                    tooltip="Advantages beyond this many standard deviations are cut.",
                ),
                io.Int.Input(
                    "updates_per_rollout", default=_OPTIMIZER.updates_per_rollout, min=1, max=4096,
                    tooltip="A group is divided into so many updates; it must divide the group size.",
                ),
            ],
            outputs=[OptimizerSettings.Output("optimizer", display_name="MIXGRPO_OPTIMIZER", tooltip="For GRPO Train Step.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, learning_rate, weight_decay, max_grad_norm, clip_range, advantage_clip, updates_per_rollout
    ) -> io.NodeOutput:
        fields = {
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "clip_range": clip_range,
            "advantage_clip": advantage_clip,
            "updates_per_rollout": updates_per_rollout,
        }
        return io.NodeOutput(parse_optimizer(fields))
