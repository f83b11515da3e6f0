"""Rewards: one file per scorer, and the table that a job names them by."""

from . import held_out, jpeg, scene  # noqa: F401  (each enters its scorers into the table)
from .base import HELD_OUT, SCORERS, BatchError, Scorer, ScorerError, make_scorer

__all__ = ["HELD_OUT", "SCORERS", "BatchError", "Scorer", "ScorerError", "make_scorer"]
