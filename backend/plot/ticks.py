"""Ticks of an axis, and numbers as labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PROPORTIONS = (1, 2, 5, 10)


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """About ``most`` multiples, never more than one above it, of 1, 2 or 5 times a power of ten within [low, high].

    Args:
        low, high: finite, low < high.
        most: >= 1.
        whole: only whole numbers.
    """
    step = _nice_step((high - low) / most, whole)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _nice_step(least: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in _PROPORTIONS if power * factor >= least * (1 - 1e-9))
    return max(1.0, step) if whole else step


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """As many digits as the ticks need to differ; with an exponent where that would take long numbers."""
    if len(ticks) < 2:
        return [figure(tick) for tick in ticks]
    step, largest = ticks[1] - ticks[0], max(abs(tick) for tick in ticks)
    fine, coarse = math.floor(math.log10(step) + 1e-9), math.floor(math.log10(largest) + 1e-9)
    if fine >= -4 and coarse < 6:
        return [f"{tick + 0.0:.{max(0, -fine)}f}" for tick in ticks]
    mantissas = (f"{tick / 10.0**coarse:.{min(9, max(0, coarse - fine))}f}" for tick in ticks)
    return ["0" if tick == 0 else f"{mantissa}e{coarse}" for tick, mantissa in zip(ticks, mantissas, strict=True)]


def figure(value: float) -> str:
    """A number for a label: three digits, or all before the point when there are more."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
