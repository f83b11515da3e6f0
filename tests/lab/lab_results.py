"""Entries and draws without a model."""

from __future__ import annotations

import torch

from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.lab.compare import Draw
from mixgrpo.backend.lab.entries import Entry


def entry(label: str, steps: int = 4, first: float = 1.0) -> Entry:
    """An entry of which only running it tells what it costs."""
    return Entry(label, "euler", shifted_sigmas(steps, 1.0) * first)


def drawn(latents: torch.Tensor) -> Draw:
    """A draw of these latents (G, …)."""
    return Draw(latents, 4, 4 * len(latents), 0.5, None)
