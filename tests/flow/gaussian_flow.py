"""A flow in closed form: the data are one Gaussian, so that the exact velocity is affine in x and its ODE has a solution."""

import math

MEAN, SPREAD = 0.8, 0.5


def variance_at(sigma):
    """The marginal variance V = (1 - sigma)^2 spread^2 + sigma^2."""
    return (1 - sigma) ** 2 * SPREAD**2 + sigma**2


def velocity(x, sigma):
    """E[eps - x0 | x] at sigma."""
    slope = (sigma - (1 - sigma) * SPREAD**2) / variance_at(sigma)
    return -MEAN + slope * (x - (1 - sigma) * MEAN)


def path(x, sigma, sigma_next):
    """Where the ODE takes x from sigma: (1 - sigma') mean + sqrt(V' / V) (x - (1 - sigma) mean)."""
    scale = math.sqrt(variance_at(sigma_next) / variance_at(sigma))
    return (1 - sigma_next) * MEAN + scale * (x - (1 - sigma) * MEAN)
