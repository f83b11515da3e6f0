"""One step of the flow: Euler (deterministic) and the SDEs (stochastic), written with the predicted data x0 and noise eps.

With v = eps - x0 and x = (1 - sigma) x0 + sigma eps a model's velocity gives x0 = x - sigma v and eps = x + (1 - sigma) v. Every
stochastic step is then one pair of numbers (c, s): x' ~ N((1 - sigma') x0 + c eps, s^2). Below sigma' is the next sigma,
|dt| = sigma - sigma', and lambda = ln((1 - sigma) / sigma).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..errors import MixGRPOError
from .names import named
from .sigmas import ROUNDING, log_snr_gain, working_dtype
from .window import Window

SMALLEST_STD = 1e-6
"""Below it a step's noise is lost to the rounding of a float32 latent, and with it the log-prob."""


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


def dance_sde(sigma: float, sigma_next: float, eta: float, sigma_guard: float) -> tuple[float, float]:
    """Dance-SDE (DanceGRPO): c = sigma' - eta^2 |dt| / (2 sigma), s = eta sqrt(|dt|). The diffusion is eta at every sigma."""
    dt = sigma - sigma_next
    return sigma_next - eta**2 * dt / (2 * sigma), eta * math.sqrt(dt)


def cps(sigma: float, sigma_next: float, eta: float, sigma_guard: float) -> tuple[float, float]:
    """Coefficients-preserving sampling (Flow-CPS): c = sigma' cos(eta pi / 2), s = sigma' sin(eta pi / 2), 0 <= eta <= 1.

    The share of noise after the step is the schedule's, c^2 + s^2 = sigma'^2. But the fresh noise does not go to 0 with |dt|:
    with more steps the samples do not approach the distribution that the ODE samples from.
    """
    return sigma_next * math.cos(eta * math.pi / 2), sigma_next * math.sin(eta * math.pi / 2)


def precise(sigma: float, sigma_next: float, eta: float, sigma_guard: float) -> tuple[float, float]:
    """Precise: c = sigma' e^(-eta^2 h / 2), s = sigma' sqrt(1 - e^(-eta^2 h)), h = lambda' - lambda.

    The exact integral of the Flow-SDE with x0 held over the step, so c^2 + s^2 = sigma'^2. At sigma = 1 h is infinite: for any
    eta > 0 all noise is drawn anew, (0, sigma').
    """
    rate = eta * eta
    if rate == 0:
        return sigma_next, 0.0
    decay = rate * log_snr_gain(sigma, sigma_next)
    return sigma_next * math.exp(-decay / 2), sigma_next * math.sqrt(-math.expm1(-decay))


Dynamics = Callable[[float, float, float, float], tuple[float, float]]

SDE_DYNAMICS: dict[str, Dynamics] = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps, "precise": precise}
"""By name: (sigma, sigma_next, eta, sigma_guard) -> (c, s), for sigma > sigma_next; eta = 0 is (sigma_next, 0), Euler's step."""

_LARGEST_ETA: dict[str, Callable[[float, float, float], float]] = {
    "flow_sde": lambda sigma, after, guard: math.sqrt(2 * after * (1 - _guarded(sigma, guard)) / (sigma - after)),
    "dance_sde": lambda sigma, after, guard: math.sqrt(2 * after * sigma / (sigma - after)),
    "cps": lambda sigma, after, guard: 1.0,
    "precise": lambda sigma, after, guard: math.inf,
}
"""The eta at which c = 0: more would take away more noise than there is."""


def _guarded(sigma: float, sigma_guard: float) -> float:
    """sigma, or its stand-in in 1 / (1 - sigma) where sigma is 1."""
    return sigma_guard if sigma > 1 - ROUNDING else sigma


def largest_eta(sigmas: Tensor, window: Window, dynamics: str = "flow_sde", first_step: int = 0) -> float:
    """The largest noise level that every window step allows (inf when any does); arguments as in :func:`sde_coefficients`."""
    limit = named(_LARGEST_ETA, dynamics, "dynamics")
    table = sigmas.tolist()
    at = [step - first_step for step in window.steps]
    return min((limit(table[i], table[i + 1], table[1]) for i in at), default=math.inf)


def sde_coefficients(
    sigmas: Tensor, eta: float, window: Window, dynamics: str = "flow_sde", first_step: int = 0
) -> dict[int, StepCoefficients]:
    """The coefficients of every window step, keyed by absolute step; empty when ``eta`` is 0 (all steps are the ODE's).

    Args:
        sigmas: a checked table, shape (N + 1,).
        eta: noise level >= 0, small enough that c >= 0 on every window step.
        window: absolute steps, all of which the table holds.
        dynamics: a name in :data:`SDE_DYNAMICS`.
        first_step: the absolute step that ``sigmas`` begins with.

    Raises:
        EtaError: ``eta`` is negative, not finite, or too large or too small for a window step; names what fits.
        UnknownName: no such dynamics.
    """
    formula = named(SDE_DYNAMICS, dynamics, "dynamics")
    if not (math.isfinite(eta) and eta >= 0):
        raise EtaError(f"eta must be a finite number of at least 0, got {eta!r}; the paper uses 0.7")
    if eta == 0:
        return {}
    table = sigmas.tolist()
    pairs = {step: (table[step - first_step], table[step - first_step + 1]) for step in window.steps}
    for step, pair in pairs.items():
        if eta > _LARGEST_ETA[dynamics](*pair, table[1]):
            largest = largest_eta(sigmas, window, dynamics, first_step)
            raise EtaError(
                f"eta {eta} is too large for step {step} (sigma {pair[0]:.4g} to {pair[1]:.4g}) of {dynamics}: it would take "
                f"away more noise than there is; use at most {math.floor(largest * 1000) / 1000:g}, or another window"
            )
    coefficients = {step: StepCoefficients(*pair, *formula(*pair, eta, table[1])) for step, pair in pairs.items()}
    for step, k in coefficients.items():
        if k.s < SMALLEST_STD:
            raise EtaError(
                f"eta {eta} is too small for step {step} (sigma {k.sigma:.4g} to {k.sigma_next:.4g}): a standard deviation of "
                f"{k.s:.2g} is lost to rounding; use 0 for the plain ODE, or a larger eta"
            )
    return coefficients


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


def velocity_gain(coefficients: StepCoefficients) -> float:
    """d mu / d v of :func:`sde_mean`, c (1 - sigma) - (1 - sigma') sigma: below 0, at most sigma' - sigma."""
    k = coefficients
    return k.c * (1 - k.sigma) - (1 - k.sigma_next) * k.sigma


def log_prob(x_next: Tensor, mean: Tensor, s: float) -> Tensor:
    """mean over dims of -(x' - mu)^2 / (2 s^2) - ln s - ln(2 pi) / 2, shape (rows,); x' is data and receives no gradient.

    A mean, not a sum: the log-density per dimension, whose clip ranges do not depend on the size of the picture.
    """
    square = (x_next.detach().to(mean.dtype) - mean).square().flatten(1).mean(1)
    return -square / (2 * s**2) - math.log(s) - 0.5 * math.log(2 * math.pi)


def gaussian(x_next: Tensor, mean: Tensor, old_mean: Tensor, s: float) -> Tensor:
    """The log-density of the step, :func:`log_prob`; a ratio of two is the likelihood ratio to the power 1 / dims."""
    return log_prob(x_next, mean, s)


def variance_free(x_next: Tensor, mean: Tensor, old_mean: Tensor, s: float) -> Tensor:
    """mean over dims of -(x' - mu)^2, as published for CPS: a difference of two is 2 s^2 times the likelihood's."""
    return -(x_next.detach().to(mean.dtype) - mean).square().flatten(1).mean(1)


def ratio_norm(x_next: Tensor, mean: Tensor, old_mean: Tensor, s: float) -> Tensor:
    """mean over dims of (mu - mu_old) z, z = (x' - mu_old) / s (RatioNorm of GRPO-Guard): 0 for the rollout's own mean.

    The likelihood's log-ratio without its negative bias, times s, so that one clip range means the same at every step:
    s (log rho + mean of (mu - mu_old)^2 / (2 s^2)).
    """
    old_mean = old_mean.detach().to(mean.dtype)
    return ((mean - old_mean) * (x_next.detach().to(mean.dtype) - old_mean)).flatten(1).mean(1) / s


LOG_PROBS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "gaussian": gaussian,
    "variance_free": variance_free,
    "ratio_norm": ratio_norm,
}
"""By name: (x_next, mean, the rollout's mean, s) -> (rows,). The log-ratio of an objective is new minus old, of one name."""
