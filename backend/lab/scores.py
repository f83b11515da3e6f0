"""Rewards of pictures, outside of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..specs import RewardSpec


def check_rewards(rewards: Sequence[RewardSpec], prompts: Sequence[str]) -> None:
    """Refuse scorers that do not exist, and prompts that they cannot score, before anything is drawn."""
    _scorers(rewards, prompts)


def score_pictures(pictures: Tensor, prompts: Sequence[str], rewards: Sequence[RewardSpec]) -> dict[str, Tensor]:
    """Values (N,) of every reward by name, NaN where a picture could not be scored.

    Args:
        pictures: (N, 3, H, W) in [0, 1].
        prompts: N.

    Raises:
        ScorerError, BatchError: pictures, prompts and rewards do not go together.
    """
    return {name: scorer.score(pictures, prompts) for name, scorer in _scorers(rewards, prompts).items()}


def _scorers(rewards: Sequence[RewardSpec], prompts: Sequence[str]) -> dict:
    from ..rewards import make_scorer  # scorers bring their models' classes along

    scorers = {reward.scorer: make_scorer(reward.scorer, **reward.options) for reward in rewards}
    for scorer in scorers.values():
        scorer.check_prompts(prompts)
    return scorers


def weighted_sum(values: Mapping[str, Tensor], rewards: Sequence[RewardSpec]) -> Tensor:
    """The sum of weight x reward; NaN where one of them could not be scored."""
    return sum(reward.weight * values[reward.scorer] for reward in rewards)
