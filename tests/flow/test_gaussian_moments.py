"""What each dynamics does to the marginals, exactly: mean and variance on Gaussian data, through the real rollout."""

import pytest
import torch
from gaussian_flow import MEAN, SPREAD, variance_at, velocity

from mixgrpo.backend.flow.dynamics import largest_eta
from mixgrpo.backend.flow.plan import FLASH, MIXGRPO, SamplingMode
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window

NOTHING = Window(0, 0)
ODE, FLOW, DANCE, PRECISE, CPS = ("flow_sde", 0.0), ("flow_sde", 0.7), ("dance_sde", 0.3), ("precise", 0.7), ("cps", 0.7)


def moments(table, eta, window, mode=MIXGRPO, mean=0.0, variance=1.0):
    """Mean and variance at the table's end, from N(mean, variance) at its beginning.

    The velocity is affine in x, so the end is affine in the beginning and the noises: a rollout of unit vectors tells its
    coefficients, and nothing is sampled.
    """
    initial = torch.zeros(window.size + 2, 1, dtype=torch.float64)
    initial[1] = 1
    units = torch.eye(window.size + 2, dtype=torch.float64)[:, 2:, None]

    def noise(step):
        return units[:, step - window.start]

    def exact(x, sigma):
        return velocity(x, sigma.item())

    at_0, *others = rollout(exact, initial, table, window, eta, noise, 1, shared=False, mode=mode).final.flatten().tolist()
    slope, *gains = (end - at_0 for end in others)
    return at_0 + slope * mean, slope**2 * variance + sum(gain**2 for gain in gains)


def longest_window(table, dynamics, eta):
    """From the first step to the last that ``eta`` allows: at the very end of a long table Dance-SDE would take c below 0."""
    size = len(table) - 2
    while largest_eta(table, Window(0, size), dynamics) < eta:
        size -= 1
    return Window(0, size)


def variance_error(steps, dynamics, eta):
    """Of the variance of the data, when every step but the last is stochastic."""
    table = shifted_sigmas(steps, 3.0)
    window = longest_window(table, dynamics, eta) if eta else NOTHING
    mean, variance = moments(table, eta, window, SamplingMode(dynamics))
    assert mean == pytest.approx(MEAN, abs=1e-10)
    return variance - SPREAD**2


@pytest.mark.parametrize(
    ("dynamics", "at_25", "at_400"),
    [
        (ODE, -0.0523, -0.0036),
        (FLOW, -0.0323, -0.0014),
        (DANCE, -0.0479, -0.0032),
        (PRECISE, -0.0620, -0.0049),
        (CPS, -0.1078, -0.0740),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_mean_is_exact_and_the_variance_off_by_the_published_error(dynamics, at_25, at_400):
    assert variance_error(25, *dynamics) == pytest.approx(at_25, abs=6e-5)
    assert variance_error(400, *dynamics) == pytest.approx(at_400, abs=6e-5)


@pytest.mark.parametrize("dynamics", [ODE, DANCE, PRECISE], ids=lambda value: value[0])
def test_the_error_halves_when_the_steps_double(dynamics):
    errors = [variance_error(steps, *dynamics) for steps in (100, 200, 400, 800)]
    assert all(1.9 < a / b < 2.0 for a, b in zip(errors, errors[1:], strict=False))


def between(steps, dynamics, eta, first=0.9, last=0.6):
    """The variance error at ``last`` of the exact marginal at ``first`` after ``steps`` stochastic steps."""
    table = torch.linspace(first, last, steps + 1, dtype=torch.float64)
    mean, variance = moments(table, eta, Window(0, steps), SamplingMode(dynamics), (1 - first) * MEAN, variance_at(first))
    assert mean == pytest.approx((1 - last) * MEAN, abs=1e-10)
    return variance - variance_at(last)


def test_the_error_of_flow_sde_halves_where_it_has_no_singularity():
    errors = [between(steps, *FLOW) for steps in (4, 8, 16, 32, 64)]
    assert [a / b for a, b in zip(errors, errors[1:], strict=False)] == pytest.approx([2.55, 2.25, 2.12, 2.06], abs=6e-3)


def test_cps_does_not_approach_the_marginals_with_more_steps():
    errors = [variance_error(steps, *CPS) for steps in (100, 200, 400, 800)]
    assert errors == sorted(errors) and all(-0.09 < error < -0.0705 for error in errors)
    inside = [between(steps, *CPS) for steps in (20, 40, 80)]
    assert inside[0] / inside[1] < 1.1 and inside[1] / inside[2] < 1.1


@pytest.mark.parametrize(
    ("dynamics", "start", "error"),
    [
        (FLOW, 0, -0.0322), (FLOW, 8, -0.0491), (FLOW, 20, -0.0439), (PRECISE, 0, -0.0523), (PRECISE, 20, -0.0608),
        (CPS, 0, -0.0524), (CPS, 20, -0.1048),
    ],
)  # fmt: skip
def test_a_window_of_4_costs_the_published_variance(dynamics, start, error):
    mean, variance = moments(shifted_sigmas(25, 3.0), dynamics[1], Window(start, 4), SamplingMode(dynamics[0]))
    assert mean == pytest.approx(MEAN, abs=1e-10)
    assert variance - SPREAD**2 == pytest.approx(error, abs=6e-5)


@pytest.mark.parametrize("history", ["carry", "reset"])
@pytest.mark.parametrize("solver", ["heun", "dpmpp_2m", "dpmpp_2m_heun", "dpmpp_3m"])
@pytest.mark.parametrize("dynamics", ["flow_sde", "dance_sde", "cps", "precise"])
def test_every_solver_after_every_window_keeps_the_mean_and_brings_the_variance_nearer_than_euler(dynamics, solver, history):
    table = shifted_sigmas(25, 3.0)
    mean, variance = moments(table, 0.3, Window(3, 4), SamplingMode(dynamics, solver_after=solver, history=history))
    _, euler = moments(table, 0.3, Window(3, 4), SamplingMode(dynamics))
    assert mean == pytest.approx(MEAN, abs=1e-10)
    assert abs(variance - SPREAD**2) < abs(euler - SPREAD**2)


def test_flash_at_13_calls_is_nearer_than_the_same_calls_of_euler():
    table = shifted_sigmas(25, 3.0)
    _, flash = moments(table, 0.7, Window(0, 4), FLASH)
    _, euler = moments(table, 0.7, Window(0, 4), SamplingMode(ratio=0.4))
    assert abs(flash - SPREAD**2) < abs(euler - SPREAD**2)
