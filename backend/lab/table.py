"""The table of a comparison: one row of plain numbers for every entry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..specs import RewardSpec
from .compare import Result
from .scores import weighted_sum

COLUMNS = (
    "label", "sampler", "steps", "nfe", "rows", "seconds", "peak_memory", "rmse", "diversity",
    "reward_mean", "reward_low", "reward_high", "difference_mean", "difference_low", "difference_high", "failed",
)  # fmt: skip
"""The fields of a row, besides ``scores``; see :func:`make_table`."""


class Interval(NamedTuple):
    """A mean with its 95 % interval; None for what so few values do not say."""

    mean: float | None
    low: float | None
    high: float | None


def make_table(results: Sequence[Result], scores: Sequence[Mapping[str, Tensor]], rewards: Sequence[RewardSpec]) -> list[dict]:
    """One row for every entry, which JSON can hold.

    * ``nfe``: function evaluations of one sample; ``rows``: model rows of one group; ``seconds`` of one group, median over cases;
      ``peak_memory``: bytes on a CUDA device, else None.
    * ``rmse``: root mean square distance of all latents from the reference, in the model's own scale; None without one.
    * ``diversity``: root mean square distance of two members of a group, averaged over pairs and groups; None for groups
      of one. Deterministic samplers have 0.
    * ``reward_mean``, ``reward_low``, ``reward_high``: the weighted sum of the rewards, mean over cases of the groups' means, and
      Student's 95 % interval of it. Cases, not samples, are what is independent: members of a group share their noise.
    * ``difference_mean``, ``difference_low``, ``difference_high``: the same of each case's difference to the first entry; None
      for the first itself.
    * ``failed``: samples that could not be scored; they are left out of all of these.
    * ``scores``: mean over cases of each reward by name, without weights.

    Args:
        scores: for every entry the values (cases, G) of each reward, NaN where a picture could not be scored; {} without rewards.
    """
    totals = [weighted_sum(values, rewards) if rewards else None for values in scores]
    return [
        _row(result, values, total, totals[0] if index else None)
        for index, (result, values, total) in enumerate(zip(results, scores, totals, strict=True))
    ]


def _row(result: Result, values: Mapping[str, Tensor], total: Tensor | None, first: Tensor | None) -> dict[str, Any]:
    reward = difference = Interval(None, None, None)
    if total is not None:
        reward = interval(_case_means(total))
        if first is not None:
            difference = interval(_case_means(total) - _case_means(first))
    return {
        "label": result.entry.label,
        "sampler": result.entry.words,
        "steps": result.entry.steps,
        "nfe": _whole(result.nfe),
        "rows": _whole(result.rows),
        "seconds": result.seconds,
        "peak_memory": result.peak_memory,
        "rmse": None if result.references is None else rmse(result.latents, result.references),
        "diversity": group_diversity(result.latents),
        "reward_mean": reward.mean,
        "reward_low": reward.low,
        "reward_high": reward.high,
        "difference_mean": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "failed": 0 if total is None else int(total.isnan().sum()),
        "scores": {name: interval(_case_means(value)).mean for name, value in values.items()},
    }


def rmse(latents: Tensor, references: Tensor) -> float:
    """Root mean square distance of latents (cases, G, …) from the references (cases, …) of their cases."""
    return (latents - references[:, None]).double().square().mean().sqrt().item()


def group_diversity(latents: Tensor) -> float | None:
    """Mean over groups, and over pairs of a group's members, of their root mean square distance; ``latents``: (cases, G, …)."""
    cases, size = latents.shape[:2]
    if size < 2:
        return None
    flat = latents.reshape(cases, size, -1).double()
    distances = [torch.pdist(group).mean() for group in flat]
    return (torch.stack(distances).mean() / math.sqrt(flat.shape[-1])).item()


def interval(values: Tensor) -> Interval:
    """Mean and Student's 95 % interval of independent values; NaN among them are left out."""
    from scipy.special import stdtrit

    known = values[~values.isnan()].double()
    count = len(known)
    if not count:
        return Interval(None, None, None)
    mean = known.mean().item()
    if count < 2:
        return Interval(mean, None, None)
    half = float(stdtrit(count - 1, 0.975)) * known.std().item() / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def _case_means(values: Tensor) -> Tensor:
    """Mean over the scored members of each group, (cases,); NaN for a group of which none was scored."""
    return values.double().nanmean(1)


def _whole(value: float) -> float | int:
    """17, not 17.0, which counts mostly are."""
    return int(value) if value == int(value) else value
