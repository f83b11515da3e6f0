"""The rollout of ``backend/flow`` as a ComfyUI sampler function: what is sampled here is what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..backend.flow.noise import step_noise
from ..backend.flow.plan import MIXGRPO, SamplingMode
from ..backend.flow.rollout import Trajectory, rollout
from ..backend.flow.window import Window
from .checks import GraphError, check_flow


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
    record: Callable[[Trajectory], None] | None = None,
) -> Tensor:
    """Mixed ODE-SDE sampling (MixGRPO) with ComfyUI's signature of a sampler function; eta 0 or an empty window is ``euler``.

    Args:
        model: ComfyUI's denoiser, (x, sigma) -> x0, around its guider.
        x: (P G, …) at sigma_0, group-major; with shared noise the first row of a group serves all its members.
        sigmas: (N + 1,).
        extra_args: handed to ``model``; its seed is the seed of the step noise.
        settings: the groups, the noise level and the window.
        sample_ids: what the step noise of a row depends on; its number in the batch if not given.
        record: receives the trajectory.

    Raises:
        MixGRPOError: no flow model, or the table, window, noise level or rows do not fit; the model returned NaN.
    """
    if len(sigmas) < 2:
        return x
    check_flow(model.inner_model.inner_model.model_sampling)
    size = settings.group_size
    if len(x) % size:
        raise GraphError(f"a batch of {len(x)} latents is not whole groups of {size}; change the batch size or the group size")
    extra_args = extra_args or {}
    seed = extra_args.get("seed") or 0
    ids = list(range(len(x))) if sample_ids is None else list(sample_ids)
    with tqdm(total=len(sigmas) - 1, disable=disable) as bar:
        trajectory = rollout(
            _Velocity(model, extra_args, callback, len(x)),
            x[::size] if settings.shared_noise else x,
            sigmas,
            settings.window,
            settings.eta,
            lambda step: step_noise(seed, ids, step, x.shape[1:]),
            size,
            shared=settings.shared_noise,
            on_step=lambda done, steps: bar.update(),
            mode=settings.mode,
            first_step=settings.first_step,
        )
    if record:
        record(trajectory)
    return trajectory.final.to(x.dtype)


class _Velocity:
    """v = (x - x0) / sigma from ComfyUI's denoiser, with ComfyUI's callback and interrupt at every step."""

    def __init__(self, model: Any, extra_args: dict[str, Any], callback: Callable | None, rows: int):
        self._model, self._extra_args, self._callback, self._rows = model, extra_args, callback, rows
        self._one_row_serves_all = _treats_rows_alike(model, extra_args.get("denoise_mask"))
        self._step = 0

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        from comfy.model_management import throw_exception_if_processing_interrupted

        throw_exception_if_processing_interrupted()
        members = self._rows // len(x)
        split = members > 1 and not self._one_row_serves_all
        rows = x.repeat_interleave(members, 0) if split else x
        denoised = self._model(rows, sigma * rows.new_ones([len(rows)]), **self._extra_args)
        denoised = denoised[::members] if split else denoised
        if not torch.isfinite(denoised).all():
            raise GraphError(
                f"the model returned NaN or infinity at step {self._step} (sigma {float(sigma):.4g}); look for a broken LoRA or "
                "too high a cfg, or run ComfyUI with --force-fp32"
            )
        if self._callback is not None:
            shown = denoised.repeat_interleave(members, 0) if members > 1 else denoised
            self._callback({"x": x, "i": self._step, "sigma": sigma, "sigma_hat": sigma, "denoised": shown})
        self._step += 1
        return (x - denoised) / sigma


def _treats_rows_alike(model: Any, denoise_mask: Tensor | None) -> bool:
    """Whether one row may stand for its whole group: nothing that the model is told differs from row to row.

    A mask, a ControlNet, or a conditioning with rows of its own belongs to rows of the full batch.
    """
    conds = getattr(model.inner_model, "conds", None)
    if denoise_mask is not None or conds is None:
        return False
    for entry in (entry for entries in conds.values() for entry in entries or ()):
        if "control" in entry or _has_rows(entry.get("mask")):
            return False
        if any(_has_rows(getattr(value, "cond", None)) for value in entry.get("model_conds", {}).values()):
            return False
    return True


def _has_rows(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_rows(part) for part in value)
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) > 1
