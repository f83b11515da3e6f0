"""Dance-SDE, CPS and Precise beside Flow-SDE: each against its textbook form, at both ends, and at the edge of what is legal."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import (
    SDE_DYNAMICS,
    EtaError,
    StepCoefficients,
    cps,
    dance_sde,
    flow_sde,
    largest_eta,
    precise,
    sde_coefficients,
    sde_mean,
)
from mixgrpo.backend.flow.names import UnknownName
from mixgrpo.backend.flow.sigmas import log_snr_gain, shifted_sigmas
from mixgrpo.backend.flow.window import Window

TABLE = shifted_sigmas(25, 3.0)
ALL = Window(0, 24)
NAMES = list(SDE_DYNAMICS)

sigma_pairs = st.tuples(st.floats(0.01, 0.99), st.floats(0.001, 0.98)).filter(lambda pair: pair[0] - pair[1] > 1e-3)


def draw(seed=0):
    return torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mean_of(formula, pair, eta, x, v):
    return sde_mean(x, v, StepCoefficients(*pair, *formula(*pair, eta, 0.5)))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@given(pair=sigma_pairs)
def test_without_noise_every_dynamics_is_euler(name, pair):
    assert SDE_DYNAMICS[name](*pair, 0.0, 0.5) == (pair[1], 0.0)
    assert SDE_DYNAMICS[name](1.0, pair[1], 0.0, pair[1]) == (pair[1], 0.0)
    assert SDE_DYNAMICS[name](pair[0], 0.0, 0.0, 0.5) == (0.0, 0.0)


@given(pair=sigma_pairs, eta=st.floats(0, 1), seed=st.integers(0, 99))
def test_dance_is_its_textbook_form_and_flow_sde_with_constant_diffusion(pair, eta, seed):
    sigma, sigma_next = pair
    x, v = draw(seed)
    dt, x0 = sigma_next - sigma, x - sigma * v
    same(mean_of(dance_sde, pair, eta, x, v), x + v * dt + 0.5 * eta**2 * (x - (1 - sigma) * x0) / sigma**2 * dt)
    assert dance_sde(*pair, eta, 0.5)[1] == pytest.approx(eta * math.sqrt(-dt), rel=1e-12)
    as_flow = flow_sde(*pair, eta * math.sqrt((1 - sigma) / sigma), 0.5)
    assert dance_sde(*pair, eta, 0.5) == pytest.approx(as_flow, rel=1e-10, abs=1e-10)


@given(pair=sigma_pairs, eta=st.floats(0, 1), seed=st.integers(0, 99))
def test_cps_turns_part_of_the_schedules_noise_into_fresh_noise(pair, eta, seed):
    sigma, sigma_next = pair
    x, v = draw(seed)
    x0, eps = x - sigma * v, x + (1 - sigma) * v
    s = sigma_next * math.sin(eta * math.pi / 2)
    assert cps(*pair, eta, 0.5)[1] == pytest.approx(s, rel=1e-12)
    same(mean_of(cps, pair, eta, x, v), (1 - sigma_next) * x0 + math.sqrt(max(sigma_next**2 - s**2, 0)) * eps)


@given(pair=sigma_pairs, eta=st.floats(0.01, 3))
def test_precise_is_the_integral_of_the_flow_sde_with_x0_held(pair, eta):
    """For y = (x - (1 - sigma) x0) / sigma the Flow-SDE with x0 held is Ornstein-Uhlenbeck in lambda, with rate eta^2 / 2.

    So the transition of y has mean r^(eta^2 / 2) y and variance 1 - r^(eta^2), r = sigma' (1 - sigma) / (sigma (1 - sigma')).
    """
    sigma, sigma_next = pair
    r = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
    c, s = precise(*pair, eta, 0.5)
    assert c == pytest.approx(sigma_next * r ** (eta**2 / 2), rel=1e-10)
    assert s == pytest.approx(sigma_next * math.sqrt(1 - r ** (eta**2)), rel=1e-9)


@given(pair=sigma_pairs, eta=st.floats(0.1, 1.2))
def test_precise_is_the_limit_of_many_small_flow_steps_that_hold_x0(pair, eta):
    sigmas = torch.linspace(*pair, 4001, dtype=torch.float64).tolist()
    c, variance = sigmas[0], 0.0  # of x - (1 - sigma) x0, which is sigma eps
    for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
        step_c, s = flow_sde(sigma, sigma_next, eta, 0.5)
        c, variance = c * step_c / sigma, variance * (step_c / sigma) ** 2 + s**2
    exact_c, exact_s = precise(*pair, eta, 0.5)
    assert (c, math.sqrt(variance)) == pytest.approx((exact_c, exact_s), rel=0.05, abs=1e-3)


@given(pair=sigma_pairs, seed=st.integers(0, 99))
def test_precise_at_root_2_is_first_order_sde_dpm_solver_pp(pair, seed):
    sigma, sigma_next = pair
    x, v = draw(seed)
    h = log_snr_gain(*pair)
    expected = sigma_next / sigma * math.exp(-h) * x + (1 - sigma_next) * -math.expm1(-2 * h) * (x - sigma * v)
    same(mean_of(precise, pair, math.sqrt(2), x, v), expected)
    assert precise(*pair, math.sqrt(2), 0.5)[1] == pytest.approx(sigma_next * math.sqrt(-math.expm1(-2 * h)), rel=1e-10)


@pytest.mark.parametrize("formula", [cps, precise])
@given(pair=sigma_pairs, eta=st.floats(0, 1))
def test_cps_and_precise_keep_the_schedules_noise_level(formula, pair, eta):
    c, s = formula(*pair, eta, 0.5)
    assert c**2 + s**2 == pytest.approx(pair[1] ** 2, rel=1e-12)


@given(pair=sigma_pairs, eta=st.floats(0, 1))
def test_dance_leaves_the_excess_noise_of_its_closed_form(pair, eta):
    c, s = dance_sde(*pair, eta, 0.5)
    dt, g2 = pair[0] - pair[1], eta**2
    assert c**2 + s**2 - pair[1] ** 2 == pytest.approx(g2 * dt**2 / pair[0] + g2**2 * dt**2 / (4 * pair[0] ** 2), abs=1e-10)


@pytest.mark.parametrize(
    ("name", "eta", "stds"),
    [
        ("dance_sde", 0.3, {0: 0.03511, 23: 0.09285}),
        ("cps", 0.7, {0: 0.8788, 23: 0.0990}),
        ("precise", 0.7, {0: 0.9863, 1: 0.53466, 2: 0.42546, 23: 0.06113}),
        ("flow_sde", 0.7, {0: 0.7, 1: 0.7145, 23: 0.11065}),
    ],
)
def test_the_published_numbers_for_25_steps(name, eta, stds):
    steps = sde_coefficients(TABLE, eta, ALL, name)
    assert {i: steps[i].s for i in stds} == pytest.approx(stds, abs=6e-5)


def test_precise_at_sigma_1_draws_all_noise_anew_whatever_eta():
    after = TABLE[1].item()
    for eta in (1e-3, 0.7, 1.5, 1e200):
        for first in (1.0, 1 - 6e-8, 1 + 1.2e-7):  # float32 tables miss 1 by an ulp
            assert precise(first, after, eta, after) == (0.0, after)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("table", [TABLE, TABLE.float(), torch.cat([TABLE[:1] + 5e-7, TABLE[1:]])], ids=["64", "32", "above 1"])
@given(share=st.floats(0.02, 1), start=st.integers(0, 23), size=st.integers(1, 24))
def test_every_legal_setting_is_finite_and_takes_no_more_noise_than_there_is(name, table, share, start, size):
    window = Window(start, min(size, 24 - start))
    eta = share * min(largest_eta(table, window, name), 1e6)
    for step, k in sde_coefficients(table, eta, window, name).items():
        assert math.isfinite(k.c) and math.isfinite(k.s) and k.s > 0
        assert -1e-12 <= k.c <= k.sigma_next
        assert (k.sigma, k.sigma_next) == (table[step].item(), table[step + 1].item())


@pytest.mark.parametrize("second", [1.0, 1 - 5e-7, 1 - 2e-6])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_sigma_that_is_nearly_1_is_finite_or_refused(name, second):
    table = torch.tensor([1 + 5e-7, second, 0.5, 0.0], dtype=torch.float64)
    for window in (Window(0, 1), Window(1, 1), Window(0, 2)):
        try:
            steps = sde_coefficients(table, 0.7, window, name)
        except EtaError:
            continue
        assert all(math.isfinite(k.c) and math.isfinite(k.s) and k.c >= 0 for k in steps.values())


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("window", [Window(0, 1), Window(7, 4), Window(20, 4), ALL])
def test_the_largest_eta_is_where_the_step_keeps_no_old_noise(name, window):
    largest = largest_eta(TABLE, window, name)
    steps = sde_coefficients(TABLE, largest, window, name)
    assert min(k.c for k in steps.values()) == pytest.approx(0, abs=1e-12)
    with pytest.raises(EtaError, match=f"too large for step .* use at most {math.floor(largest * 1000) / 1000:g}"):
        sde_coefficients(TABLE, largest * 1.001, window, name)


def test_cps_refuses_an_eta_at_which_the_sine_has_folded_back():
    for eta in (1.001, 2.0, 4.0):  # at 4 cos is 1 again
        with pytest.raises(EtaError, match="use at most 1,"):
            sde_coefficients(TABLE, eta, Window(0, 4), "cps")


def test_precise_has_no_largest_eta():
    assert largest_eta(TABLE, ALL, "precise") == math.inf
    assert sde_coefficients(TABLE, 1e200, ALL, "precise")[5].c == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eta", [1e-8, 1e-170])
def test_noise_that_rounding_would_lose_is_refused(name, eta):
    with pytest.raises(EtaError, match="too small for step .* use 0 for the plain ODE"):
        sde_coefficients(TABLE, eta, Window(3, 2), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eta", [-0.1, float("nan"), float("inf")])
def test_an_eta_that_is_no_noise_level_is_refused(name, eta):
    with pytest.raises(EtaError, match="at least 0"):
        sde_coefficients(TABLE, eta, Window(0, 4), name)


def test_an_unknown_dynamics_is_refused_with_the_names_there_are():
    for call in (lambda: sde_coefficients(TABLE, 0.7, ALL, "flow"), lambda: largest_eta(TABLE, ALL, "flow")):
        with pytest.raises(UnknownName, match="dynamics 'flow' does not exist; choose one of flow_sde, dance_sde, cps, precise"):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_table_has_the_coefficients_of_the_whole(name):
    whole = sde_coefficients(TABLE, 0.7, Window(5, 4), name)
    assert sde_coefficients(TABLE[3:], 0.7, Window(5, 4), name, first_step=3) == whole
    assert sde_coefficients(TABLE[:12], 0.7, Window(5, 4), name) == whole
    assert largest_eta(TABLE[3:], Window(5, 4), name, 3) == largest_eta(TABLE, Window(5, 4), name)


@pytest.mark.parametrize("steps", [10, 25])
@pytest.mark.parametrize(
    ("name", "eta", "excess"),
    [("cps", 0.7, {10: 0, 25: 0}), ("precise", 0.7, {10: 0, 25: 0}), ("dance_sde", 0.3, {10: 0.0162, 25: 0.0210})],
)
def test_point_mass_data_keep_the_exact_mean_and_the_published_spread(steps, name, eta, excess):
    """Data all at 0.8: the exact velocity is (x - 0.8) / sigma, and every step affine in x, so that two points tell all."""
    table, mean, variance = shifted_sigmas(steps, 3.0), 0.0, 1.0
    points = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for k in sde_coefficients(table, eta, Window(0, steps - 1), name).values():
        at_0, at_1 = sde_mean(points, (points - 0.8) / k.sigma, k).tolist()
        mean, variance = at_0 + (at_1 - at_0) * mean, (at_1 - at_0) ** 2 * variance + k.s**2
    sigma = table[-2].item()
    assert mean == pytest.approx((1 - sigma) * 0.8, abs=1e-10)
    assert math.sqrt(variance) - sigma == pytest.approx(excess[steps], abs=6e-5 if excess[steps] else 1e-10)
