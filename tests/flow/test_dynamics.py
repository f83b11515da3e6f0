"""The stochastic step against closed forms, in float64: ALGORITHM identities 1-8 for Flow-SDE and Euler."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import EtaError, StepCoefficients, euler_step, flow_sde, log_prob, sde_coefficients, sde_mean
from mixgrpo.backend.flow.noise import step_noise
from mixgrpo.backend.flow.sigmas import check_sigmas, shifted_sigmas
from mixgrpo.backend.flow.window import Window

TABLE = shifted_sigmas(25, 3.0)
S_OF_25 = [
    0.7, 0.7145, 0.50873, 0.41819, 0.36456, 0.32817, 0.30141, 0.28066, 0.26394, 0.25004, 0.23819, 0.22784, 0.21862, 0.21021,
    0.20238, 0.1949, 0.18755, 0.18013, 0.17237, 0.16397, 0.15448, 0.14328, 0.12932, 0.11065,
]  # fmt: skip
EXCESS_OF_25 = {0: 1.034, 1: 1.039, 2: 1.012, 3: 1.006, 21: 1.029, 22: 1.064, 23: 1.237}
LOG_PROB_OF_25 = {0: -1.062, 5: -0.305, 11: 0.060, 23: 0.782}

sigma_pairs = st.tuples(st.floats(0.01, 0.99), st.floats(0.0, 0.99)).filter(lambda pair: pair[0] - pair[1] > 1e-3)
etas = st.floats(0, 1.2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


@given(pair=sigma_pairs, seed=st.integers(0, 2**31))
def test_eta_0_is_the_euler_step(pair, seed):
    c, s = flow_sde(*pair, 0.0, 0.9)
    assert (c, s) == (pair[1], 0.0)
    x, v = draw(2, 3, 5, seed=seed)
    torch.testing.assert_close(
        sde_mean(x, v, StepCoefficients(*pair, c, s)),
        euler_step(x, v, torch.tensor(pair, dtype=torch.float64), 0),
        rtol=0,
        atol=1e-14,
    )


def test_eta_0_is_the_euler_step_at_sigma_1_too():
    assert flow_sde(1.0, 0.9, 0.0, 0.9) == (0.9, 0.0)


@given(pair=sigma_pairs, eta=etas, seed=st.integers(0, 2**31))
def test_the_unified_form_is_the_textbook_form(pair, eta, seed):
    sigma, sigma_next = pair
    c, s = flow_sde(sigma, sigma_next, eta, 0.5)
    x, v = draw(2, 3, 5, seed=seed)
    dt, g2 = sigma_next - sigma, eta**2 * sigma / (1 - sigma)
    textbook = x * (1 + g2 * dt / (2 * sigma)) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
    torch.testing.assert_close(sde_mean(x, v, StepCoefficients(sigma, sigma_next, c, s)), textbook, rtol=1e-10, atol=1e-12)
    assert s == pytest.approx(math.sqrt(g2 * -dt), rel=1e-12)


@given(pair=sigma_pairs, eta=etas)
def test_the_step_leaves_the_excess_noise_of_its_closed_form(pair, eta):
    sigma, sigma_next = pair
    c, s = flow_sde(sigma, sigma_next, eta, 0.5)
    g2, dt = eta**2 * sigma / (1 - sigma), sigma - sigma_next
    assert c**2 + s**2 - sigma_next**2 == pytest.approx(g2 * dt**2 / sigma + g2**2 * dt**2 / (4 * sigma**2), abs=1e-12, rel=1e-9)


@given(steps=st.integers(2, 60), shift=st.floats(0.5, 10), eta=st.floats(0.1, 0.7))
def test_the_first_step_has_s_equal_to_eta_for_every_table(steps, shift, eta):
    table = shifted_sigmas(steps, shift)
    assume(2 * table[1] >= eta**2)
    first = sde_coefficients(table, eta, Window(0, 1))[0]
    assert first.s == pytest.approx(eta, rel=1e-12)
    assert first.c == pytest.approx(table[1].item() - eta**2 / 2, abs=1e-12)


@given(steps=st.integers(2, 60), shift=st.floats(0.5, 10))
def test_a_float32_table_that_misses_1_by_rounding_still_begins_at_1(steps, shift):
    u = torch.arange(steps, -1, -1) / steps
    table = shift * u / (1 + (shift - 1) * u)  # a stock sampler's formula: sigma_0 is 1 or an ulp beside it
    check_sigmas(table)
    assert sde_coefficients(table, 0.1, Window(0, 1))[0].s == pytest.approx(0.1, rel=1e-4)


def test_the_published_numbers_for_25_steps():
    steps = sde_coefficients(TABLE, 0.7, Window(0, 24))
    assert [k.s for k in steps.values()] == pytest.approx(S_OF_25, rel=5e-5)
    assert [(k.sigma, k.sigma_next) for k in steps.values()] == list(zip(TABLE.tolist()[:-2], TABLE.tolist()[1:-1], strict=True))
    for i, excess in EXCESS_OF_25.items():
        assert math.hypot(steps[i].c, steps[i].s) / steps[i].sigma_next == pytest.approx(excess, abs=6e-4)
    for i, expected in LOG_PROB_OF_25.items():
        assert -0.5 - math.log(steps[i].s) - 0.5 * math.log(2 * math.pi) == pytest.approx(expected, abs=6e-4)


def test_coefficients_exist_for_the_window_only_and_not_for_eta_0():
    assert list(sde_coefficients(TABLE, 0.7, Window(3, 4))) == [3, 4, 5, 6]
    assert sde_coefficients(TABLE, 0.0, Window(3, 4)) == {}
    assert sde_coefficients(TABLE, 0.7, Window(3, 0)) == {}


@pytest.mark.parametrize("eta", [-0.1, float("nan"), float("inf")])
def test_an_eta_that_is_no_noise_level_is_refused(eta):
    with pytest.raises(EtaError, match="at least 0"):
        sde_coefficients(TABLE, eta, Window(0, 4))


@pytest.mark.parametrize(("window", "largest"), [(Window(0, 24), 1.356), (Window(23, 1), 1.356), (Window(0, 1), 1.404)])
def test_an_eta_that_takes_more_noise_than_there_is_is_refused_with_the_largest_that_fits(window, largest):
    sde_coefficients(TABLE, largest, window)
    with pytest.raises(EtaError, match=f"use at most {largest}"):
        sde_coefficients(TABLE, largest + 0.002, window)


def moments(table, eta, window, velocity_at, stop):
    """Mean and variance after ``stop`` steps from N(0, 1), through the real steps.

    For data whose exact velocity is affine in x every step is affine in x, so that two points tell all.
    """
    coefficients = sde_coefficients(table, eta, window)
    mean, variance = 0.0, 1.0
    points = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for i in range(stop):
        v = velocity_at(points, table[i].item())
        k = coefficients.get(i)
        at_0, at_1 = (sde_mean(points, v, k) if k else euler_step(points, v, table, i)).tolist()
        slope = at_1 - at_0
        mean, variance = at_0 + slope * mean, slope**2 * variance + (k.s**2 if k else 0)
    return mean, variance


@pytest.mark.parametrize(("steps", "excess"), [(10, 0.0723), (25, 0.0321), (100, 0.0087)])
def test_point_mass_data_keep_the_exact_mean_and_the_published_excess_noise(steps, excess):
    table = shifted_sigmas(steps, 3.0)

    def to_point(x, sigma):
        return (x - 0.8) / sigma

    sigma = table[-2].item()
    mean, variance = moments(table, 0.7, Window(0, steps - 1), to_point, steps - 1)
    assert mean == pytest.approx((1 - sigma) * 0.8, abs=1e-12)
    assert math.sqrt(variance) - sigma == pytest.approx(excess, abs=6e-5)
    mean, variance = moments(table, 0.0, Window(0, 0), to_point, steps - 1)
    assert (mean, math.sqrt(variance)) == pytest.approx(((1 - sigma) * 0.8, sigma), abs=1e-12)


def to_gaussian(x, t, m=0.8, spread=0.5):
    """The exact velocity of a flow to N(m, spread^2)."""
    variance = (1 - t) ** 2 * spread**2 + t**2
    return -m + (t - (1 - t) * spread**2) / variance * (x - (1 - t) * m)


@pytest.mark.parametrize(
    ("steps", "eta", "window", "error"),
    [
        (25, 0.0, Window(0, 0), -0.0523),
        (400, 0.0, Window(0, 0), -0.0036),
        (25, 0.7, Window(0, 24), -0.0323),
        (400, 0.7, Window(0, 399), -0.0014),
        (25, 0.7, Window(0, 4), -0.0322),
        (25, 0.7, Window(8, 4), -0.0491),
        (25, 0.7, Window(20, 4), -0.0439),
    ],
)
def test_gaussian_data_keep_the_mean_and_lose_the_published_variance(steps, eta, window, error):
    table = shifted_sigmas(steps, 3.0)
    mean, variance = moments(table, eta, window, to_gaussian, steps)
    assert mean == pytest.approx(0.8, abs=1e-12)
    assert variance - 0.25 == pytest.approx(error, abs=6e-5)


def test_the_euler_error_halves_when_the_steps_double():
    errors = [moments(shifted_sigmas(n, 3.0), 0.0, Window(0, 0), to_gaussian, n)[1] - 0.25 for n in (50, 100, 200, 400)]
    assert all(1.85 < a / b < 2.05 for a, b in zip(errors, errors[1:], strict=False))


def test_a_million_steps_have_the_mean_the_variance_and_the_log_prob_they_should():
    k = sde_coefficients(TABLE, 0.7, Window(5, 4))[6]
    n = 1_000_000
    x, v = draw(2, 1, seed=4).expand(2, n)
    mean = sde_mean(x, v, k)
    x_next = mean + k.s * step_noise(0, [0], 6, (n,))[0]
    assert abs((x_next - mean).mean()) < 5 * k.s / math.sqrt(n)
    assert x_next.var().item() == pytest.approx(k.s**2, rel=0.01)
    expected = -0.5 - math.log(k.s) - 0.5 * math.log(2 * math.pi)
    assert log_prob(x_next[None], mean[None], k.s).item() == pytest.approx(expected, abs=5 * math.sqrt(0.5 / n))


def test_log_prob_is_the_normal_log_density_averaged_over_every_axis_but_the_first():
    x_next, mean = draw(2, 4, 3, 2, 5)
    normal = torch.distributions.Normal(mean, 0.3).log_prob(x_next)
    torch.testing.assert_close(log_prob(x_next, mean, 0.3), normal.mean((1, 2, 3)), rtol=0, atol=1e-12)


@given(s=st.floats(0.05, 1), size=st.floats(0, 1e-2), seed=st.integers(0, 2**31))
def test_a_moved_mean_changes_the_log_prob_by_its_closed_form(s, size, seed):
    mean, moved, z = draw(3, 4, 24, seed=seed)
    moved = size * moved
    x_next = mean + s * z
    change = log_prob(x_next, mean + moved, s) - log_prob(x_next, mean, s)
    torch.testing.assert_close(change, (moved * z).mean(1) / s - moved.square().mean(1) / (2 * s**2), rtol=0, atol=1e-10)


def test_the_gradient_reaches_the_mean_and_not_the_stored_state():
    mean, x_next = (t.clone().requires_grad_() for t in draw(2, 4, 6))
    log_prob(x_next, mean, 0.3).sum().backward()
    torch.testing.assert_close(mean.grad, (x_next - mean).detach() / (0.3**2 * 6), rtol=0, atol=1e-12)
    assert x_next.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_steps_are_float32_whatever_the_model_returns(dtype):
    k = sde_coefficients(TABLE, 0.7, Window(5, 1))[5]
    x, v = (t.float() for t in draw(2, 3, 16))
    v = v.to(dtype)
    assert torch.equal(sde_mean(x, v, k), sde_mean(x, v.float(), k))
    assert torch.equal(euler_step(x, v, TABLE, 5), euler_step(x, v.float(), TABLE, 5))
    for state in (x, x.to(dtype)):
        mean = sde_mean(state, v, k)
        assert mean.dtype == euler_step(state, v, TABLE, 5).dtype == log_prob(state, mean, k.s).dtype == torch.float32


def test_euler_is_bit_equal_to_comfyuis_order_of_operations_in_float32():
    sigmas = TABLE.float()
    x, denoised = (t.float() for t in draw(2, 4, 16, 8, 8))
    velocity = (x - denoised) / sigmas[7]
    expected = x + velocity * (sigmas[8] - sigmas[7])
    assert torch.equal(euler_step(x, velocity, sigmas, 7), expected)
    assert torch.equal(euler_step(x, velocity, TABLE, 7), expected)  # a float64 table is rounded before it is subtracted
