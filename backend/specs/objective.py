"""What training follows: how rewards become advantages, which samples and steps are trained, what holds the model back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Count, Positive, Spec


class AdvantageSpec(Spec):
    """How rewards become advantages, and whom of a group to train; the functions are in ``backend.flow.advantages``.

    ``mixing`` says where several rewards meet: as advantages, as rewards, or by GDPO. ``std`` is a group's own or one for all
    groups of an iteration; at most ``std_floor``, it tells nobody apart. ``trim`` is the share of a group, from its lowest reward
    on, that mean and std leave out. ``best_and_worst`` trains so many members of every group, half of them its best, half its
    worst; left out, all are trained.
    """

    mixing: Literal["advantage", "reward", "gdpo"] = "advantage"
    std: Literal["group", "global"] = "group"
    std_floor: Positive = 1e-6
    trim: Annotated[float, Field(ge=0, lt=1)] = 0.0
    best_and_worst: Annotated[int, Field(ge=2, le=4096)] | None = None

    def misfit(self, group_size: int, groups: int, rewards: int) -> str | None:
        """What does not fit a job of so many groups an iteration and so many rewards, or would do nothing there, if anything."""
        if self.mixing != "advantage" and rewards < 2:
            return f"advantage.mixing {self.mixing} mixes several rewards, and there is one; leave mixing out, or add a reward"
        if self.std == "global" and self.mixing == "gdpo":
            return "advantage.std global does nothing under gdpo, which divides by the batch's std last; leave std out"
        if self.std == "global" and groups < 2:
            return "advantage.std global is the group's own with prompts_per_iteration 1; leave std out, or draw more prompts"
        cut = int(group_size * self.trim + 1e-9)
        if self.trim and not 0 < cut <= group_size - 2:
            return (
                f"advantage.trim {self.trim:g} leaves {cut} of group_size {group_size} out of the statistics; choose a share "
                f"that leaves out 1 to {group_size - 2}, or 0"
            )
        n = self.best_and_worst
        if n is not None and (n % 2 or n >= group_size):
            return (
                f"advantage.best_and_worst {n} must be even and less than group_size {group_size}; leave it out to train every "
                "member"
            )
        return None


class KlSpec(Spec):
    """What holds the model near its base (the adapter switched off): ``weight`` times the KL, in one of the forms of
    ``backend.flow.objective``. Costs one more forward row for every trained row.
    """

    weight: Positive
    space: Literal["velocity", "mean", "mean_rate", "mean_square"] = "velocity"


class ObjectiveSpec(Spec):
    """What is added to the clipped objective, and at which of the window's steps it is taken.

    ``trained_steps`` trains so many of the window's steps, drawn anew for every iteration; left out, all. ``step_weights``
    inverse_dt divides a step's objective by its length, the balance of GRPO-Guard, which is meant for ``log_prob: ratio_norm``.
    """

    step_weights: Literal["equal", "inverse_dt"] = "equal"
    trained_steps: Count | None = None
    kl: KlSpec | None = None
