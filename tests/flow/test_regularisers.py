"""The clip range with two ends, the KL to the base in its four forms, and the weights of steps, against closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from mixgrpo.backend.flow.dynamics import SDE_DYNAMICS, log_prob, ratio_norm, sde_coefficients, sde_mean, velocity_gain
from mixgrpo.backend.flow.names import UnknownName
from mixgrpo.backend.flow.objective import KL_SPACES, STEP_WEIGHTS, clipped_objective, kl_to_base
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window

STEPS, ROWS, DIMS = 25, 5, 24
EVERYWHERE = Window(0, STEPS - 1)
SIGMAS = shifted_sigmas(STEPS, 3.0)


def coefficients(dynamics="flow_sde", eta=0.6):
    return sde_coefficients(SIGMAS, eta, EVERYWHERE, dynamics)


def numbers(seed):
    return torch.randn(ROWS, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the clip range


@given(st.floats(-3e-4, 3e-4), st.sampled_from([-2.0, -0.3, 0.5, 3.0]))
def test_each_end_of_the_clip_range_holds_its_own_side(log_ratio, advantage):
    low, high = 5e-5, 2e-4
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    terms = clipped_objective(new, torch.zeros(1).double(), torch.tensor([advantage], dtype=torch.float64), low, high)
    terms.loss.sum().backward()
    ratio = terms.ratio.item()
    assume(min(abs(ratio - 1 - high), abs(1 - ratio - low)) > 1e-12)  # at the edge itself rounding decides
    too_far = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    assert new.grad.item() == pytest.approx(0.0 if too_far else -advantage * ratio, rel=1e-12, abs=0)
    assert terms.clipped.item() == (ratio - 1 > high or 1 - ratio > low)
    held = min(max(ratio, 1 - low), 1 + high)
    assert terms.loss.item() == pytest.approx(max(-advantage * ratio, -advantage * held), rel=1e-12)


def test_without_an_upper_end_the_range_is_symmetric_bit_for_bit():
    new, old, a = numbers(1).flatten() * 1e-4, numbers(2).flatten() * 1e-4, numbers(3).flatten()
    one, other = clipped_objective(new, old, a, 1e-4), clipped_objective(new, old, a, 1e-4, 1e-4)
    assert torch.equal(one.loss, other.loss) and torch.equal(one.clipped, other.clipped)
    assert 0 < one.clipped.sum() < len(a)


# ------------------------------------------------------------------ the KL


@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_the_gain_of_the_velocity_is_the_slope_of_the_mean(dynamics):
    x, v = numbers(1), numbers(2)
    for k in coefficients(dynamics).values():
        slope = (sde_mean(x, v + 1, k) - sde_mean(x, v, k)).mean().item()
        assert velocity_gain(k) == pytest.approx(slope, abs=1e-14)
        assert velocity_gain(k) <= k.sigma_next - k.sigma + 1e-15  # never 0: the KL sees the velocity at every step


@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_every_form_of_the_kl_is_its_textbooks(dynamics):
    x, v, base = numbers(1), numbers(2), numbers(3)
    for k in coefficients(dynamics).values():
        mean, base_mean = sde_mean(x, v, k), sde_mean(x, base, k)
        square = (mean - base_mean).square().flatten(1).mean(1)
        std_of_time = k.s / (k.sigma - k.sigma_next) ** 0.5  # Flow-GRPO's, without the step's length
        expected = {
            "velocity": (v - base).square().flatten(1).mean(1),
            "mean": kl_divergence(Normal(mean, k.s), Normal(base_mean, k.s)).flatten(1).mean(1),
            "mean_rate": square / (2 * std_of_time**2),
            "mean_square": square,
        }
        assert expected.keys() == KL_SPACES.keys()
        for space, value in expected.items():
            torch.testing.assert_close(kl_to_base(v, base, k, space), value, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("space", KL_SPACES)
def test_the_kl_pulls_the_velocity_to_the_base_and_leaves_the_base(space):
    k = coefficients()[7]
    v, base = numbers(2).requires_grad_(), numbers(3).requires_grad_()
    kl_to_base(v, base, k, space).sum().backward()
    torch.testing.assert_close(v.grad, KL_SPACES[space](k) * 2 * (v - base).detach() / DIMS, rtol=1e-12, atol=0)
    assert v.grad.norm() > 0 and base.grad is None
    assert kl_to_base(v, v, k, space).eq(0).all()


def test_the_kl_of_a_bfloat16_model_is_float32():
    v, base = numbers(2).bfloat16(), numbers(3).bfloat16()
    kl = kl_to_base(v, base, coefficients()[7], "velocity")
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, (v.float() - base.float()).square().flatten(1).mean(1), rtol=1e-6, atol=0)


def test_an_unknown_space_is_refused():
    with pytest.raises(UnknownName, match="choose one of velocity, mean, mean_rate, mean_square"):
        kl_to_base(numbers(1), numbers(2), coefficients()[0], "pixels")


# ------------------------------------------------------------------ the weights of steps


def test_steps_of_equal_length_weigh_the_same_and_long_ones_less():
    equal = sde_coefficients(shifted_sigmas(10, 1.0), 0.5, Window(0, 9), "dance_sde")
    assert [STEP_WEIGHTS["inverse_dt"](k, 10) for k in equal.values()] == pytest.approx([1.0] * 9)
    for k in coefficients().values():
        assert STEP_WEIGHTS["inverse_dt"](k, STEPS) == pytest.approx(1 / (STEPS * (k.sigma - k.sigma_next)))
        assert STEP_WEIGHTS["equal"](k, STEPS) == 1.0


def slope(k, step_weight, scale):
    """|d loss / d v| / |A z| on policy, for one step."""
    x, v, z = numbers(1), numbers(2).requires_grad_(), numbers(3)
    mean = sde_mean(x, v, k)
    old = mean.detach()
    x_next = old + k.s * z
    new = scale(x_next, mean, old, k.s)
    terms = clipped_objective(new, new.detach(), torch.ones(ROWS).double(), 1e-4)
    (STEP_WEIGHTS[step_weight](k, STEPS) * terms.loss.sum()).backward()
    return (v.grad.norm() / z.norm() * DIMS).item()


def test_ratio_norm_and_the_weights_together_give_every_step_the_same_say():
    """GRPO-Guard: what a step's gradient in the velocity depends on is left at (1 + eta^2 / 2) / N (Flow-SDE, from step 1 on)."""
    steps = coefficients()
    plain = [slope(steps[i], "equal", lambda x, mean, old, s: log_prob(x, mean, s)) for i in range(1, 24)]
    guarded = [slope(steps[i], "inverse_dt", ratio_norm) for i in range(1, 24)]
    assert max(plain) / min(plain) > 15
    assert guarded == pytest.approx([(1 + 0.6**2 / 2) / STEPS] * 23, rel=1e-9)
