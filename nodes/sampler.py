"""The sampler nodes: all in one, and as a SAMPLER for SamplerCustomAdvanced."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from comfy_api.latest import io

from ..backend.flow.noise import initial_noise
from ..backend.flow.plan import MIXGRPO
from ..backend.flow.rollout import Trajectory
from ..backend.flow.sigmas import check_sigmas
from ..backend.flow.window import Window
from .checks import Conditioning, GraphError, check_conditioning, check_flow, guides, spread, unseen_by_trainer
from .mode import group_inputs, mode_inputs
from .plan import step_rows
from .sampling import USED, GroupSettings, Run, sample_groups
from .schedule import schedule_inputs, sigma_table
from .types import CATEGORY, TrajectoryType


class FlowSampler(io.ComfyNode):
    """Draws groups as the trainer does. Every row of the latent becomes a group; rows are group-major."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_Sampler",
            display_name="MixGRPO Sampler",
            category=CATEGORY,
            description="Draws groups of pictures exactly as MixGRPO's trainer does: euler, with noise inside a window of steps.",
            inputs=[
                io.Model.Input("model", tooltip="A flow-matching model: the starter, SD3, Flux, Qwen-Image, …"),
                io.Conditioning.Input("positive", tooltip="One prompt for all groups, or one for each."),
                io.Conditioning.Input("negative", tooltip="Steered away from when cfg is not 1; one prompt, or one per group."),
                io.Latent.Input("latent_image", tooltip="Every latent of the batch becomes a group of samples."),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**64 - 1, control_after_generate=True,
                    tooltip="Initial noise as in KSampler; the window's noise is drawn from a stream of its own.",
                ),
                *schedule_inputs(),
                io.Float.Input(
                    "cfg", default=1.0, min=0.0, max=100.0, step=0.1,
                    tooltip="Classifier-free guidance; 1 ignores the negative prompt and costs half.",
                ),
                *group_inputs(),
                io.Sigmas.Input("sigmas", optional=True, tooltip="Used instead of steps, schedule and shift when connected."),
                *mode_inputs(),
            ],
            outputs=[
                io.Latent.Output("samples", display_name="LATENT", tooltip="group size latents for every input latent."),
                TrajectoryType.Output(
                    "trajectory", display_name="TRAJECTORY",
                    tooltip="Latents, sigmas, means, standard deviations and log-probabilities of the window's steps.",
                ),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model, positive, negative, latent_image, seed, steps, schedule, shift, cfg,
        group_size, shared_noise, eta, window_start, window_size, sigmas=None, mode=MIXGRPO, first_step=0,
    ) -> io.NodeOutput:  # fmt: skip
        import comfy.sample

        check_flow(model.get_model_object("model_sampling"))
        if latent_image["samples"].is_nested:
            raise GraphError("this sampler draws one kind of latent at a time, and this one holds several; use the SAMPLER node")
        latent = comfy.sample.fix_empty_latent_channels(model, latent_image["samples"])
        if sigmas is None:
            sigmas = sigma_table(schedule, steps, shift, model, latent)
        check_sigmas(sigmas)
        settings = GroupSettings(group_size, shared_noise, eta, Window(window_start, window_size), mode, first_step)
        unseen = unseen_by_trainer(model, positive, negative)
        if unseen:
            logging.warning(
                "MixGRPO Sampler: this graph carries %s, which a trainer that loads the base model does not see: "
                "it would draw other pictures", ", ".join(unseen),
            )  # fmt: skip
        batch = _Batch.of(latent_image, latent, settings, seed)
        samples, run = _sample(model, positive, negative, batch, settings, sigmas, cfg, seed)
        summary = _summary(run, batch, unseen, guided=guides(model, cfg))
        return io.NodeOutput(batch.output(latent_image, samples), run.trajectory, ui={"mixgrpo_sampler": [summary]})


class FlowSamplerObject(io.ComfyNode):
    """The same sampler for any guider; the batch it is given is divided into groups."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_SamplerObject",
            display_name="MixGRPO Sampler (SAMPLER)",
            category=CATEGORY,
            description="MixGRPO's sampler for SamplerCustomAdvanced and every guider. The batch must be whole groups.",
            inputs=[*group_inputs(), *mode_inputs()],
            outputs=[io.Sampler.Output("sampler", display_name="SAMPLER", tooltip="For SamplerCustomAdvanced.")],
        )

    @classmethod
    def execute(cls, group_size, shared_noise, eta, window_start, window_size, mode=MIXGRPO, first_step=0) -> io.NodeOutput:
        import comfy.samplers

        settings = GroupSettings(group_size, shared_noise, eta, Window(window_start, window_size), mode, first_step)
        return io.NodeOutput(comfy.samplers.KSAMPLER(sample_groups, extra_options={"settings": settings}))


@dataclasses.dataclass(frozen=True)
class _Batch:
    """A LATENT with a row for every sample, group-major."""

    latent: torch.Tensor  # (P G, …)
    noise: torch.Tensor  # (P G, …)
    mask: torch.Tensor | None
    ids: list[int]
    groups: int

    @classmethod
    def of(cls, given: dict[str, Any], latent: torch.Tensor, settings: GroupSettings, seed: int) -> _Batch:
        """Noise is ComfyUI's ``prepare_noise``: of the groups when they share it, else of all samples; ``batch_index`` counts."""
        groups, size = len(latent), settings.group_size
        index = given.get("batch_index")
        if index is not None and len(index) != groups:
            raise GraphError(f"the latent's batch_index names {len(index)} rows, but the batch has {groups}; use LatentFromBatch")
        ids = [row * size + member for row in (index or range(groups)) for member in range(size)]
        if settings.shared_noise:
            noise = initial_noise(seed, latent.shape, index).repeat_interleave(size, 0)
        else:
            noise = initial_noise(seed, (groups * size, *latent.shape[1:]), ids if index else None)
        mask = given.get("noise_mask")
        if mask is not None and len(mask) == groups:
            mask = mask.repeat_interleave(size, 0)
        return cls(latent.repeat_interleave(size, 0), noise, mask, ids, groups)

    def output(self, given: dict[str, Any], samples: torch.Tensor) -> dict[str, Any]:
        """The LATENT that leaves the node; what else the given one carries goes with it."""
        rows = {"noise_mask": self.mask, "batch_index": self.ids}
        return given | {"samples": samples} | {key: value for key, value in rows.items() if key in given}


def _sample(
    model: Any, positive: Conditioning, negative: Conditioning, batch: _Batch, settings: GroupSettings,
    sigmas: torch.Tensor, cfg: float, seed: int,
) -> tuple[torch.Tensor, Run]:  # fmt: skip
    """Draw the batch with a CFGGuider; latents as ComfyUI scales them, the trajectory in the model's own scale."""
    import comfy.model_management
    import comfy.samplers
    import comfy.utils
    import latent_preview

    for name, conditioning in (("positive", positive), ("negative", negative)):
        check_conditioning(name, conditioning, batch.groups)
    recorded: list[Run] = []
    options = {"settings": settings, "sample_ids": batch.ids, "record": recorded.append}
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(*(spread(conditioning, batch.groups, settings.group_size) for conditioning in (positive, negative)))
    guider.set_cfg(cfg)
    samples = guider.sample(
        batch.noise,
        batch.latent,
        comfy.samplers.KSAMPLER(sample_groups, extra_options=options),
        sigmas,
        denoise_mask=batch.mask,
        callback=latent_preview.prepare_callback(model, len(sigmas) - 1),
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    device = comfy.model_management.intermediate_device()
    (run,) = recorded
    return samples.to(device), dataclasses.replace(run, trajectory=_moved(run.trajectory, device))


def _moved(trajectory: Trajectory, device: torch.device) -> Trajectory:
    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [tensor.to(device) for tensor in value]
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return Trajectory(**{field.name: move(getattr(trajectory, field.name)) for field in dataclasses.fields(trajectory)})


def _summary(run: Run, batch: _Batch, unseen: list[str], guided: bool) -> dict[str, Any]:
    """What ``/history`` keeps of a run."""
    trajectory, plan = run.trajectory, run.trajectory.plan
    predicted = plan.rows(trajectory.group_size, batch.groups, shared=run.prefix == USED, cfg=guided)
    return {
        "sigmas": plan.sigmas,
        "window": [trajectory.window.start, trajectory.window.size],
        "std": trajectory.stds,
        "log_probs": trajectory.log_probs.tolist(),
        "samples": batch.ids,
        "unseen": unseen,
        "mode": dataclasses.asdict(trajectory.mode),
        "steps": step_rows(plan),
        "nfe": plan.nfe,
        "rows": run.rows,
        "rows_predicted": predicted,
        "shared_prefix": run.prefix,
    }
