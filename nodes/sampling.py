"""The rollout of ``backend/flow`` as a ComfyUI sampler function: what is sampled here is what is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..backend.flow.noise import step_noise
from ..backend.flow.plan import MIXGRPO, RolloutPlan, SamplingMode, plan_rollout
from ..backend.flow.rollout import Trajectory, rollout
from ..backend.flow.window import Window
from .checks import GraphError, check_flow, check_rows, differs_by_row

USED, NOT_SHARED = "used", "not shared"
"""Two states of the shared prefix; the others are what keeps it from being used, as ``differs_by_row`` names it."""


@dataclass(frozen=True)
class GroupSettings:
    """How a batch is drawn: groups of ``group_size`` rows, stochastic inside ``window``.

    ``first_step`` is the absolute step that the sigmas begin with, when they are a part of a split table; the window counts
    absolute steps.
    """

    group_size: int
    shared_noise: bool
    eta: float
    window: Window
    mode: SamplingMode = MIXGRPO
    first_step: int = 0

    @property
    def shared(self) -> bool:
        """Whether several rows begin from one noise; a sample alone shares with nobody."""
        return self.shared_noise and self.group_size > 1

    def plan(self, sigmas: Tensor) -> RolloutPlan:
        """Every step that a rollout over ``sigmas`` takes.

        Raises:
            MixGRPOError: the table, window, noise level or mode does not fit, or the group has nothing to share any more.
        """
        if self.shared and self.eta > 0 and self.window.size and self.window.start < self.first_step:
            raise GraphError(
                f"the window began at step {self.window.start}, before this part's first step {self.first_step}, so the "
                "members of a group have parted and share nothing any more; turn shared_noise off in this sampler"
            )
        return plan_rollout(sigmas, self.window, self.eta, self.mode, self.first_step)


@dataclass(frozen=True)
class Run:
    """What a run of the sampler leaves behind.

    Attributes:
        rows: that the model has computed, guidance and whatever else multiplies them included.
        prefix: whether the steps that the members of a group share were computed once: "used", or why not ("not shared",
            "mask", "control", "batched conditioning", "guider").
    """

    trajectory: Trajectory
    rows: int
    prefix: str


def sample_groups(
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    disable: bool | None = None,
    *,
    settings: GroupSettings,
    sample_ids: Sequence[int] | None = None,
    record: Callable[[Run], None] | None = None,
) -> Tensor:
    """Mixed ODE-SDE sampling (MixGRPO) with ComfyUI's signature of a sampler function; eta 0 or an empty window is the ODE.

    Args:
        model: ComfyUI's denoiser, (x, sigma) -> x0, around its guider.
        x: (P G, …) at sigma_0, group-major; with shared noise the first row of a group serves all its members.
        sigmas: (N + 1,).
        extra_args: handed to ``model``; its seed is the seed of the step noise.
        callback: called once a step, at its first model call. When Flash leaves steps out, ``i`` moves on in proportion.
        settings: the groups, the noise level, the window and the mode.
        sample_ids: what the step noise of a row depends on; its number in the batch if not given.
        record: receives the run.

    Raises:
        MixGRPOError: no flow model, or the table, window, noise level, mode or rows do not fit; the model returned NaN.
    """
    if len(sigmas) < 2:
        return x
    check_flow(model.inner_model.inner_model.model_sampling)
    size = settings.group_size
    if len(x) % size:
        raise GraphError(f"a batch of {len(x)} latents is not whole groups of {size}; change the batch size or the group size")
    check_rows(model.inner_model, len(x))
    plan = settings.plan(sigmas)
    extra_args = extra_args or {}
    prefix = NOT_SHARED
    if settings.shared:
        prefix = differs_by_row(model.inner_model, extra_args.get("denoise_mask")) or USED
        x = _first_rows(model, x, settings)
    if prefix not in (USED, NOT_SHARED):
        logging.info("MixGRPO: the steps that a group shares are computed for each of its samples, because of: %s", prefix)
    ids = list(range(len(x))) if sample_ids is None else list(sample_ids)
    options, rows = _counting_rows(extra_args.get("model_options", {}))
    seed = extra_args.get("seed") or 0
    with tqdm(total=len(plan.steps), disable=disable) as bar:
        trajectory = rollout(
            _Velocity(model, extra_args | {"model_options": options}, callback, ids, plan, len(sigmas) - 1),
            x[::size] if prefix == USED else x,
            sigmas,
            settings.window,
            settings.eta,
            lambda step: step_noise(seed, ids, step, x.shape[1:]),
            size,
            shared=prefix == USED,
            on_step=lambda done, steps: bar.update(),
            mode=settings.mode,
            first_step=settings.first_step,
        )
    if record:
        record(Run(trajectory, sum(rows), prefix))
    return trajectory.final.to(x.dtype)


def _first_rows(model: Any, x: Tensor, settings: GroupSettings) -> Tensor:
    """The batch with the first row of every group for all its members; and so the noise that a mask's kept region is given."""
    size = settings.group_size
    if getattr(model, "noise", None) is not None:
        model.noise = model.noise[::size].repeat_interleave(size, 0)
    return x[::size].repeat_interleave(size, 0)


def _counting_rows(model_options: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """A copy of ``model_options`` for one run, and the list to which every call of the model adds its rows."""
    from comfy.model_patcher import create_model_options_clone
    from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

    options, rows = create_model_options_clone(model_options), []

    def count(executor: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(x))
        return executor(x, *args, **kwargs)

    add_wrapper_with_key(WrappersMP.APPLY_MODEL, "MixGRPO", count, options, is_model_options=True)
    return options, rows


class _Velocity:
    """v = (x - x0) / sigma from ComfyUI's denoiser, with ComfyUI's callback at every step and its interrupt at every call."""

    def __init__(
        self, model: Any, extra_args: dict[str, Any], callback: Callable | None, ids: list[int], plan: RolloutPlan, total: int
    ):
        self._model, self._extra_args, self._callback, self._ids = model, extra_args, callback, ids
        shown = [(done * total) // len(plan.steps) - 1 for done in range(1, len(plan.steps) + 1)]
        self._calls = iter([
            (step.index, i if k == 0 else None)
            for step, i in zip(plan.steps, shown, strict=True) for k in range(step.calls)
        ])  # fmt: skip

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        from comfy.model_management import throw_exception_if_processing_interrupted

        throw_exception_if_processing_interrupted()
        step, shown = next(self._calls)
        members = len(self._ids) // len(x)
        denoised = self._model(x, sigma * x.new_ones([len(x)]), **self._extra_args)
        if not torch.isfinite(denoised).all():
            broken = [self._ids[row * members] for row, one in enumerate(denoised) if not torch.isfinite(one).all()]
            raise GraphError(
                f"the model returned NaN or infinity at step {step} for sample {broken[0]} (sigma {float(sigma):.4g}; "
                f"{len(broken)} of {len(x)} rows); look for a broken LoRA or too high a cfg, or run ComfyUI with --force-fp32"
            )
        if self._callback is not None and shown is not None:
            every = denoised.repeat_interleave(members, 0) if members > 1 else denoised
            self._callback({"x": x, "i": shown, "sigma": sigma, "sigma_hat": sigma, "denoised": every})
        return (x - denoised) / sigma
