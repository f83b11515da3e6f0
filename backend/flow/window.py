"""The window: which steps of a rollout are stochastic and trained; and the policies that move it from iteration to iteration."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import MixGRPOError
from .noise import derive_seed


class WindowError(MixGRPOError):
    """A window that does not fit the sigma table."""


@dataclass(frozen=True)
class Window:
    """Steps start, …, start + size - 1 are SDE steps; the others are ODE steps. Size 0 is the plain ODE."""

    start: int
    size: int

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("size", self.size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise WindowError(f"window {name} must be a whole number of at least 0, got {value!r}")

    @property
    def steps(self) -> range:
        """The absolute indices of the SDE steps."""
        return range(self.start, self.start + self.size)

    def contains(self, step: int) -> bool:
        """Whether ``step`` is an SDE step."""
        return step in self.steps

    def within(self, first: int, last: int) -> Window:
        """Its steps among ``first``, …, ``last`` - 1; where there are none, an empty window at the nearer end."""
        start, stop = (min(max(step, first), last) for step in (self.start, self.start + self.size))
        return Window(start, stop - start)

    def check(self, steps: int) -> None:
        """Refuse a window that does not lie within the first ``steps`` - 1 of ``steps`` steps.

        The last step lands on data, where the SDE has no noise to add, so it is always an ODE step.

        Raises:
            WindowError: with the largest start + size that fits.
        """
        if self.size and self.start + self.size > steps - 1:
            raise WindowError(
                f"a window of {self.size} from step {self.start} does not fit a table of {steps} steps, whose last step is never "
                f"stochastic: start + size may be at most {steps - 1}"
            )


def frozen_window(iteration: int, steps: int, size: int, *, start: int = 0) -> Window:
    """The same window at every iteration."""
    return _walk(iteration, steps, size, [start], [1], "hold")


def progressive_window(
    iteration: int, steps: int, size: int, *, start: int = 0, stride: int = 1, every: int = 25, end: str = "hold"
) -> Window:
    """MixGRPO's sliding window: moved by ``stride`` after every ``every`` iterations, to where it last fits; then ``end``."""
    starts = _starts(steps, size, start, stride)
    return _walk(iteration, steps, size, starts, [every] * len(starts), end)


def decaying_window(
    iteration: int,
    steps: int,
    size: int,
    *,
    start: int = 0,
    stride: int = 1,
    every: int = 10,
    every_last: int = 1,
    end: str = "hold",
) -> Window:
    """Linear decay (MixGRPO): at start l it stays for floor(every (1 - l / L) + every_last l / L) iterations, L = steps - 2.

    So that the early steps, which decide most, are trained longest.
    """
    starts, reach = _starts(steps, size, start, stride), max(steps - 2, 1)
    stays = [(every * (reach - at) + every_last * at) // reach for at in starts]  # whole numbers: 0.1 * 10 must not round down
    return _walk(iteration, steps, size, starts, stays, end)


def exp_decaying_window(
    iteration: int,
    steps: int,
    size: int,
    *,
    start: int = 0,
    stride: int = 1,
    every: int = 25,
    rate: float = 0.1,
    threshold: int = 13,
    end: str = "hold",
) -> Window:
    """Exponential decay (MixGRPO): at start l it stays for ceil(every e^(-rate max(0, l - threshold))) iterations."""
    starts = _starts(steps, size, start, stride)
    if not 0 <= rate < math.inf:
        raise WindowError(f"the rate at which a window's stay decays is finite and at least 0, got {rate!r}; the paper's is 0.1")
    decay = [max(math.exp(-rate * max(0, at - threshold)), 1e-9) for at in starts]  # not 0 by underflow: ceil would be 0 too
    stays = [math.ceil(every * share) for share in decay]
    return _walk(iteration, steps, size, starts, stays, end)


def random_window(iteration: int, steps: int, size: int, *, seed: int, first: int = 0, last: int | None = None) -> Window:
    """A start drawn evenly from ``first`` to ``last`` (None: where it last fits), by ``seed`` and iteration alone."""
    last = steps - 1 - size if last is None else last
    if last < first:
        raise WindowError(
            f"a window drawn between starts {first} and {last} has nowhere to be; lower the first or raise the last"
        )
    drawn = first + derive_seed("window", seed, iteration) % (last - first + 1)
    for at in (first, last):
        Window(at, size).check(steps)
    return _walk(iteration, steps, size, [drawn], [1], "hold")


def listed_window(iteration: int, steps: int, size: int, *, starts: Sequence[int], every: int = 1, end: str = "wrap") -> Window:
    """The given starts in turn, each for ``every`` iterations."""
    return _walk(iteration, steps, size, list(starts), [every] * len(starts), end)


def some_steps(iteration: int, size: int, count: int, *, seed: int) -> list[int]:
    """``count`` of a window's ``size`` steps, counted from its start and rising, drawn evenly by ``seed`` and iteration alone.

    For training on a part of what is stochastic, as DanceGRPO does; one draw for all samples, so that a step is one model call.

    Raises:
        WindowError: ``count`` is not 1 … ``size``.
    """
    if not 1 <= count <= size:
        raise WindowError(f"of a window of {size} steps, 1 to {size} can be trained, got {count}")
    order = sorted(range(size), key=lambda step: derive_seed("trained step", seed, iteration, step))
    return sorted(order[:count])


WINDOW_POLICIES: dict[str, Callable[..., Window]] = {
    "frozen": frozen_window,
    "progressive": progressive_window,
    "decay": decaying_window,
    "exp_decay": exp_decaying_window,
    "random": random_window,
    "list": listed_window,
}
"""By name: (iteration, steps, size, own settings by keyword) -> the window of that iteration (0, 1, …).

Pure functions, so that resuming needs no state and all ranks agree. Every window has ``size`` >= 1 steps, none of them the last;
``end`` says what follows the last start: "hold" stays there, "wrap" begins again, "bounce" goes back and forth. All raise
:class:`WindowError` when a start does not fit or a setting is outside its range.
"""


def _starts(steps: int, size: int, start: int, stride: int) -> list[int]:
    """start, start + stride, … and, always last, where the window last fits; only ``start`` when ``stride`` is 0."""
    if stride < 0:
        raise WindowError(f"a window moves by a stride of at least 0, got {stride}; 0 is the frozen window")
    last = steps - 1 - size
    return [*range(start, last, stride), last] if stride and start < last else [start]


def _walk(iteration: int, steps: int, size: int, starts: list[int], stays: list[int], end: str) -> Window:
    """The window of an iteration on a walk over ``starts`` that stays ``stays`` iterations at each."""
    if iteration < 0 or size < 1 or not starts:
        raise WindowError(
            f"a window policy needs an iteration of at least 0, a size of at least 1 and a start, got iteration {iteration}, "
            f"size {size} and {len(starts)} starts"
        )
    if min(stays) < 1:
        raise WindowError(f"a window stays for at least 1 iteration at every start, got {min(stays)}; raise every")
    for at in starts:
        Window(at, size).check(steps)
    if end == "bounce":
        starts, stays = starts + starts[-2:0:-1], stays + stays[-2:0:-1]
    elif end not in ("hold", "wrap"):
        raise WindowError(f"a window policy ends with hold, wrap or bounce, got {end!r}")
    within = min(iteration, sum(stays) - 1) if end == "hold" else iteration % sum(stays)
    return Window(starts[bisect_right(list(accumulate(stays)), within)], size)
