"""The numbers of an iteration, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .ranks import Ranks

if TYPE_CHECKING:
    from .trainer import Rollout


def iteration_numbers(batch: Rollout, updates: list[dict[str, Any]], names: tuple[str, ...], ranks: Ranks) -> dict[str, Any]:
    """What an iteration's rollout and its updates were like, over all ranks (a collective call).

    Args:
        updates: what every update returned, on this rank.
        names: the numbers of an update that are averaged, besides its gradient's norm.
    """
    dead = ranks.mean({"flat": batch.advantages.flat.float().mean().item()})["flat"]
    means = {name: sum(update[name] for update in updates) / len(updates) for name in (*names, "gradient_norm")}
    gaps = {"mean_gap": updates[0]["mean_gap"], "log_prob_gap": updates[0]["log_prob_gap"]}
    window = batch.trajectory.window
    partly = {} if len(batch.steps) == window.size else {"trained": [window.start + index for index in batch.steps]}
    return {
        "scores": {name: _summary(values) for name, values in batch.everyone.items()},
        "dead_groups": dead,
        "failed": int(sum((~values.isfinite()).sum() for values in batch.everyone.values())),
        "window": [window.start, window.size],
        **partly,
        **ranks.mean(means),
        "replay": ranks.largest(gaps),
        "adapter_hash": updates[-1]["adapter_hash"],
    }


def _summary(scores: torch.Tensor) -> dict[str, float | None]:
    """Mean over all, and the mean standard deviation within a group, of the scores that exist; (P, G)."""
    groups = [group[group.isfinite()] for group in scores]
    spread = [group.std().item() for group in groups if len(group) > 1]
    valid = torch.cat(groups)
    return {
        "mean": valid.mean().item() if len(valid) else None,
        "group_std": sum(spread) / len(spread) if spread else None,
    }
