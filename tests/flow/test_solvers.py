"""Deterministic solvers: their order on a flow with a known path, and finite steps where lambda is infinite."""

import math

import pytest
import torch
from gaussian_flow import path, velocity
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import euler_step
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.solvers import (
    SOLVERS,
    Prediction,
    SolverError,
    heun_step,
    multistep_coefficients,
    multistep_step,
    ode_step,
    usable_order,
)

START = torch.tensor([1.7, -0.3, 0.2], dtype=torch.float64)
ORDERS = {"euler": 1, "heun": 2, "dpmpp_1m": 1, "dpmpp_2m": 2, "dpmpp_2m_heun": 2, "dpmpp_3m": 3}


def evenly_in_lambda(first, last, steps):
    """A table with a constant step of lambda, and the two sigmas before it."""
    ends = [math.log((1 - sigma) / sigma) for sigma in (first, last)]
    h = (ends[1] - ends[0]) / steps
    return [1 / (1 + math.exp(ends[0] + k * h)) for k in range(-2, steps + 1)]


def predict(x, sigma):
    return Prediction(sigma, x - sigma * velocity(x, sigma))


def solve(name, x, sigmas, predictions=()):
    """x at the last of ``sigmas``; ``predictions``: newest first, those made before the first."""
    solver, table, predictions = SOLVERS[name], torch.tensor(sigmas, dtype=torch.float64), list(predictions)
    for i, sigma in enumerate(sigmas[:-1]):
        predictions.insert(0, predict(x, sigma))
        order = usable_order([p.sigma for p in predictions], sigmas[i + 1], solver.order)
        x = ode_step(
            solver, x, velocity(x, sigma), table, i, lambda x, sigma: velocity(x, sigma.item()), predictions[:order]
        )  # fmt: skip
    return x


@pytest.mark.parametrize("name", SOLVERS)
def test_the_error_falls_with_the_order_of_the_solver(name):
    """With two exact predictions to begin with; a multistep solver that begins with nothing takes first steps of lower order."""
    errors = []
    for steps in (40, 80, 160, 320):
        sigmas = evenly_in_lambda(0.95, 0.05, steps)
        before = [predict(path(START, 0.95, sigma), sigma) for sigma in sigmas[1::-1]]
        errors.append((solve(name, START, sigmas[2:], before) - path(START, 0.95, 0.05)).abs().max().item())
    slopes = [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]
    assert slopes[-1] == pytest.approx(ORDERS[name], abs=0.25)
    assert all(abs(slope - ORDERS[name]) < 0.6 for slope in slopes)


def test_third_order_that_begins_with_nothing_is_of_order_2_because_its_first_step_is_eulers():
    errors = []
    for steps in (1000, 2000):
        errors.append(
            (solve("dpmpp_3m", START, evenly_in_lambda(0.95, 0.05, steps)[2:]) - path(START, 0.95, 0.05)).abs().max().item()
        )
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.2)


def parabola(level, slope, bend):
    return lambda lam: level + slope * lam + bend * lam**2


@given(
    sigmas=st.lists(st.floats(0.02, 0.98), min_size=4, max_size=4, unique=True).filter(
        lambda s: min(abs(a - b) for a in s for b in s if a is not b) > 0.02
    ),
    x=st.floats(-2, 2),
    slope=st.floats(-1, 1),
    bend=st.floats(-1, 1),
)
def test_order_k_is_exact_when_x0_is_a_polynomial_of_degree_k_minus_1_in_lambda(sigmas, x, slope, bend):
    """x' = (sigma'/sigma) x + sigma' * integral of e^l m(l) dl, whose antiderivative is e^l (m - m' + m'')."""
    *before, last = sorted(sigmas, reverse=True)
    lambdas = [math.log((1 - s) / s) for s in (*before, last)]
    for order, m in ((1, parabola(0.3, 0, 0)), (2, parabola(0.3, slope, 0)), (3, parabola(0.3, slope, bend))):
        bent = bend if order == 3 else 0
        tilt = slope if order > 1 else 0

        def antiderivative(lam, m=m, tilt=tilt, bent=bent):
            return math.exp(lam) * (m(lam) - (tilt + 2 * bent * lam) + 2 * bent)

        exact = last / before[-1] * x + last * (antiderivative(lambdas[3]) - antiderivative(lambdas[2]))
        used = range(2, 2 - order, -1)
        a, weights = multistep_coefficients([before[k] for k in used], last, "heun")
        found = a * x + sum(b * m(lambdas[k]) for b, k in zip(weights, used, strict=True))
        assert found == pytest.approx(exact, abs=1e-10, rel=1e-10)


@pytest.mark.parametrize("variant", ["midpoint", "heun"])
@given(sigma=st.floats(0.05, 0.9), share=st.floats(0.05, 0.95), before=st.floats(1.02, 1.1))
def test_both_variants_of_order_2_are_their_textbook_forms(variant, sigma, share, before):
    earlier, sigma_next = sigma * before, sigma * share
    lambdas = [math.log((1 - s) / s) for s in (earlier, sigma, sigma_next)]
    h, x, m0, m1 = lambdas[2] - lambdas[1], 0.7, -0.4, 0.9
    d = (m0 - m1) * h / (lambdas[1] - lambdas[0])
    alpha, e = 1 - sigma_next, math.exp(-h) - 1
    bend = -0.5 * alpha * e * d if variant == "midpoint" else alpha * (e / h + 1) * d
    a, weights = multistep_coefficients([sigma, earlier], sigma_next, variant)
    assert a * x + weights[0] * m0 + weights[1] * m1 == pytest.approx(share * x - alpha * e * m0 + bend, rel=1e-9, abs=1e-10)


@given(sigma=st.floats(0.05, 1), share=st.floats(0, 0.95), seed=st.integers(0, 99))
def test_first_order_is_euler(sigma, share, seed):
    x, v = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    table = torch.tensor([sigma, sigma * share], dtype=torch.float64)
    first = multistep_step(x, [Prediction(sigma, x - sigma * v)], sigma * share)
    torch.testing.assert_close(first, euler_step(x, v, table, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_to_sigma_0_is_the_prediction_bit_for_bit(dtype):
    x, x0 = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(multistep_step(x, [Prediction(0.3, x0)], 0.0), x0)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 25])
def test_a_whole_table_from_1_to_0_is_finite_and_ends_near_the_data(name, steps):
    end = solve(name, START, shifted_sigmas(steps, 3.0).tolist())
    assert end.isfinite().all()
    if steps == 25:
        assert (end - path(START, 1, 0)).abs().max() < 0.11


def test_higher_orders_are_better_than_euler_on_the_papers_table():
    errors = {}
    for name in SOLVERS:
        errors[name] = (solve(name, START, shifted_sigmas(25, 3.0).tolist()) - path(START, 1, 0)).abs().max().item()
    assert all(errors[name] < errors["euler"] / 3 for name in ("heun", "dpmpp_2m", "dpmpp_2m_heun", "dpmpp_3m"))


def test_the_order_grows_with_the_predictions_whose_lambda_is_finite():
    assert usable_order([1.0], 0.9, 3) == 1
    assert usable_order([0.9, 1.0], 0.8, 3) == 1
    assert usable_order([0.8, 0.9, 1.0], 0.7, 3) == 2
    assert usable_order([0.7, 0.8, 0.9, 1.0], 0.6, 3) == 3
    assert usable_order([0.7, 0.8, 0.9], 0.6, 2) == 2
    assert usable_order([0.7, 0.8, 0.9], 0.0, 3) == 1
    assert usable_order([0.9, 1 - 1e-7], 0.8, 3) == 1  # float32's 1


@pytest.mark.parametrize(
    ("sigmas", "sigma_next"),
    [([], 0.5), ([0.9, 1.0], 0.8), ([0.3, 0.4], 0.0), ([0.6, 0.7, 0.8, 0.9], 0.5), ([0.8, 0.9, 1.0], 0.7)],
)
def test_an_order_that_the_predictions_do_not_support_is_refused(sigmas, sigma_next):
    with pytest.raises(SolverError, match=f"no step of order {len(sigmas)} .* lower the order"):
        multistep_coefficients(sigmas, sigma_next)


def test_heun_is_bit_equal_to_comfyuis_order_of_operations_in_float32():
    sigmas = shifted_sigmas(9, 3.0).float()
    x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(0))

    def denoise(x, sigma):
        return torch.tanh(x * 2) * (1 - sigma)

    def evaluate(x, sigma):
        return (x - denoise(x, sigma)) / sigma

    for i in (0, 4, 8):
        d, dt = (x - denoise(x, sigmas[i])) / sigmas[i], sigmas[i + 1] - sigmas[i]
        expected = x + d * dt
        if i < 8:
            d_2 = (expected - denoise(expected, sigmas[i + 1])) / sigmas[i + 1]
            expected = x + (d + d_2) / 2 * dt
        assert torch.equal(heun_step(x, evaluate(x, sigmas[i]), sigmas, i, evaluate), expected)


@pytest.mark.parametrize("name", SOLVERS)
def test_steps_are_float32_whatever_the_model_returns(name):
    x, v, x0 = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    solver, table = SOLVERS[name], shifted_sigmas(9, 3.0)
    predictions = [Prediction(table[4 - k].item(), x0.bfloat16()) for k in range(solver.order)]
    for state in (x, x.bfloat16()):
        stepped = ode_step(solver, state, v.bfloat16(), table, 4, lambda x, sigma: (-x).bfloat16(), predictions)
        assert stepped.dtype == torch.float32


def test_heun_asks_twice_but_for_the_step_to_sigma_0():
    assert [SOLVERS["heun"].calls(sigma_next) for sigma_next in (0.5, 0.0)] == [2, 1]
    assert all(solver.calls(0.5) == 1 for name, solver in SOLVERS.items() if name != "heun")
