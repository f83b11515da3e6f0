"""What stands side by side in a comparison: entries, and the cases that all of them draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import MixGRPOError
from ..flow.plan import RolloutPlan
from ..flow.sigmas import shifted_sigmas

PICTURE_BYTES = 2**31
"""What a comparison may hold of decoded float32 pictures."""

_MOST_STEPS = 1000
_REFERENCE_SHIFT = 3.0  # of a table so fine that its shift hardly matters


class LabError(MixGRPOError):
    """A comparison that cannot be made, or in which a sampler failed."""


@dataclass(frozen=True)
class Case:
    """A prompt and the seed of its noise: every entry draws a group of samples of it, all from one initial noise."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Entry:
    """A sampler of a comparison.

    Attributes:
        label: what it is called; no two entries share one.
        words: what it is, for the table.
        sigmas: (N + 1,), the table that it is given.
        plan: its steps; None where only running it tells what it costs.
        plan_of: the plan with another number of steps; raises a :class:`MixGRPOError` where there is none.
    """

    label: str
    words: str
    sigmas: Tensor
    plan: RolloutPlan | None = None
    plan_of: Callable[[int], RolloutPlan] | None = None

    @property
    def steps(self) -> int:
        """Steps that it takes; with Flash fewer than its table has."""
        return len(self.plan.steps if self.plan else self.sigmas) - (0 if self.plan else 1)


def check_labels(labels: Sequence[str]) -> None:
    """Refuse a comparison without entries, and labels that are empty or that two entries share.

    Raises:
        LabError: names the labels.
    """
    if not labels:
        raise LabError("there is no sampler to compare; give at least one entry")
    empty = [str(place) for place, label in enumerate(labels, 1) if not label.strip()]
    if empty:
        raise LabError(f"entry {', '.join(empty)} has no label; give every sampler a name of its own")
    twice = [label for label, count in Counter(label.strip() for label in labels).items() if count > 1]
    if twice:
        raise LabError(f"the label {twice[0]!r} stands for two samplers; give each a name of its own")


def check_equal_nfe(entries: Sequence[Entry]) -> None:
    """Refuse entries whose number of function evaluations is known not to be the first's.

    Raises:
        LabError: names both numbers, and the steps at which they would be equal.
    """
    if entries[0].plan:
        for entry in entries[1:]:
            if entry.plan:
                check_nfe(entries[0], entries[0].plan.nfe, entry, entry.plan.nfe)


def check_nfe(first: Entry, expected: float, entry: Entry, nfe: float) -> None:
    """Refuse an entry that costs another number of function evaluations than the first."""
    if nfe == expected:
        return
    if entry.plan_of is None:
        way_out = "give it sigmas of another length"
    else:
        steps = _steps_for(entry.plan_of, expected)
        way_out = f"{steps} steps would match" if steps else "no number of steps matches"
    raise LabError(
        f"{entry.label!r} costs {nfe:g} function evaluations a sample and {first.label!r} costs {expected:g}, but they should "
        f"be equal: {way_out}, or compare without that demand"
    )


def _steps_for(plan_of: Callable[[int], RolloutPlan], nfe: float) -> int | None:
    """The fewest steps that cost so many function evaluations; more steps never cost fewer."""
    for steps in range(1, _MOST_STEPS + 1):
        try:
            cost = plan_of(steps).nfe
        except MixGRPOError:  # a window or a noise level that so few steps do not have room for
            continue
        if cost >= nfe:
            return steps if cost == nfe else None
    return None


def check_memory(entries: int, pictures: int, numbers: int) -> None:
    """Refuse more decoded pictures than fit :data:`PICTURE_BYTES`.

    Args:
        entries: in the comparison.
        pictures: that each of them draws.
        numbers: in one picture: frames x height x width x 3.

    Raises:
        LabError: names the memory, and how many pictures would fit.
    """
    needed = 4 * entries * pictures * numbers
    if needed > PICTURE_BYTES:
        fits = PICTURE_BYTES // (4 * entries * numbers)
        raise LabError(
            f"{entries} samplers with {pictures} pictures each are {needed / 2**30:.1f} GiB of decoded pictures, above the "
            f"{PICTURE_BYTES / 2**30:g} GiB of a comparison: at most {fits} pictures for each sampler fit; use fewer seeds, a "
            "smaller group, smaller pictures or fewer samplers"
        )


def reference_sigmas(sigmas: Tensor, steps: int) -> Tensor:
    """A table of ``steps`` steps between the ends of ``sigmas``, float32 (steps + 1,)."""
    first, last = sigmas[0].double().cpu(), sigmas[-1].double().cpu()
    return (last + (first - last) * shifted_sigmas(steps, _REFERENCE_SHIFT)).float()
