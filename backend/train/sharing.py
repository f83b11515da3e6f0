"""How an iteration's groups are divided: over ranks, and over the parts that a rank draws one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..flow.rollout import Trajectory
from ..specs import TrainSpec
from .ranks import RankError, Ranks


@dataclass(frozen=True)
class Share:
    """What one rank draws: whole groups, or the members of one group that fall to it.

    Attributes:
        groups: its groups among the iteration's.
        part: which of the ``parts`` of a split group is its own; 0 of 1 where groups are whole.
    """

    groups: slice
    part: int = 0
    parts: int = 1

    def members(self, size: int) -> slice:
        """The members that it draws of every group of that size, or of so many of a group's members."""
        each = size // self.parts
        return slice(self.part * each, (self.part + 1) * each)

    def rows(self, groups: int, size: int) -> torch.Tensor:
        """The rows of its members among those of ``groups`` whole groups."""
        return torch.arange(groups * size).view(groups, size)[:, self.members(size)].flatten()


def share_of(spec: TrainSpec, ranks: Ranks) -> Share:
    """This rank's share: whole groups, unless there are more ranks than prompts.

    Raises:
        RankError: prompts or members cannot be divided equally.
    """
    prompts, count = spec.prompts_per_iteration, ranks.count
    if prompts >= count or count % prompts:
        return Share(ranks.share(prompts, "prompts per iteration"))
    parts = count // prompts
    trained = spec.trained_of_a_group // spec.optimizer.updates_per_rollout
    for number, what in ((spec.group_size, "members of a group"), (trained, "members of a group in one update")):
        if number % parts:
            raise RankError(
                f"{count} ranks and {prompts} prompts per iteration split every group over {parts} ranks, but {number} {what} "
                f"cannot be shared equally by them; choose a multiple of {parts}, more prompts, or {prompts} ranks"
            )
    group, part = divmod(ranks.rank, parts)
    return Share(slice(group, group + 1), part, parts)


def first_share(spec: TrainSpec, count: int) -> Share:
    """The first of so many ranks' share, before there are ranks; as large as any other's. Errors as in :func:`share_of`."""
    return share_of(spec, Ranks(0, count, torch.device("cpu")))


def in_parts(groups: int, at_once: int | None) -> list[slice]:
    """So many groups in parts of at most ``at_once``."""
    each = at_once or groups
    return [slice(start, min(start + each, groups)) for start in range(0, groups, each)]


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """One trajectory of the groups of several that were drawn one after the other."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        groups=sum(part.groups for part in parts),
        states=[torch.cat(states) for states in zip(*(part.states for part in parts), strict=True)],
        means=[torch.cat(means) for means in zip(*(part.means for part in parts), strict=True)],
        log_probs=torch.cat([part.log_probs for part in parts], dim=1),
        final=torch.cat([part.final for part in parts]),
    )


def with_others(trajectory: Trajectory, share: Share, ranks: Ranks) -> Trajectory:
    """The whole of a split group, from this rank's members and the others' (a collective call); whole groups stay as they are."""
    if share.parts == 1:
        return trajectory
    size = trajectory.group_size * share.parts
    own = share.groups.start * size

    def whole(rows: torch.Tensor) -> torch.Tensor:
        return ranks.gather(rows)[own : own + size].clone()

    def all_but_shared(index: int, rows: torch.Tensor) -> torch.Tensor:
        return rows if trajectory.shared and index == 0 else whole(rows)

    return replace(
        trajectory,
        group_size=size,
        states=[all_but_shared(index, rows) for index, rows in enumerate(trajectory.states)],
        means=[whole(mean) for mean in trajectory.means],
        log_probs=whole(trajectory.log_probs.T).T,
        final=whole(trajectory.final),
    )


def by_group(scores: torch.Tensor, share: Share, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """All ranks' scores, (groups, group size), from this rank's (groups or 1, members); a collective call."""
    return gather(scores).reshape(-1, scores.shape[1] * share.parts)
