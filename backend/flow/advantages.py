"""Group-relative advantages: how much better a sample is than the others of its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixGRPOError


class AdvantageError(MixGRPOError):
    """Rewards or weights that cannot be turned into advantages."""


@dataclass(frozen=True)
class Advantages:
    """Attributes:
    values: (P, G), never NaN.
    failed: (P, G), true where a reward was not a finite number; that reward adds 0 there.
    flat: (P,), true where no reward told the members apart, so that the group teaches nothing.
    """

    values: Tensor
    failed: Tensor
    flat: Tensor


def group_advantages(rewards: Tensor, std_floor: float = 1e-6, clip: float = 5.0) -> Advantages:
    """A = (r - mean) / std within each row of ``rewards``, std with G - 1 in the denominator, clipped to [-clip, clip].

    Failed items (NaN or infinite) are left out of mean and std and get 0. A group with fewer than two other items, or whose
    std is at most ``std_floor``, gets 0 and is reported as flat: dividing by a tiny std would turn rounding into advantages.

    Args:
        rewards: (P, G), G >= 2.

    Raises:
        AdvantageError: ``rewards`` is not (P, G) with G >= 2.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise AdvantageError(f"rewards must be (groups, samples) with at least 2 samples to compare, got {tuple(rewards.shape)}")
    valid = rewards.isfinite()
    r = rewards.double().where(valid, 0.0)
    count = valid.sum(1, keepdim=True)
    centred = (r - r.sum(1, keepdim=True) / count.clamp(min=1)).where(valid, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    flat = std <= std_floor
    values = (centred / std.where(~flat, 1.0)).where(~flat, 0.0).clamp(-clip, clip)
    return Advantages(values.to(rewards.dtype), ~valid, flat.squeeze(1))


def combine_advantages(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], std_floor: float = 1e-6, clip: float = 5.0
) -> Advantages:
    """A = sum_k w_k A_k over rewards k, each normalised in its group first, weights scaled to sum 1; clipped after the sum.

    Mixing advantages, not rewards: a reward's unit and spread then do not decide its say. The sum is not normalised again.

    Args:
        rewards: name -> (P, G).
        weights: name -> weight >= 0, the same names, not all 0.

    Raises:
        AdvantageError: names differ, a weight is negative or not finite, or all are 0.
    """
    if not rewards or set(rewards) != set(weights):
        raise AdvantageError(f"every reward needs one weight: rewards {sorted(rewards)}, weights {sorted(weights)}")
    total = sum(weights.values())
    if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not total > 0:
        raise AdvantageError(f"weights must be finite, at least 0 and not all 0, got {dict(weights)}")
    parts = {name: group_advantages(r, std_floor, math.inf) for name, r in rewards.items() if weights[name]}
    return Advantages(
        values=sum(part.values * (weights[name] / total) for name, part in parts.items()).clamp(-clip, clip),
        failed=torch.stack([part.failed for part in parts.values()]).any(0),
        flat=torch.stack([part.flat for part in parts.values()]).all(0),
    )
