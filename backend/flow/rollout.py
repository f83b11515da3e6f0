"""The rollout: one loop over the sigma table that asks the window "ODE or SDE here?"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixGRPOError
from .dynamics import StepCoefficients, euler_step, log_prob, sde_coefficients, sde_mean
from .sigmas import check_sigmas, working_dtype
from .window import Window

Velocity = Callable[[Tensor, Tensor], Tensor]


class RolloutError(MixGRPOError):
    """Arguments of a rollout that do not fit together."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout of P groups of G samples leaves behind; rows are group-major (group p owns rows p G … p G + G - 1).

    Attributes:
        sigmas: the table, (N + 1,), as it was given.
        window: its steps are the w stored ones; when ``eta`` is 0 or the window is empty there are none (w = 0 below).
        eta: noise level.
        group_size: G.
        groups: P.
        shared: whether the members of a group began from one initial noise.
        states: [] when w = 0, else w + 1 latents, (P G, …); ``states[0]`` has P rows when ``shared``.
        means: w means of the stochastic steps, (P G, …).
        log_probs: (w, P G), of ``states[k + 1]`` under ``means[k]``.
        final: (P G, …).
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

    @property
    def stds(self) -> list[float]:
        """The standard deviations s of the w stochastic steps."""
        return [self.coefficients(index).s for index in range(len(self.means))]

    def coefficients(self, index: int) -> StepCoefficients:
        """The coefficients of window step ``index`` (0 … w - 1)."""
        step = self.window.steps[index]
        return sde_coefficients(self.sigmas, self.eta, self.window)[step]


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
) -> Trajectory:
    """Mixed ODE-SDE sampling (MixGRPO): Flow-SDE inside the window, Euler outside.

    With ``shared`` initial noise a group is one row until noise first parts its members, which is after the model call of the
    first window step: (l + 1) + G (N - l - 1) model rows per group instead of G N.

    Args:
        velocity: (x, sigma) -> v; x has P or P G rows, group-major; sigma is a 0-dim entry of the table in x's arithmetic.
        initial: the latent at sigma_0: (P, …) when ``shared``, else (P G, …).
        sigmas: (N + 1,), strictly decreasing within [0, 1].
        window: the SDE steps; never the last.
        eta: noise level >= 0.
        noise: absolute step -> standard normal (P G, …); called for window steps only.
        group_size: G >= 1.
        shared: one initial noise per group.
        on_step: called with (steps done, N) after every step.

    Returns:
        Trajectory: in float32, or float64 when ``initial`` is.

    Raises:
        SigmaError, WindowError, EtaError: the table, the window or the noise level is outside its range.
        RolloutError: the rows of ``initial`` or of the noise do not fit the groups.
    """
    check_sigmas(sigmas)
    steps = len(sigmas) - 1
    window.check(steps)
    coefficients = sde_coefficients(sigmas, eta, window)
    groups = _count_groups(len(initial), group_size, shared)

    x = initial.to(working_dtype(initial))
    table = sigmas.to(x)
    states, means, log_probs = [], [], []
    for step in range(steps):
        v = velocity(x, table[step])
        if step in coefficients:
            k = coefficients[step]
            states = states or [x]
            mean = _one_row_each(sde_mean(x, v, k), groups * group_size)
            x = mean + k.s * _checked(noise(step), mean)
            states.append(x)
            means.append(mean)
            log_probs.append(log_prob(x, mean, k.s))
        else:
            x = euler_step(x, v, table, step)
        if on_step:
            on_step(step + 1, steps)

    return Trajectory(
        sigmas=sigmas,
        window=window,
        eta=eta,
        group_size=group_size,
        groups=groups,
        shared=shared,
        states=states,
        means=means,
        log_probs=torch.stack(log_probs) if log_probs else x.new_zeros(0, groups * group_size),
        final=_one_row_each(x, groups * group_size),
    )


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
