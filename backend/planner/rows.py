"""The model rows of a job's iterations, from closed forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..flow.plan import SamplingMode, plan_rollout
from ..flow.window import Window
from ..specs import TrainSpec
from ..train.objective import Objective
from ..train.sharing import first_share
from ..train.trainer import sigma_table, window_of


@dataclass(frozen=True)
class WindowRows:
    """One position of the window, and what an iteration there costs on all ranks together.

    Attributes:
        iterations: of the job, how many are spent there.
        nfe: model calls that one sample costs alone.
        rollout: model rows of the rollout.
        training: model rows that gradients pass through, the mean of iterations where a part of the window is trained.
        reference: rows of the base model that a KL holds against.
        replay: model rows of the check that precedes a process's first update.
    """

    window: Window
    iterations: int
    nfe: int
    rollout: int
    training: int
    reference: int
    replay: int


def rows_by_window(spec: TrainSpec, ranks: int = 1) -> list[WindowRows]:
    """Every window that the job visits, by its start; a group that is split over ranks has its beginning on each of them.

    Raises:
        MixGRPOError: the window or the noise level does not fit the sigma table.
    """
    sigmas, mode = sigma_table(spec.sampling), SamplingMode(**spec.sampling.mode.model_dump())
    visits = Counter(window_of(spec, iteration) for iteration in range(spec.iterations))
    first = _first_steps(spec)
    parts = first_share(spec, ranks).parts
    cfg, shared = spec.sampling.guidance != 1, spec.sampling.shared_noise
    found = []
    for window in sorted(visits, key=lambda window: window.start):
        plan = plan_rollout(sigmas, window, spec.sampling.eta, mode)
        rollout = plan.rows(spec.group_size, spec.prompts_per_iteration, shared=shared, cfg=cfg)
        if shared:
            rollout += (parts - 1) * (window.start + 1) * spec.prompts_per_iteration * (2 if cfg else 1)
        training = training_rows(spec, first, parts)
        reference = training if spec.objective.kl else 0
        replay = replay_rows(spec, window, parts)
        found.append(WindowRows(window, visits[window], plan.nfe, rollout, training, reference, replay))
    return found


def training_rows(spec: TrainSpec, first: float, parts: int) -> int:
    """Model rows of an iteration's training pass: P n k for n trained members and k trained steps. When the initial noise is
    shared, a group's first window step is one row in each of u updates (on every rank that has a part of it) instead of n;
    classifier-free guidance counts double.

    Args:
        first: the share of iterations that train the window's first step.
    """
    size = spec.objective.trained_steps or spec.sampling.window.size
    return round(_rows(spec, spec.trained_of_a_group, size, first, spec.optimizer.updates_per_rollout * parts))


def _first_steps(spec: TrainSpec) -> float:
    """The share of iterations that train the window's first step, as far as the first hundreds tell."""
    objective, some = Objective(spec), range(min(spec.iterations, 500))
    return sum(0 in objective.steps(iteration) for iteration in some) / len(some)


def replay_rows(spec: TrainSpec, window: Window, parts: int) -> int:
    """Model rows of the check of every stored step and sample."""
    return round(_rows(spec, spec.group_size, window.size, 1.0, parts))


def _rows(spec: TrainSpec, members: int, steps: int, first: float, shared_calls: int) -> float:
    each = members * steps
    if spec.sampling.shared_noise:
        each += first * (shared_calls - members)
    return spec.prompts_per_iteration * each * (1 if spec.sampling.guidance == 1 else 2)
