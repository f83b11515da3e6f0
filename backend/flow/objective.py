"""The clipped objective, the KL to the base, and the training pass that recomputes what the rollout stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixGRPOError
from .dynamics import LOG_PROBS, StepCoefficients, sde_mean, velocity_gain
from .names import named
from .rollout import Trajectory, Velocity

FLOAT32_LIMIT = 1e-5


class ReplayMismatch(MixGRPOError):
    """The training pass does not compute what the rollout computed; updating would follow the difference, not the reward."""


@dataclass(frozen=True)
class ObjectiveTerms:
    """Per row: the loss to minimise, the probability ratio, and whether the ratio has left its range."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_objective(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float, clip_range_high: float | None = None
) -> ObjectiveTerms:
    """max(-A rho, -A clip(rho, 1 - eps, 1 + eps_high)) per row, rho = exp(log p - log p_old).

    Args:
        log_prob: (rows,), with gradient.
        old_log_prob: (rows,), from the rollout.
        advantages: (rows,).
        clip_range: eps > 0; small (1e-4), because :func:`~.dynamics.log_prob` is a mean over dims, and smaller where the scale of
            the log-prob is (:data:`~.dynamics.LOG_PROBS`).
        clip_range_high: eps_high > 0, how far the ratio of a good sample may rise; None is eps, too.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    ratio = (log_prob - old_log_prob.detach()).exp()
    held = ratio.clamp(1 - clip_range, 1 + high)
    loss = torch.maximum(-advantages * ratio, -advantages * held)
    ratio = ratio.detach()
    return ObjectiveTerms(loss, ratio, (ratio - 1 > high) | (1 - ratio > clip_range))


STEP_WEIGHTS: dict[str, Callable[[StepCoefficients, int], float]] = {
    "equal": lambda k, steps: 1.0,
    "inverse_dt": lambda k, steps: 1 / (steps * (k.sigma - k.sigma_next)),
}
"""By name: (a step's coefficients, N) -> what its clipped objective is multiplied by.

"inverse_dt" is the per-step balance of GRPO-Guard, 1 / |dt|: under RatioNorm a step moves its mean by about |dt| times what the
velocity moves, so without it large steps decide. The factor 1 / N makes it 1 at every step of a table of equal steps, whatever
window is trained.
"""


KL_SPACES: dict[str, Callable[[StepCoefficients], float]] = {
    "velocity": lambda k: 1.0,
    "mean": lambda k: velocity_gain(k) ** 2 / (2 * k.s**2),
    "mean_rate": lambda k: velocity_gain(k) ** 2 * (k.sigma - k.sigma_next) / (2 * k.s**2),
    "mean_square": lambda k: velocity_gain(k) ** 2,
}
"""By name: what the mean square of v - v_base is multiplied by, since mu - mu_base is :func:`~.dynamics.velocity_gain` times it.

velocity: mean (v - v_base)^2. mean: mean (mu - mu_base)^2 / (2 s^2), the KL divergence of the step's two normal distributions,
per dimension. mean_rate: that times |dt|, Flow-GRPO's form, whose std is the one of a unit of time. mean_square:
mean (mu - mu_base)^2, without the division that makes late steps weigh most.
"""


def kl_to_base(velocity: Tensor, base_velocity: Tensor, coefficients: StepCoefficients, space: str) -> Tensor:
    """How far the model has gone from the base at one step, per row, (rows,); 0 where both agree.

    Args:
        velocity: (rows, …), with gradient.
        base_velocity: the same of the base model; it receives no gradient.
        space: a name in :data:`KL_SPACES`.
    """
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    square = (velocity.to(dtype) - base_velocity.detach().to(dtype)).square().flatten(1).mean(1)
    return square * named(KL_SPACES, space, "space of the KL")(coefficients)


def replay_groups(trajectory: Trajectory, index: int, members: Tensor) -> Tensor:
    """The group of every model row that :func:`replay_step` will ask for, in order: what to condition those rows on.

    At a shared first window step there is one row per group that has a member, in rising order; else one row per member.
    """
    groups = members // trajectory.group_size
    return groups.unique() if _one_row_per_group(trajectory, index) else groups


@dataclass(frozen=True)
class Replay:
    """What the present model makes of a window step for some samples: its velocity and the step's mean, (m, …)."""

    velocity: Tensor
    mean: Tensor


def replay_step(velocity: Velocity, trajectory: Trajectory, index: int, members: Tensor) -> Replay:
    """Window step ``index`` under the present model, with gradient, for some of the samples.

    At a shared first window step the members of a group have one and the same model input, so the model sees it once and the
    results are broadcast; autograd then sums their gradients, which equals the sum of per-sample gradients.

    Args:
        velocity: as in the rollout, for the rows that :func:`replay_groups` lists.
        index: 0 … w - 1, counted from the window's start.
        members: int64 (m,), rows into P G.
    """
    once = _one_row_per_group(trajectory, index)
    groups = replay_groups(trajectory, index, members)
    x = trajectory.states[index][groups if once else members]
    v = velocity(x, trajectory.sigma(index).to(x))
    mean = sde_mean(x, v, trajectory.coefficients(index))
    if not once:
        return Replay(v, mean)
    row = torch.searchsorted(groups, members // trajectory.group_size)
    return Replay(v[row], mean[row])


def replay_log_prob(trajectory: Trajectory, index: int, members: Tensor, mean: Tensor) -> Tensor:
    """log p of the stored next states of ``members`` under ``mean``, (m,), on the trajectory's own scale."""
    scale = LOG_PROBS[trajectory.mode.log_prob]
    return scale(trajectory.states[index + 1][members], mean, trajectory.means[index][members], trajectory.coefficients(index).s)


@dataclass(frozen=True)
class ReplayGap:
    """How far a training pass before the first update is from the rollout: max |mu - mu_old| / s and max |log p - log p_old|."""

    mean_gap: float
    log_prob_gap: float

    def worst(self, other: ReplayGap) -> ReplayGap:
        """The larger of both gaps; NaN stays."""
        return ReplayGap(_larger(self.mean_gap, other.mean_gap), _larger(self.log_prob_gap, other.log_prob_gap))


@torch.no_grad()
def replay_gap(trajectory: Trajectory, index: int, members: Tensor, mean: Tensor) -> ReplayGap:
    """Compare the ``mean`` of :func:`replay_step` with what the rollout stored for the same step and members."""
    mean_gap = (mean - trajectory.means[index][members]).abs().max() / trajectory.coefficients(index).s
    log_prob_gap = (replay_log_prob(trajectory, index, members, mean) - trajectory.log_probs[index][members]).abs().max()
    return ReplayGap(mean_gap.item(), log_prob_gap.item())


def check_replay(gap: ReplayGap, dtype: torch.dtype, clip_range: float) -> None:
    """The replay gate: stop when rollout and training pass disagree.

    float32 and float64: either gap above 1e-5. Lower precision: |d log p| above a quarter of the clip range, because the
    ratio then leaves the clip range by rounding alone.

    Args:
        dtype: the model's arithmetic.

    Raises:
        ReplayMismatch: with the numbers, what they point to, and the way out.
    """
    found = f"max |d mean| / s = {gap.mean_gap:.2g}, max |d log p| = {gap.log_prob_gap:.2g} before any update"
    if dtype in (torch.float32, torch.float64):
        if gap.mean_gap <= FLOAT32_LIMIT and gap.log_prob_gap <= FLOAT32_LIMIT:
            return
        raise ReplayMismatch(
            f"the training pass does not repeat the rollout: {found}, float32 allows {FLOAT32_LIMIT:g}. {_diagnose(gap, 1e-3)}"
        )
    limit = clip_range / 4
    if gap.log_prob_gap <= limit:
        return
    raise ReplayMismatch(
        f"the training pass does not repeat the rollout: {found}, and {str(dtype).removeprefix('torch.')} allows |d log p| a "
        f"quarter of the clip range, {limit:.2g}. {_diagnose(gap, 0.05)} If rounding remains, train in float32 or set the clip "
        f"range to at least {5 * gap.log_prob_gap:.2g}."
    )


def _diagnose(gap: ReplayGap, rounding: float) -> str:
    """Name the likely cause: mean gaps up to ``rounding`` come from arithmetic, larger ones from another computation."""
    if not (math.isfinite(gap.mean_gap) and math.isfinite(gap.log_prob_gap)):
        return "The model returned NaN or infinity: use float32, or lower the guidance or the learning rate."
    if gap.mean_gap <= rounding:
        return (
            "A gap this small is rounding: turn TF32 off, use the same autocast in both passes, and give both the same rows per "
            "model call, because another batch size may choose another kernel."
        )
    return (
        "A gap this large is another computation: sigma, guidance, prompt embedding, row order and dtype must be the rollout's, "
        "dropout off, and the adapter the same and switched on in both."
    )


def _one_row_per_group(trajectory: Trajectory, index: int) -> bool:
    return trajectory.shared and index == 0


def _larger(a: float, b: float) -> float:
    return a if a != a or a >= b else b
