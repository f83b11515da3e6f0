"""One step of the flow: Euler (deterministic) and Flow-SDE (stochastic), written with the predicted data x0 and noise eps.

With v = eps - x0 and x = (1 - sigma) x0 + sigma eps a model's velocity gives x0 = x - sigma v and eps = x + (1 - sigma) v. Every
stochastic step is then one pair of numbers (c, s): x' ~ N((1 - sigma') x0 + c eps, s^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import MixGRPOError
from .sigmas import ROUNDING, working_dtype
from .window import Window


class EtaError(MixGRPOError):
    """A noise level outside what the sigma table allows."""


@dataclass(frozen=True)
class StepCoefficients:
    """One stochastic step, as float64 numbers: x' ~ N((1 - sigma_next) x0 + c eps, s^2)."""

    sigma: float
    sigma_next: float
    c: float
    s: float


def flow_sde(sigma: float, sigma_next: float, eta: float, sigma_guard: float) -> tuple[float, float]:
    """Flow-SDE (Flow-GRPO, MixGRPO): c = sigma' - eta^2 |dt| / (2 (1 - b)), s = eta sqrt(sigma |dt| / (1 - b)).

    b is sigma, except at sigma = 1, where the formula is singular and b is ``sigma_guard``, the table's second entry; there
    s = eta exactly. eta = 0 gives (sigma', 0), the Euler step.
    """
    dt, rest = sigma - sigma_next, 1 - _guarded(sigma, sigma_guard)
    return sigma_next - eta**2 * dt / (2 * rest), eta * math.sqrt(sigma * dt / rest)


def _guarded(sigma: float, sigma_guard: float) -> float:
    """sigma, or its stand-in in 1 / (1 - sigma) where sigma is 1."""
    return sigma_guard if sigma > 1 - ROUNDING else sigma


def sde_coefficients(sigmas: Tensor, eta: float, window: Window) -> dict[int, StepCoefficients]:
    """The coefficients of every window step, keyed by absolute step; empty when ``eta`` is 0 (all steps are Euler's).

    Args:
        sigmas: a checked table, shape (N + 1,).
        eta: noise level >= 0, small enough that c >= 0 on every window step.

    Raises:
        EtaError: ``eta`` is negative, not finite, or too large for a window step; names the largest that fits.
    """
    if not (math.isfinite(eta) and eta >= 0):
        raise EtaError(f"eta must be a finite number of at least 0, got {eta!r}; the paper uses 0.7")
    if eta == 0:
        return {}
    table = sigmas.tolist()
    steps = {i: (table[i], table[i + 1]) for i in window.steps}
    coefficients = {i: StepCoefficients(*pair, *flow_sde(*pair, eta, table[1])) for i, pair in steps.items()}
    for i, step in coefficients.items():
        if step.c < 0:
            largest = min(_largest_eta(k, table[1]) for k in coefficients.values())
            raise EtaError(
                f"eta {eta} is too large for step {i} (sigma {step.sigma:.4g} to {step.sigma_next:.4g}): it would take away more "
                f"noise than there is; use at most {math.floor(largest * 1000) / 1000:g}, or another window"
            )
    return coefficients


def _largest_eta(step: StepCoefficients, sigma_guard: float) -> float:
    """The eta at which c = 0: sqrt(2 sigma' (1 - b) / |dt|)."""
    return math.sqrt(2 * step.sigma_next * (1 - _guarded(step.sigma, sigma_guard)) / (step.sigma - step.sigma_next))


def euler_step(x: Tensor, velocity: Tensor, sigmas: Tensor, step: int) -> Tensor:
    """Euler: x' = x + v (sigma' - sigma), in ComfyUI's order of operations and in float32 (float64 for float64 ``x``).

    Bit-equal to ComfyUI's ``euler`` when ``velocity`` is (x - denoised) / sigma and ``sigmas`` holds the same float32 numbers.
    """
    dtype = working_dtype(x)
    table = sigmas.to(device=x.device, dtype=dtype)
    return x.to(dtype) + velocity.to(dtype) * (table[step + 1] - table[step])


def sde_mean(x: Tensor, velocity: Tensor, coefficients: StepCoefficients) -> Tensor:
    """The mean (1 - sigma') x0 + c eps of a stochastic step.

    In float32 (float64 for float64 ``x``): a bf16 velocity is upcast first, since bf16 times a 0-dim float32 stays bf16 in torch.
    """
    k, dtype = coefficients, working_dtype(x)
    x, velocity = x.to(dtype), velocity.to(dtype)
    x0 = x - k.sigma * velocity
    eps = x + (1 - k.sigma) * velocity
    return (1 - k.sigma_next) * x0 + k.c * eps


def log_prob(x_next: Tensor, mean: Tensor, s: float) -> Tensor:
    """mean over dims of -(x' - mu)^2 / (2 s^2) - ln s - ln(2 pi) / 2, shape (rows,); x' is data and receives no gradient.

    A mean, not a sum: the log-density per dimension, whose clip ranges do not depend on the size of the picture.
    """
    square = (x_next.detach().to(mean.dtype) - mean).square().flatten(1).mean(1)
    return -square / (2 * s**2) - math.log(s) - 0.5 * math.log(2 * math.pi)
