"""What the trainer needs of a model family, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from ..errors import MixGRPOError

Conditions = dict[str, torch.Tensor]
"""Text conditions by name; the first axis of every tensor counts prompts. The empty name of CFG is a mapping like any other."""


class ModelError(MixGRPOError):
    """A model, or something asked of it, that does not work out; the message says why and what to use instead."""


class FlowModel(Protocol):
    """A flow-matching model: velocity = noise - data, sigma from 1 (noise) to 0 (data)."""

    transformer: nn.Module
    latent_channels: int

    def encode(self, prompts: list[str]) -> Conditions:
        """Conditions of P prompts."""

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of one latent (without the batch axis) for a picture of this size in pixels; raises :class:`ModelError`."""

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Velocity of latents (rows, ...) at the 0-dim ``sigma``; one condition row for every latent row."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (rows, ...) to float32 pictures (rows, 3, height, width) in [0, 1]."""


def take(conditions: Conditions, rows: torch.Tensor) -> Conditions:
    """The conditions of the given prompts, one row each."""
    return {name: value[rows] for name, value in conditions.items()}


class GuidedVelocity:
    """Classifier-free guidance around a model, in calls of bounded size: v = v_negative + guidance (v_prompt - v_negative).

    Guidance 1 costs one evaluation a row, anything else two (both in one call). The same object serves rollout and
    training pass; what differs is only which prompt every row belongs to.
    """

    def __init__(self, model: FlowModel, conditions: Conditions, negative: Conditions, guidance: float, rows_per_call: int):
        self.model, self.conditions, self.negative = model, conditions, negative
        self.guidance, self.rows_per_call = guidance, rows_per_call

    def for_prompts(self, prompts: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A velocity function for latents whose row r belongs to prompt ``prompts[r]``."""
        return lambda x, sigma: self(x, sigma, prompts)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        rows = max(1, self.rows_per_call // (1 if self.guidance == 1 else 2))
        parts = zip(x.split(rows), prompts.split(rows), strict=True)
        return torch.cat([self._call(part, sigma, owners) for part, owners in parts])

    def _call(self, x: torch.Tensor, sigma: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        positive = take(self.conditions, prompts)
        if self.guidance == 1:
            return self.model.velocity(x, sigma, positive)
        both = {name: torch.cat([value, self.negative[name].expand_as(value)]) for name, value in positive.items()}
        v_prompt, v_negative = self.model.velocity(torch.cat([x, x]), sigma, both).chunk(2)
        return v_negative + self.guidance * (v_prompt - v_negative)


class RowCounter:
    """Counts model rows (sum of batch sizes) by phase through a forward hook on the transformer."""

    def __init__(self, transformer: nn.Module):
        self.rows: dict[str, int] = {}
        self._phase = "other"
        self._handle = transformer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        latent = args[0] if args else kwargs["hidden_states"]
        self.rows[self._phase] = self.rows.get(self._phase, 0) + len(latent)

    @contextmanager
    def phase(self, name: str):
        """Count under ``name`` within the block."""
        previous, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = previous

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        rows, self.rows = self.rows, {}
        return rows

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()
