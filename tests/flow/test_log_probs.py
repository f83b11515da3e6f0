"""The three scales of a step's log-prob, against closed forms in the moved mean."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import LOG_PROBS, gaussian, log_prob, ratio_norm, variance_free


def draw(count, seed=0):
    return torch.randn(count, 4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moved_step(seed, size, s):
    """(the rollout's mean, its noise, how far the mean has moved, the stored next state)."""
    mean, z, moved = draw(3, seed)
    return mean, z, size * moved, mean + s * z


def over_dims(x):
    return x.flatten(1).mean(1)


sizes, stds = st.floats(0, 1e-2), st.floats(0.05, 1)


@given(seed=st.integers(0, 99), size=sizes, s=stds)
def test_a_moved_mean_changes_each_log_prob_by_its_closed_form(seed, size, s):
    mean, z, moved, x_next = moved_step(seed, size, s)
    cross, square = over_dims(moved * z), over_dims(moved.square())
    expected = {
        "gaussian": cross / s - square / (2 * s**2),
        "variance_free": 2 * s * cross - square,
        "ratio_norm": cross,
    }
    assert expected.keys() == LOG_PROBS.keys()
    for name, change in expected.items():
        kind = LOG_PROBS[name]
        found = kind(x_next, mean + moved, mean, s) - kind(x_next, mean, mean, s)
        torch.testing.assert_close(found, change, rtol=0, atol=1e-10)


def test_gaussian_is_the_density():
    mean, _, _, x_next = moved_step(0, 0, 0.3)
    assert torch.equal(gaussian(x_next, mean, mean + 1, 0.3), log_prob(x_next, mean, 0.3))


@given(seed=st.integers(0, 99), size=sizes, s=stds)
def test_ratio_norm_is_guards_formula_from_the_likelihood(seed, size, s):
    mean, _, moved, x_next = moved_step(seed, size, s)
    log_ratio = log_prob(x_next, mean + moved, s) - log_prob(x_next, mean, s)
    guard = (log_ratio + over_dims(moved.square()) / (2 * s**2)) * s
    torch.testing.assert_close(ratio_norm(x_next, mean + moved, mean, s), guard, rtol=0, atol=1e-10)


def test_ratio_norm_of_the_rollouts_own_mean_is_exactly_0_in_float32():
    mean, _, _, x_next = (t.float() for t in moved_step(0, 0, 0.3))
    assert ratio_norm(x_next, mean, mean, 0.3).eq(0).all()


@pytest.mark.parametrize("name", LOG_PROBS)
def test_the_gradient_reaches_the_present_mean_alone(name):
    s, dims = 0.3, 24
    old, z, moved, x_next = moved_step(3, 1e-2, s)
    mean, old, x_next = ((old + moved).requires_grad_(), old.requires_grad_(), x_next.requires_grad_())
    LOG_PROBS[name](x_next, mean, old, s).sum().backward()
    with torch.no_grad():
        expected = {"gaussian": (x_next - mean) / s**2, "variance_free": 2 * (x_next - mean), "ratio_norm": z}[name] / dims
    torch.testing.assert_close(mean.grad, expected, rtol=0, atol=1e-10)
    assert old.grad is None and x_next.grad is None


def test_on_policy_the_three_gradients_are_the_likelihoods_times_1_s_and_2_s_squared():
    """Gaussian : RatioNorm : variance-free = 1 : s : 2 s^2, which is why their clip ranges differ."""
    s = 0.3
    old, _, _, x_next = moved_step(1, 0, s)
    gradients = {}
    for name, kind in LOG_PROBS.items():
        mean = old.clone().requires_grad_()
        gradients[name] = torch.autograd.grad(kind(x_next, mean, old, s).sum(), mean)[0]
    torch.testing.assert_close(gradients["ratio_norm"], s * gradients["gaussian"], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients["variance_free"], 2 * s**2 * gradients["gaussian"], rtol=0, atol=1e-12)


def test_variance_free_is_the_negative_mean_square():
    mean, _, _, x_next = moved_step(2, 0, 0.4)
    assert torch.equal(variance_free(x_next, mean, mean, 0.4), -over_dims((x_next - mean).square()))
