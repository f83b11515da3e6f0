"""The model rows of a job's iterations, from closed forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..flow.plan import SamplingMode, plan_rollout
from ..flow.window import Window
from ..specs import TrainSpec
from ..train.trainer import sigma_table, window_of


@dataclass(frozen=True)
class WindowRows:
    """One position of the window, and what an iteration there costs on all ranks together.

    Attributes:
        iterations: of the job, how many are spent there.
        nfe: model calls that one sample costs alone.
        rollout: model rows of the rollout.
        training: model rows that gradients pass through.
        replay: model rows of the check that precedes a process's first update.
    """

    window: Window
    iterations: int
    nfe: int
    rollout: int
    training: int
    replay: int


def rows_by_window(spec: TrainSpec) -> list[WindowRows]:
    """Every window that the job visits, by its start.

    Raises:
        MixGRPOError: the window or the noise level does not fit the sigma table.
    """
    sigmas, mode = sigma_table(spec.sampling), SamplingMode(**spec.sampling.mode.model_dump())
    visits = Counter(window_of(spec, iteration) for iteration in range(spec.iterations))
    cfg, shared = spec.sampling.guidance != 1, spec.sampling.shared_noise
    found = []
    for window in sorted(visits, key=lambda window: window.start):
        plan = plan_rollout(sigmas, window, spec.sampling.eta, mode)
        rollout = plan.rows(spec.group_size, spec.prompts_per_iteration, shared=shared, cfg=cfg)
        training = training_rows(spec, window, spec.optimizer.updates_per_rollout)
        found.append(WindowRows(window, visits[window], plan.nfe, rollout, training, training_rows(spec, window, 1)))
    return found


def training_rows(spec: TrainSpec, window: Window, updates: int) -> int:
    """Model rows of an iteration's training pass in so many updates: P (u + G (w - 1)) when the initial noise is shared, since
    a group's first window step is then one row in every update, else P G w; classifier-free guidance counts double."""
    group, size = spec.group_size, window.size
    each = updates + group * (size - 1) if spec.sampling.shared_noise else group * size
    return spec.prompts_per_iteration * each * (1 if spec.sampling.guidance == 1 else 2)

