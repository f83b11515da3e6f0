"""Hybrid inference: the trained model draws the early steps, the base model the late ones, which training did not touch."""

from __future__ import annotations

import math

from torch import Tensor

from .plan import PlanError
from .rollout import Velocity


def hybrid_boundary(sigmas: Tensor, share: float) -> float:
    """The sigma above which the trained model serves: the table's entry number round(share N).

    Args:
        sigmas: (N + 1,), the whole table.
        share: of the steps that the trained model takes, within [0, 1]; the paper recommends 0.8. 0 is the base model (the
            boundary is inf), 1 the trained one (-inf).

    Raises:
        PlanError: ``share`` is outside its range.
    """
    if not 0 <= share <= 1:
        raise PlanError(f"the trained model's share of the steps lies between 0 and 1, got {share!r}; the paper recommends 0.8")
    steps = len(sigmas) - 1
    taken = round(share * steps)
    if taken in (0, steps):
        return math.inf if taken == 0 else -math.inf
    return sigmas[taken].item()


def hybrid_velocity(trained: Velocity, base: Velocity, sigmas: Tensor, share: float) -> Velocity:
    """(x, sigma) -> v: the trained model's above :func:`hybrid_boundary`, the base model's at and below it."""
    boundary = hybrid_boundary(sigmas, share)

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return trained(x, sigma) if sigma > boundary else base(x, sigma)  # torch rounds the boundary to sigma's dtype

    return velocity
