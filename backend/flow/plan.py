"""A sampling mode, and the plan of a rollout: every step, what takes it, and what it costs, before a model is called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import MixGRPOError
from .dynamics import LOG_PROBS, SDE_DYNAMICS, StepCoefficients, sde_coefficients
from .names import named
from .sigmas import check_sigmas
from .solvers import SOLVERS, usable_order
from .window import Window


class PlanError(MixGRPOError):
    """Settings of a rollout that do not fit together."""


@dataclass(frozen=True)
class SamplingMode:
    """How the steps of a rollout are taken; the defaults are MixGRPO's, of which eta and the window are given separately.

    Attributes:
        dynamics: of the window's steps, a name in :data:`~.dynamics.SDE_DYNAMICS`.
        log_prob: its scale, a name in :data:`~.dynamics.LOG_PROBS`.
        solver: of the steps before the window, a name in :data:`~.solvers.SOLVERS`.
        solver_after: of those after it; None is ``solver``.
        history: whether a multistep solver after the window uses predictions made before and within it ("carry") or begins
            anew ("reset").
        ratio: Flash: the share of the steps after the window that are taken, in (0, 1], rounded up.

    Raises:
        UnknownName: one of the names does not exist.
        PlanError: ``ratio`` is outside its range.
    """

    dynamics: str = "flow_sde"
    log_prob: str = "gaussian"
    solver: str = "euler"
    solver_after: str | None = None
    history: Literal["carry", "reset"] = "carry"
    ratio: float = 1.0

    def __post_init__(self) -> None:
        named(SDE_DYNAMICS, self.dynamics, "dynamics")
        named(LOG_PROBS, self.log_prob, "log-prob")
        named(SOLVERS, self.solver, "solver")
        named(SOLVERS, self.after, "solver")
        named({"carry": True, "reset": True}, self.history, "history")
        if not 0 < self.ratio <= 1:
            raise PlanError(f"the ratio of steps after the window lies above 0 and at most at 1, got {self.ratio!r}; 1 keeps all")

    @property
    def after(self) -> str:
        """The solver of the steps after the window."""
        return self.solver if self.solver_after is None else self.solver_after


MIXGRPO = SamplingMode()
"""MixGRPO as first published: Flow-SDE within the window, Euler outside."""

FLASH = SamplingMode(solver_after="dpmpp_2m", ratio=0.4)
"""MixGRPO-Flash, under a progressive window."""

FLASH_STAR = SamplingMode(solver_after="dpmpp_2m", ratio=0.2)
"""MixGRPO-Flash*, under a window frozen at step 0."""


@dataclass(frozen=True)
class PlannedStep:
    """One step of a rollout.

    Attributes:
        index: absolute; the noise of a stochastic step depends on it.
        method: the solver's or the dynamics' name.
        order: of the solver at this step; 1 for a stochastic step.
        coefficients: of a stochastic step, else None.
    """

    index: int
    sigma: float
    sigma_next: float
    method: str
    order: int
    coefficients: StepCoefficients | None

    @property
    def kind(self) -> Literal["ode", "sde"]:
        """Whether the step is deterministic or stochastic."""
        return "sde" if self.coefficients else "ode"

    @property
    def calls(self) -> int:
        """Model calls."""
        return 1 if self.coefficients else SOLVERS[self.method].calls(self.sigma_next)


@dataclass(frozen=True)
class RolloutPlan:
    """All steps of a rollout; ``window`` holds those of them that are stochastic when eta is not 0."""

    steps: tuple[PlannedStep, ...]
    window: Window

    @property
    def sigmas(self) -> list[float]:
        """The table that is walked: the given one, but with Flash fewer entries after the window."""
        return [*(step.sigma for step in self.steps), self.steps[-1].sigma_next]

    @property
    def nfe(self) -> int:
        """Model calls: what one sample costs alone. With Flash l + w + ceil((N - l - w) ratio), as the paper counts."""
        return sum(step.calls for step in self.steps)

    def rows(self, group_size: int, groups: int = 1, *, shared: bool = True, cfg: bool = False) -> int:
        """Model rows of ``groups`` groups.

        With ``shared`` initial noise a group is one row through the model call of its first stochastic step, and to the end if
        there is none. Classifier-free guidance (``cfg``) counts double.
        """
        calls = [step.calls for step in self.steps]
        parting = next((i + 1 for i, step in enumerate(self.steps) if step.coefficients), len(calls)) if shared else 0
        return groups * (sum(calls[:parting]) + group_size * sum(calls[parting:])) * (2 if cfg else 1)


def plan_rollout(sigmas: Tensor, window: Window, eta: float, mode: SamplingMode = MIXGRPO, first_step: int = 0) -> RolloutPlan:
    """The plan of a rollout: MixGRPO's mixture of ODE and SDE steps, with Flash's shorter end when ``mode.ratio`` is below 1.

    Args:
        sigmas: (N + 1,), strictly decreasing within [0, 1].
        window: the SDE steps, absolute; never the one to sigma 0.
        eta: noise level >= 0; 0 makes every step deterministic.
        mode: dynamics and solvers.
        first_step: the absolute step that ``sigmas`` begins with, when it is a part of a split table. The window may then begin
            before this part, and, if it does not end at sigma 0, go on after it.

    Raises:
        SigmaError, WindowError, EtaError: the table, the window or the noise level is outside its range.
        PlanError: ``first_step`` is negative, or Flash would have to shorten steps that are not all in this part.
    """
    check_sigmas(sigmas)
    if first_step < 0:
        raise PlanError(f"the first step of a table is counted from 0, got {first_step}")
    table = sigmas.tolist()
    end = first_step + len(table) - 1
    if table[-1] == 0:
        window.check(end)
    inside = window.within(first_step, end)
    coefficients = sde_coefficients(sigmas, eta, inside, mode.dynamics, first_step)
    stop = inside.start + inside.size
    if mode.ratio < 1 and stop < end:
        if table[-1] > 0 or window.start + window.size < first_step:
            raise PlanError(
                f"a ratio of {mode.ratio:g} shortens all steps after the window, but steps {first_step} to {end - 1} are only "
                "some of them; split the sigmas within or right after the window, or set the ratio to 1"
            )
        table = flash_sigmas(table, stop - first_step, mode.ratio)
    return RolloutPlan(tuple(_steps(table, first_step, stop, coefficients, mode)), inside)


def _steps(table: list[float], first_step: int, stop: int, coefficients: dict[int, StepCoefficients], mode: SamplingMode):
    """The steps in turn; ``seen`` holds the sigmas of the predictions that a multistep solver may use, newest first."""
    seen: list[float] = []
    for index, (sigma, sigma_next) in enumerate(zip(table, table[1:], strict=False), first_step):
        if index - 1 in coefficients and index not in coefficients and mode.history == "reset":
            seen = []
        seen = [sigma, *seen]
        if index in coefficients:
            yield PlannedStep(index, sigma, sigma_next, mode.dynamics, 1, coefficients[index])
            continue
        method = mode.solver if index < stop else mode.after
        solver = SOLVERS[method]
        calls = solver.calls(sigma_next)  # which is Euler's and Heun's order, too
        order = usable_order(seen, sigma_next, solver.order) if solver.family == "dpmpp" else calls
        yield PlannedStep(index, sigma, sigma_next, method, order, None)


def flash_sigmas(table: list[float], kept: int, ratio: float) -> list[float]:
    """The table with its first ``kept`` steps as they are and the n others replaced by max(1, ceil(n ratio)), to the same end.

    The new points lie evenly in the table's own time, as if the scheduler had been asked for them: between two entries with j and
    j + 1 steps to go, 1 / sigma is linear in 1 / j, which is exact for every shift (1 / sigma = 1 / (S u) + (S - 1) / S with u
    proportional to j), and decreasing for every table. A point that meets an entry is that entry.
    """
    n = len(table) - 1 - kept
    steps = max(1, math.ceil(n * ratio - 1e-9))
    shortened = table[: kept + 1]
    for left in range(steps - 1, 0, -1):
        j, rest = divmod(n * left, steps)
        if rest:
            share = (j + 1) * rest / (n * left)  # of 1 / (j + 1) in 1 / (n left / steps)
            shortened.append(1 / ((1 - share) / table[-1 - j] + share / table[-2 - j]))
        else:
            shortened.append(table[-1 - j])
    return [*shortened, table[-1]]
