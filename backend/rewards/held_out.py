"""The held-out judge's entry in the table: shown beside the rewards, never trained on."""

from __future__ import annotations

from .base import Scorer, register


@register("held_out_judge", held_out=True)
def held_out_judge() -> Scorer:
    """The classifier that comes with the starter (no option names another file: job files come from strangers)."""
    from ..starter.judge import WEIGHTS, HeldOutJudge  # imports this package

    return HeldOutJudge.load(WEIGHTS)
