"""Group-relative advantages: how much better a sample is than the others of its prompt.

Every choice is one function: what statistics are made of (:func:`in_statistics`), which standard deviation divides
(:data:`STDS`), how several rewards become one advantage (:data:`MIXINGS`), who is trained (:func:`best_and_worst`). A reward that
is no finite number has failed; nowhere does it count as 0, or as anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixGRPOError
from .names import named


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

    def of(self, groups: slice) -> Advantages:
        """Those of some groups."""
        return Advantages(self.values[groups], self.failed[groups], self.flat[groups])


# ------------------------------------------------------------------ one reward


def in_statistics(rewards: Tensor, trim: float = 0.0) -> Tensor:
    """(P, G), true where a reward counts for mean and std: it is finite, and not among the lowest floor(trim n) of its group's n.

    Two are left in any case, because fewer have no std.
    """
    valid = rewards.isfinite()
    count = valid.sum(1, keepdim=True)
    cut = (count.double() * trim + 1e-9).floor().clamp(max=count - 2).clamp(min=0)
    place = rewards.where(valid, math.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return valid & (place >= cut)


def group_mean(rewards: Tensor, counts: Tensor) -> Tensor:
    """(P, 1): the mean of a group's rewards that count; 0 where none does."""
    return rewards.where(counts, 0.0).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)


def group_std(rewards: Tensor, counts: Tensor) -> Tensor:
    """(P, 1): every group's own standard deviation about its own mean, with n - 1; 0 where fewer than two count."""
    deviations = (rewards - group_mean(rewards, counts)).where(counts, 0.0)
    return (deviations.square().sum(1, keepdim=True) / (counts.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def global_std(rewards: Tensor, counts: Tensor) -> Tensor:
    """(P, 1): one standard deviation for the batch, about the batch's mean, with n - 1: what Flow-GRPO divides by.

    What prompts differ by is in it, so a group in which all do alike has small advantages.
    """
    one_group = group_std(rewards.reshape(1, -1), counts.reshape(1, -1))
    return one_group.expand(len(rewards), 1)


STDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"group": group_std, "global": global_std}
"""By name: (rewards (P, G), which of them count) -> what the deviations of a group's rewards are divided by, (P, 1)."""


def group_advantages(
    rewards: Tensor, std_floor: float = 1e-6, clip: float = 5.0, *, std: str = "group", trim: float = 0.0
) -> Advantages:
    """A = (r - mean) / std, mean within each row of ``rewards``, std with n - 1 in the denominator, clipped to [-clip, clip].

    Failed items (NaN or infinite) are left out of mean and std and get 0. A group with fewer than two other items, or whose own
    std is at most ``std_floor``, gets 0 and is reported as flat: dividing by a tiny std would turn rounding into advantages.

    Args:
        rewards: (P, G), G >= 2; with the global std all groups of the batch, of every rank.
        std: "group" or "global" (:data:`STDS`).
        trim: the share of a group, from its lowest reward on, that mean and std leave out (:func:`in_statistics`); these members
            still get their advantage.

    Raises:
        AdvantageError: ``rewards`` is not (P, G) with G >= 2, or ``trim`` is outside [0, 1).
        UnknownName: no such std.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise AdvantageError(f"rewards must be (groups, samples) with at least 2 samples to compare, got {tuple(rewards.shape)}")
    if not 0 <= trim < 1:
        raise AdvantageError(f"the share of a group that its statistics leave out lies in [0, 1), got {trim!r}; 0 keeps all")
    valid, counts = rewards.isfinite(), in_statistics(rewards, trim)
    r = rewards.double().where(valid, 0.0)
    divisor = named(STDS, std, "standard deviation")(r, counts)
    flat = (group_std(r, counts) <= std_floor) | (divisor <= std_floor)
    deviations = (r - group_mean(r, counts)).where(valid & ~flat, 0.0)
    values = (deviations / divisor.where(~flat, 1.0)).clamp(-clip, clip)
    return Advantages(values.to(rewards.dtype), ~valid, flat.squeeze(1))


# ------------------------------------------------------------------ several rewards


def combine_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    std_floor: float = 1e-6,
    clip: float = 5.0,
    *,
    std: str = "group",
    trim: float = 0.0,
) -> Advantages:
    """A = sum_k w_k A_k over rewards k, each normalised in its group first, weights scaled to sum 1; clipped after the sum.

    Mixing advantages, not rewards: a reward's unit and spread then do not decide its say. The sum is not normalised again.

    Args:
        rewards: name -> (P, G).
        weights: name -> weight >= 0, the same names, not all 0.
        std, trim: as in :func:`group_advantages`.

    Raises:
        AdvantageError: names differ, a weight is negative or not finite, or all are 0.
    """
    shares = _shares(rewards, weights)
    parts = {name: group_advantages(rewards[name], std_floor, math.inf, std=std, trim=trim) for name in shares}
    return Advantages(
        values=sum(part.values * shares[name] for name, part in parts.items()).clamp(-clip, clip),
        failed=torch.stack([part.failed for part in parts.values()]).any(0),
        flat=torch.stack([part.flat for part in parts.values()]).all(0),
    )


def combine_rewards(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    std_floor: float = 1e-6,
    clip: float = 5.0,
    *,
    std: str = "group",
    trim: float = 0.0,
) -> Advantages:
    """The advantage of r = sum_k w_k r_k, weights scaled to sum 1: the reward with the widest spread has most of the say.

    Where one reward has failed there is no sum, so the item has failed. Arguments and errors as in :func:`combine_advantages`.
    """
    shares = _shares(rewards, weights)
    mixed = sum(rewards[name].double() * share for name, share in shares.items())
    mixed = mixed.where(torch.stack([rewards[name].isfinite() for name in shares]).all(0), math.nan)
    one = group_advantages(mixed, std_floor, clip, std=std, trim=trim)
    return Advantages(one.values.to(rewards[next(iter(shares))].dtype), one.failed, one.flat)


def gdpo(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    std_floor: float = 1e-6,
    clip: float = 5.0,
    *,
    std: str = "group",
    trim: float = 0.0,
) -> Advantages:
    """GDPO: the sum of :func:`combine_advantages`, normalised once more over the whole batch, (A - mean) / std; then clipped.

    Flat groups, and items that no reward could score, are left out of that mean and std and keep 0. A batch whose std is at most
    ``std_floor`` gets 0 throughout. Arguments and errors as in :func:`combine_advantages`; ``rewards`` is the batch of all ranks.
    """
    mixed = combine_advantages(rewards, weights, std_floor, math.inf, std=std, trim=trim)
    scored = torch.stack([rewards[name].isfinite() for name, weight in weights.items() if weight]).any(0)
    counts = scored & ~mixed.flat[:, None]
    values = mixed.values.double()
    mean, spread = (of(values.reshape(1, -1), counts.reshape(1, -1)) for of in (group_mean, group_std))
    live = counts & (spread > std_floor)
    values = ((values - mean) / spread.where(spread > std_floor, 1.0)).where(live, 0.0)
    return Advantages(values.clamp(-clip, clip).to(mixed.values.dtype), mixed.failed, mixed.flat)


MIXINGS: dict[str, Callable[..., Advantages]] = {"advantage": combine_advantages, "reward": combine_rewards, "gdpo": gdpo}
"""By name: (rewards, weights, std_floor, clip, std, trim) -> the advantages of several rewards together."""


def _shares(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, float]:
    """The weights that are not 0, scaled to sum 1, in the order of ``rewards``; refuses what makes no mixture."""
    if not rewards or set(rewards) != set(weights):
        raise AdvantageError(f"every reward needs one weight: rewards {sorted(rewards)}, weights {sorted(weights)}")
    total = sum(weights.values())
    if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not total > 0:
        raise AdvantageError(f"weights must be finite, at least 0 and not all 0, got {dict(weights)}")
    return {name: weights[name] / total for name in rewards if weights[name]}


# ------------------------------------------------------------------ who is trained


def best_and_worst(advantages: Advantages, n: int) -> Tensor:
    """The n / 2 best and the n / 2 worst of every group: int64 (P, n), their places in the group, rising.

    A member of which a reward failed is neither; it is taken only where a group has no other left, so that every group, and
    with it every rank, has n.

    Args:
        n: even, from 2 to G.

    Raises:
        AdvantageError: ``n`` is odd or outside its range.
    """
    size = advantages.values.shape[1]
    if n % 2 or not 2 <= n <= size:
        raise AdvantageError(f"the best and worst of a group of {size} are an even number from 2 to {size}, got {n}")
    kept = []
    for values, failed in zip(advantages.values, advantages.failed, strict=True):
        rising = values.argsort(stable=True)
        rising = rising[~failed[rising]]
        middle = len(rising) // 2
        order = torch.cat([rising[:middle], failed.nonzero().flatten(), rising[middle:]])
        kept.append(torch.cat([order[: n // 2], order[size - n // 2 :]]).sort().values)
    return torch.stack(kept)
