"""The window: which steps of a rollout are stochastic and trained."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import MixGRPOError


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


def sliding_window(iteration: int, steps: int, start: int, size: int, stride: int = 0, every: int = 1) -> Window:
    """The window of an iteration (0, 1, …): moved by ``stride`` after every ``every`` iterations, held where it last fits.

    A pure function, so that resuming needs no state and all ranks agree. Stride 0 is the frozen window.
    """
    return Window(min(start + stride * (iteration // every), steps - 1 - size), size)
