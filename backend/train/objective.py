"""What an update of a job follows: its advantages, whom and which steps it trains, and the loss of some rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..flow.advantages import MIXINGS, Advantages, best_and_worst
from ..flow.objective import STEP_WEIGHTS, Replay, clipped_objective, kl_to_base, replay_log_prob
from ..flow.rollout import Trajectory
from ..flow.window import some_steps
from ..specs import TrainSpec


@dataclass(frozen=True)
class RowTerms:
    """Of some rows of one step: the loss to differentiate, summed, and sums of what is reported."""

    loss: torch.Tensor
    sums: dict[str, float]


class Objective:
    """A job's choices, applied. It calls no model; every rank makes the same of the same numbers."""

    def __init__(self, spec: TrainSpec):
        self._spec = spec
        self._clip = (spec.optimizer.clip_range, spec.optimizer.clip_range_high)
        self.kl = spec.objective.kl
        """What is held against, if anything: then the rows of :meth:`of_rows` need the base's velocity."""

    @property
    def narrowest_clip(self) -> float:
        """The nearer end of the clip range."""
        return min(end for end in self._clip if end is not None)

    @property
    def reported(self) -> tuple[str, ...]:
        """The names of what :attr:`RowTerms.sums` holds."""
        return ("loss", "ratio_deviation", "clip_fraction", *(("kl",) if self.kl else ()))

    def advantages(self, scores: Mapping[str, torch.Tensor]) -> Advantages:
        """Of all groups of an iteration; ``scores``, (P, G) by name, may hold monitors, which have no say."""
        weights = {reward.scorer: reward.weight for reward in self._spec.rewards}
        chosen = self._spec.advantage
        return MIXINGS[chosen.mixing](
            {name: scores[name] for name in weights},
            weights,
            chosen.std_floor,
            self._spec.optimizer.advantage_clip,
            std=chosen.std,
            trim=chosen.trim,
        )

    def trained(self, advantages: Advantages) -> torch.Tensor:
        """The places in their group of those who are trained, int64 (P, n), rising; n is the same whatever the advantages are."""
        n = self._spec.advantage.best_and_worst
        if n is None:
            groups, size = advantages.values.shape
            return torch.arange(size).expand(groups, size)
        return best_and_worst(advantages, n)

    def steps(self, iteration: int) -> list[int]:
        """Which of the window's steps an iteration trains, counted from the window's start, rising."""
        size, count = self._spec.sampling.window.size, self._spec.objective.trained_steps
        return list(range(size)) if count is None else some_steps(iteration, size, count, seed=self._spec.seed)

    def of_rows(
        self,
        trajectory: Trajectory,
        index: int,
        members: torch.Tensor,
        advantages: torch.Tensor,
        replay: Replay,
        base_velocity: torch.Tensor | None,
    ) -> RowTerms:
        """The loss of ``members`` at window step ``index``: weighted clipped objective plus weighted KL, summed over the rows.

        Args:
            advantages: (m,), theirs.
            replay: the present model's, with gradient.
            base_velocity: (m, …), of the model without its adapter; needed when there is a :attr:`kl`.
        """
        k = trajectory.coefficients(index)
        log_prob = replay_log_prob(trajectory, index, members, replay.mean)
        terms = clipped_objective(log_prob, trajectory.log_probs[index][members], advantages, *self._clip)
        loss = terms.loss.sum() * STEP_WEIGHTS[self._spec.objective.step_weights](k, len(trajectory.sigmas) - 1)
        sums = {"ratio_deviation": (terms.ratio - 1).abs().sum().item(), "clip_fraction": terms.clipped.sum().item()}
        if self.kl is not None and base_velocity is not None:
            kl = kl_to_base(replay.velocity, base_velocity, k, self.kl.space).sum()
            loss = loss + self.kl.weight * kl
            sums["kl"] = kl.item()
        return RowTerms(loss, sums | {"loss": loss.item()})
