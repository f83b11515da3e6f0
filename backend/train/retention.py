"""Which LoRAs of a run stay."""

from __future__ import annotations

MOST = 32
"""How many LoRAs stay by their distance alone, when a job does not say ``keep_loras_every``."""
_NEWEST = 2  # whoever has just been told of the newest has until the next but one to fetch it


def kept_loras(loras: set[int], best: int | None, wanted: set[int], checkpoint_every: int, keep_every: int | None) -> set[int]:
    """The iterations whose LoRAs stay: the newest two, the best, all ``wanted``, and every k-th.

    Every k-th is the first LoRA at or after each multiple of k, so that k need not be a multiple of ``checkpoint_every``. The
    answer is the same when asked again about what it has left.

    Args:
        loras: the iterations there is a LoRA of.
        best: the one of them with the highest reward, if any has one.
        wanted: iterations that somebody has asked for.
        keep_every: k; None: ``checkpoint_every``, doubled until no more than :data:`MOST` stay for their distance.
    """
    every, reached = keep_every or checkpoint_every, max(loras, default=0)
    while keep_every is None and reached // every > MOST:
        every *= 2
    spaced: dict[int, int] = {}
    for iteration in sorted(loras):
        spaced.setdefault(iteration // every, iteration)
    spaced.pop(0, None)
    return loras & ({*sorted(loras)[-_NEWEST:], best, *wanted, *spaced.values()} - {None})
