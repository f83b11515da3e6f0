"""Deterministic steps: Euler, Heun, and multistep DPM-Solver++, in its form for flows.

DPM-Solver++ follows the predicted data x0 over lambda = ln((1 - sigma) / sigma): with m(lambda) = x0 along the path,

    x' = (sigma' / sigma) x + sigma' * integral of e^l m(l) dl from lambda to lambda'

is exact, and a step of order k replaces m by its Taylor polynomial of degree k - 1, whose derivatives are divided differences of
the newest k predictions. The first step knows one prediction; lambda is infinite at sigma 1 and at sigma 0. There the order is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import MixGRPOError
from .dynamics import euler_step
from .sigmas import ROUNDING, log_snr_gain, working_dtype


class SolverError(MixGRPOError):
    """A step of an order that the predictions at hand do not support."""


@dataclass(frozen=True)
class Solver:
    """A deterministic solver of an order; ``variant`` is that of multistep DPM-Solver++ of order 2."""

    family: Literal["euler", "heun", "dpmpp"]
    order: int
    variant: Literal["midpoint", "heun"] = "midpoint"

    def calls(self, sigma_next: float) -> int:
        """Model calls of one step: Heun asks twice, but for the step to sigma 0, which is Euler's."""
        return 2 if self.family == "heun" and sigma_next > 0 else 1


SOLVERS: dict[str, Solver] = {
    "euler": Solver("euler", 1),
    "heun": Solver("heun", 2),
    "dpmpp_1m": Solver("dpmpp", 1),
    "dpmpp_2m": Solver("dpmpp", 2, "midpoint"),
    "dpmpp_2m_heun": Solver("dpmpp", 2, "heun"),
    "dpmpp_3m": Solver("dpmpp", 3),
}
"""By name. ``dpmpp_1m`` is Euler in exact arithmetic, but rounds differently."""


@dataclass(frozen=True)
class Prediction:
    """The data predicted at a step's beginning: x0 = x - sigma v, (rows, …)."""

    sigma: float
    x0: Tensor


def ode_step(
    solver: Solver,
    x: Tensor,
    velocity: Tensor,
    sigmas: Tensor,
    step: int,
    evaluate: Callable[[Tensor, Tensor], Tensor],
    predictions: Sequence[Prediction],
) -> Tensor:
    """One step of ``solver`` from ``sigmas[step]`` to ``sigmas[step + 1]``, in float32 (float64 for float64 ``x``).

    Args:
        velocity: the model's at ``x`` and ``sigmas[step]``.
        evaluate: (x, sigma) -> v, the model, for Heun's second call.
        predictions: newest first, that of this step included; as many as the step's order. For multistep solvers only.
    """
    if solver.family == "euler":
        return euler_step(x, velocity, sigmas, step)
    if solver.family == "heun":
        return heun_step(x, velocity, sigmas, step, evaluate)
    return multistep_step(x, predictions, sigmas[step + 1].item(), solver.variant)


def heun_step(x: Tensor, velocity: Tensor, sigmas: Tensor, step: int, evaluate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Heun: the mean of the velocities at both ends of Euler's step; to sigma 0, Euler. In ComfyUI's order of operations."""
    predicted = euler_step(x, velocity, sigmas, step)
    if sigmas[step + 1] == 0:
        return predicted
    dtype = working_dtype(x)
    at_end = evaluate(predicted, sigmas[step + 1].to(predicted)).to(dtype)
    return euler_step(x, (velocity.to(dtype) + at_end) / 2, sigmas, step)


def multistep_step(x: Tensor, predictions: Sequence[Prediction], sigma_next: float, variant: str = "midpoint") -> Tensor:
    """Multistep DPM-Solver++ from the newest prediction's sigma to ``sigma_next``, of the order of as many predictions."""
    a, weights = multistep_coefficients([p.sigma for p in predictions], sigma_next, variant)
    dtype = working_dtype(x)
    return sum((b * p.x0.to(dtype) for b, p in zip(weights, predictions, strict=True)), a * x.to(dtype))


def multistep_coefficients(sigmas: Sequence[float], sigma_next: float, variant: str = "midpoint") -> tuple[float, list[float]]:
    """(a, [b_0, …]) of x' = a x + b_0 m_0 + b_1 m_1 + …, for predictions m_k made at ``sigmas``, newest first.

    With h = lambda' - lambda, r_k the k-th gap of lambda before it over h, and e = e^-h - 1:

    * order 1: a = sigma' / sigma, b_0 = 1 - a. Euler.
    * order 2: plus -(1 - sigma') (e / 2) D (midpoint) or (1 - sigma') (e / h + 1) D (heun), D = (m_0 - m_1) / r_0.
    * order 3: plus (1 - sigma') [(e / h + 1) D1 - ((e + h) / h^2 - 1/2) D2]; D1 = h m' and D2 = h^2 m'' of the parabola through
      three predictions. Often printed with half of D2, which is then no second derivative and leaves the order at 2.

    Raises:
        SolverError: none or more than three predictions, or more than one where lambda is infinite.
    """
    order = len(sigmas)
    if order > 3 or usable_order(sigmas, sigma_next, order) != order:
        made_at = ", ".join(f"{sigma:.4g}" for sigma in sigmas) or "nowhere"
        raise SolverError(
            f"no step of order {order} leads from predictions at sigma {made_at} to {sigma_next:.4g}: orders are 1 to 3, and 1 "
            "alone from sigma 1 and to sigma 0; lower the order"
        )
    sigma = sigmas[0]
    a = sigma_next / sigma
    if order == 1:
        return a, [1 - a]
    h = log_snr_gain(sigma, sigma_next)
    e, r0 = math.expm1(-h), log_snr_gain(sigmas[1], sigma) / h
    slope = e / h + 1
    if order == 2:
        d = (1 - sigma_next) * (slope if variant == "heun" else -e / 2) / r0
        return a, [1 - a + d, -d]
    r1 = log_snr_gain(sigmas[2], sigmas[1]) / h
    bend = slope * r0 - 2 * ((e + h) / h**2 - 0.5)
    d0 = (1 - sigma_next) * (slope + bend / (r0 + r1)) / r0  # of m_0 - m_1
    d1 = -(1 - sigma_next) * bend / (r0 + r1) / r1  # of m_1 - m_2
    return a, [1 - a + d0, d1 - d0, -d1]


def usable_order(sigmas: Sequence[float], sigma_next: float, order: int) -> int:
    """The order, at most ``order``, that predictions at ``sigmas`` (newest first) support: each needs a finite lambda."""
    if sigma_next == 0:
        return 1
    finite = next((k for k, sigma in enumerate(sigmas) if sigma > 1 - ROUNDING), len(sigmas))
    return max(1, min(order, finite))
