"""Sigma tables: the times sigma_0 > … > sigma_N at which a flow is evaluated (1 is noise, 0 is data)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import MixGRPOError

ROUNDING = 1e-6
"""A first sigma this near to 1 is 1: float32 tables miss it by an ulp, on either side."""


class SigmaError(MixGRPOError):
    """A sigma table, or what one is made of, is outside its range."""


def shifted_sigmas(steps: int, shift: float) -> Tensor:
    """The shifted table sigma_i = S u_i / (S u_i + 1 - u_i), u_i = 1 - i / N.

    Args:
        steps: N >= 1.
        shift: S > 0; 1 is uniform, 3 is the paper's, :func:`dynamic_shift` gives Flux's.

    Returns:
        float64, shape (N + 1,), from exactly 1 to exactly 0.

    Raises:
        SigmaError: ``steps`` or ``shift`` is outside its range.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SigmaError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not (math.isfinite(shift) and shift > 0):
        raise SigmaError(f"shift must be a finite number above 0, got {shift!r}; 1 is no shift, 3 is the paper's")
    u = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
    return shift * u / (shift * u + (1 - u))  # not 1 + (shift - 1) u, which rounds sigma_0 away from 1


def dynamic_shift(image_tokens: int) -> float:
    """Flux's shift S = e^mu, mu = 0.5 + (L - 256) (1.15 - 0.5) / (4096 - 256), for L = (height / 16)(width / 16) tokens."""
    if image_tokens < 1:
        raise SigmaError(f"image_tokens must be at least 1, got {image_tokens!r}; it is (height / 16) * (width / 16)")
    return math.exp(0.5 + (image_tokens - 256) * (1.15 - 0.5) / (4096 - 256))


def check_sigmas(sigmas: Tensor) -> None:
    """Refuse a table that is not one-dimensional, finite, within [0, 1] (up to float32 rounding) and strictly decreasing.

    Raises:
        SigmaError: with the first offending entries.
    """
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise SigmaError(f"a sigma table has one axis and at least two entries, got shape {tuple(sigmas.shape)}")
    values = sigmas.tolist()
    for i, sigma in enumerate(values):
        if not 0 <= sigma <= 1 + ROUNDING:
            raise SigmaError(f"sigma {i} is {sigma}, outside [0, 1]; take the table of a flow model")
    for i, (sigma, sigma_next) in enumerate(zip(values, values[1:], strict=False)):
        if sigma_next >= sigma:
            raise SigmaError(f"sigmas must fall at every step, but {i + 1} is {sigma_next} after {sigma}; use another scheduler")


def log_snr_gain(sigma: float, sigma_next: float) -> float:
    """h = lambda' - lambda > 0 of a step, lambda = ln((1 - sigma) / sigma): inf from 1 (to within rounding), and to 0."""
    if sigma > 1 - ROUNDING or sigma_next <= 0:
        return math.inf
    return math.log1p((sigma - sigma_next) / ((1 - sigma) * sigma_next))


def working_dtype(x: Tensor) -> torch.dtype:
    """The arithmetic of a step: float64 for float64 latents, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
