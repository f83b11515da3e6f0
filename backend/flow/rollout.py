"""The rollout: one loop over the plan, which says "ODE or SDE here?", and the trajectory that it leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixGRPOError
from .dynamics import LOG_PROBS, StepCoefficients, sde_coefficients, sde_mean
from .plan import MIXGRPO, PlannedStep, RolloutPlan, SamplingMode, plan_rollout
from .sigmas import working_dtype
from .solvers import SOLVERS, Prediction, ode_step
from .window import Window

Velocity = Callable[[Tensor, Tensor], Tensor]


class RolloutError(MixGRPOError):
    """Arguments of a rollout that do not fit together."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout of P groups of G samples leaves behind; rows are group-major (group p owns rows p G … p G + G - 1).

    Attributes:
        sigmas: the table, (N + 1,), as it was given.
        window: its absolute steps are the w stored ones; when ``eta`` is 0 or the window is empty there are none (w = 0 below).
        eta: noise level.
        group_size: G.
        groups: P.
        shared: whether the members of a group began from one initial noise.
        states: [] when w = 0, else w + 1 latents, (P G, …); ``states[0]`` has P rows when ``shared``.
        means: w means of the stochastic steps, (P G, …).
        log_probs: (w, P G), of ``states[k + 1]`` under ``means[k]``, on the scale ``mode.log_prob``.
        final: (P G, …).
        mode: dynamics, solvers and the scale of the log-probs.
        first_step: the absolute step that ``sigmas`` begins with.
    """

    sigmas: Tensor
    window: Window
    eta: float
    group_size: int
    groups: int
    shared: bool
    states: list[Tensor]
    means: list[Tensor]
    log_probs: Tensor
    final: Tensor
    mode: SamplingMode = MIXGRPO
    first_step: int = 0

    @property
    def plan(self) -> RolloutPlan:
        """Every step that was taken."""
        return plan_rollout(self.sigmas, self.window, self.eta, self.mode, self.first_step)

    @property
    def stds(self) -> list[float]:
        """The standard deviations s of the w stochastic steps."""
        return [self.coefficients(index).s for index in range(len(self.means))]

    def coefficients(self, index: int) -> StepCoefficients:
        """The coefficients of window step ``index`` (0 … w - 1)."""
        step = self.window.steps[index]
        return sde_coefficients(self.sigmas, self.eta, self.window, self.mode.dynamics, self.first_step)[step]

    def sigma(self, index: int) -> Tensor:
        """The 0-dim entry of the table at which window step ``index`` begins."""
        return self.sigmas[self.window.steps[index] - self.first_step]


@torch.no_grad()
def rollout(
    velocity: Velocity,
    initial: Tensor,
    sigmas: Tensor,
    window: Window,
    eta: float,
    noise: Callable[[int], Tensor],
    group_size: int,
    *,
    shared: bool = True,
    on_step: Callable[[int, int], None] | None = None,
    mode: SamplingMode = MIXGRPO,
    first_step: int = 0,
) -> Trajectory:
    """Mixed ODE-SDE sampling (MixGRPO): stochastic inside the window, deterministic outside.

    With ``shared`` initial noise a group is one row until noise first parts its members, which is after the model call of the
    first window step: (l + 1) + G (N - l - 1) model rows per group instead of G N, if every step is one call;
    :meth:`~.plan.RolloutPlan.rows` counts for every mode.

    Args:
        velocity: (x, sigma) -> v; x has P or P G rows, group-major; sigma is a 0-dim entry of the table in x's arithmetic. Called
            in the order of the steps, by Heun's twice a step.
        initial: the latent at sigma_0: (P, …) when ``shared``, else (P G, …).
        sigmas: (N + 1,), strictly decreasing within [0, 1].
        window: the SDE steps; never the one to sigma 0.
        eta: noise level >= 0.
        noise: absolute step -> standard normal (P G, …); called for window steps only.
        group_size: G >= 1.
        shared: one initial noise per group.
        on_step: called with (steps done, steps) after every step.
        mode: dynamics, log-prob, solvers, Flash; the defaults are Flow-SDE, its density, and Euler.
        first_step: the absolute step that ``sigmas`` begins with, when it is a part of a split table. The parts together give the
            whole, exactly where a step depends on nothing before it: all but the multistep solvers, which begin anew.

    Returns:
        Trajectory: in float32, or float64 when ``initial`` is.

    Raises:
        SigmaError, WindowError, EtaError, PlanError: the table, the window, the noise level or the mode does not fit.
        RolloutError: the rows of ``initial`` or of the noise do not fit the groups.
    """
    plan = plan_rollout(sigmas, window, eta, mode, first_step)
    groups = _count_groups(len(initial), group_size, shared)
    if shared and eta > 0 and window.size and window.start < first_step:
        raise RolloutError(
            f"the window began at step {window.start}, before this part's first step {first_step}, so the members of a group "
            "have parted: give every sample its row, and do not share"
        )

    x = initial.to(working_dtype(initial))
    table = torch.tensor(plan.sigmas, dtype=torch.float64).to(x)
    states, means, log_probs = [], [], []
    past = _Past(plan)
    for i, step in enumerate(plan.steps):
        v = velocity(x, table[i])
        past.add(x, v, step)
        if step.coefficients:
            k = step.coefficients
            states = states or [x]
            mean = _one_row_each(sde_mean(x, v, k), groups * group_size)
            x = mean + k.s * _checked(noise(step.index), mean)
            states.append(x)
            means.append(mean)
            log_probs.append(LOG_PROBS[mode.log_prob](x, mean, mean, k.s))
        else:
            x = ode_step(SOLVERS[step.method], x, v, table, i, velocity, past.newest(step.order, len(x)))
        if on_step:
            on_step(i + 1, len(plan.steps))

    return Trajectory(
        sigmas=sigmas,
        window=plan.window,
        eta=eta,
        group_size=group_size,
        groups=groups,
        shared=shared,
        states=states,
        means=means,
        log_probs=torch.stack(log_probs) if log_probs else x.new_zeros(0, groups * group_size),
        final=_one_row_each(x, groups * group_size),
        mode=mode,
        first_step=first_step,
    )


class _Past:
    """The newest predictions of x0, as many as any multistep step of the plan uses; none when there is no such step."""

    def __init__(self, plan: RolloutPlan):
        multistep = [step.order for step in plan.steps if not step.coefficients and SOLVERS[step.method].family == "dpmpp"]
        self._predictions: deque[Prediction] = deque(maxlen=max(multistep, default=0))

    def add(self, x: Tensor, velocity: Tensor, step: PlannedStep) -> None:
        if self._predictions.maxlen:
            self._predictions.appendleft(Prediction(step.sigma, x - step.sigma * velocity.to(x)))

    def newest(self, count: int, rows: int) -> list[Prediction]:
        """The newest ``count``; those of a group that was one row then are repeated for its members."""
        newest = list(self._predictions)[:count]
        return [Prediction(p.sigma, _one_row_each(p.x0, rows)) for p in newest]


def _count_groups(rows: int, group_size: int, shared: bool) -> int:
    """P, from the rows of the initial latent."""
    if group_size < 1 or rows < 1:
        raise RolloutError(f"a rollout needs at least one group of at least one sample, got {rows} rows, group size {group_size}")
    if shared:
        return rows
    if rows % group_size:
        raise RolloutError(f"{rows} initial rows are not whole groups of {group_size}; give every sample of a group a row")
    return rows // group_size


def _one_row_each(x: Tensor, rows: int) -> Tensor:
    """Give every member of a group its row, if the group is still one row."""
    return x if len(x) == rows else x.repeat_interleave(rows // len(x), dim=0)


def _checked(noise: Tensor, mean: Tensor) -> Tensor:
    """The noise in the mean's dtype and device; broadcasting would make samples share noise unseen, so shapes must agree."""
    if noise.shape != mean.shape:
        raise RolloutError(f"step noise has shape {tuple(noise.shape)}, but the samples have {tuple(mean.shape)}")
    return noise.to(mean)
