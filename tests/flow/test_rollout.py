"""The rollout: Euler outside the window, shared prefixes that change nothing but the cost, and rows that are counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import EtaError, log_prob, sde_mean
from mixgrpo.backend.flow.noise import initial_noise, step_noise
from mixgrpo.backend.flow.rollout import RolloutError, rollout
from mixgrpo.backend.flow.sigmas import SigmaError, shifted_sigmas
from mixgrpo.backend.flow.window import Window, WindowError

SHAPE = (3, 4)


class CountingVelocity:
    """A smooth nonlinear velocity that counts its model rows and remembers the sigmas it was asked at."""

    def __init__(self, dtype=torch.float64):
        mix = torch.randn(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.mix, self.rows, self.sigmas = (0.3 * mix).to(dtype), 0, []

    def __call__(self, x, sigma):
        assert sigma.ndim == 0 and sigma.dtype == x.dtype
        self.rows += len(x)
        self.sigmas.append(sigma.item())
        return torch.tanh(x.flatten(1) @ self.mix + sigma).reshape(x.shape) - x


def noise_for(rows, seed=0):
    return lambda step: step_noise(seed, range(rows), step, SHAPE)


def start(rows, dtype=torch.float64, seed=3):
    return initial_noise(seed, (rows, *SHAPE)).to(dtype)


@given(
    steps=st.integers(2, 9),
    start_at=st.integers(0, 7),
    size=st.integers(1, 8),
    groups=st.integers(1, 3),
    members=st.integers(1, 4),
)
def test_model_rows_per_group_are_l_plus_1_plus_g_times_the_rest(steps, start_at, size, groups, members):
    start_at = min(start_at, steps - 2)
    window = Window(start_at, min(size, steps - 1 - start_at))
    velocity = CountingVelocity()
    rollout(velocity, start(groups), shifted_sigmas(steps, 3.0), window, 0.1, noise_for(groups * members), members)
    assert velocity.rows == groups * ((start_at + 1) + members * (steps - start_at - 1))


def test_model_rows_without_sharing_or_without_noise():
    table = shifted_sigmas(8, 3.0)
    each = CountingVelocity()
    rollout(each, start(6), table, Window(2, 3), 0.7, noise_for(6), 3, shared=False)
    assert each.rows == 6 * 8
    alike = CountingVelocity()
    final = rollout(alike, start(2), table, Window(0, 0), 0.7, noise_for(6), 3).final
    assert alike.rows == 2 * 8
    assert torch.equal(final, final[[0, 0, 0, 3, 3, 3]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_a_shared_rollout_equals_one_with_a_row_per_sample(dtype, tolerance):
    table, window = shifted_sigmas(10, 3.0), Window(2, 4)
    initial = start(3, dtype)
    shared = rollout(CountingVelocity(dtype), initial, table, window, 0.7, noise_for(12), 4)
    each = rollout(CountingVelocity(dtype), initial.repeat_interleave(4, 0), table, window, 0.7, noise_for(12), 4, shared=False)
    assert shared.groups == each.groups == 3
    assert len(shared.states[0]) == 3 and len(each.states[0]) == 12
    pairs = [
        (shared.final, each.final),
        (shared.log_probs, each.log_probs),
        (shared.states[0].repeat_interleave(4, 0), each.states[0]),
        *zip(shared.states[1:], each.states[1:], strict=True),
        *zip(shared.means, each.means, strict=True),
    ]
    for a, b in pairs:
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize(("eta", "window"), [(0.0, Window(2, 4)), (0.0, Window(0, 0)), (0.7, Window(5, 0))])
def test_no_noise_means_euler_bit_for_bit_and_nothing_to_score(eta, window):
    sigmas = shifted_sigmas(8, 3.0).float()
    x = start(4, torch.float32)

    def denoise(x, sigma):
        return torch.tanh(x * 2) * (1 - sigma)

    ended = rollout(lambda x, sigma: (x - denoise(x, sigma)) / sigma, x, sigmas, window, eta, noise_for(4), 1)
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        d = (x - denoise(x, sigma)) / sigma
        x = x + d * (sigma_next - sigma)
    assert torch.equal(ended.final, x)
    assert ended.states == [] and ended.means == [] and ended.log_probs.shape == (0, 4)


def test_what_is_stored_is_what_was_sampled():
    table, window = shifted_sigmas(10, 3.0), Window(3, 3)
    velocity, noise = CountingVelocity(), noise_for(8)
    t = rollout(velocity, start(2), table, window, 0.7, noise, 4)
    assert velocity.sigmas == table[:-1].tolist()
    assert len(t.states) == 4 and len(t.means) == 3 and t.log_probs.shape == (3, 8)
    for i, step in enumerate(window.steps):
        k = t.coefficients(i)
        assert (k.sigma, k.sigma_next) == (table[step].item(), table[step + 1].item())
        x = t.states[i] if i else t.states[0].repeat_interleave(4, 0)
        mean = sde_mean(x, velocity(x, table[step]), k)
        torch.testing.assert_close(t.means[i], mean, rtol=0, atol=1e-13)
        torch.testing.assert_close(t.states[i + 1], mean + k.s * noise(step).double(), rtol=0, atol=1e-13)
        torch.testing.assert_close(t.log_probs[i], log_prob(t.states[i + 1], mean, k.s), rtol=0, atol=1e-12)


def test_noise_is_drawn_for_window_steps_only_and_a_later_window_keeps_it():
    asked = {}

    def noise(step):
        asked.setdefault(step, 0)
        return step_noise(0, range(4), step, SHAPE)

    rollout(CountingVelocity(), start(1), shifted_sigmas(10, 3.0), Window(3, 2), 0.7, noise, 4)
    assert list(asked) == [3, 4]


def test_members_of_a_group_part_at_the_window_and_groups_do_not_mix():
    table = shifted_sigmas(10, 3.0)
    both = rollout(CountingVelocity(), start(2), table, Window(2, 2), 0.7, noise_for(6), 3)
    assert len({tuple(row) for row in both.final.flatten(1).tolist()}) == 6
    first = rollout(CountingVelocity(), start(2)[:1], table, Window(2, 2), 0.7, noise_for(3), 3)
    torch.testing.assert_close(first.final, both.final[:3], rtol=0, atol=1e-13)


def test_low_precision_latents_are_sampled_in_float32_and_no_graph_is_kept():
    weight = torch.ones((), requires_grad=True)
    t = rollout(
        lambda x, s: (-x * weight).bfloat16(), start(2).bfloat16(), shifted_sigmas(6, 3.0), Window(1, 2), 0.7, noise_for(4), 2
    )
    assert {x.dtype for x in [*t.states, *t.means, t.log_probs, t.final]} == {torch.float32}
    assert not t.final.requires_grad and not t.log_probs.requires_grad


def test_progress_is_told_after_every_step():
    told = []
    rollout(
        CountingVelocity(),
        start(1),
        shifted_sigmas(4, 3.0),
        Window(1, 1),
        0.7,
        noise_for(2),
        2,
        on_step=lambda *at: told.append(at),
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def refused(error, words, initial=None, sigmas=None, window=(1, 2), eta=0.7, noise=None, group_size=2, shared=True):
    velocity = CountingVelocity()
    with pytest.raises(error, match=words):
        rollout(
            velocity,
            start(2) if initial is None else initial,
            shifted_sigmas(6, 3.0) if sigmas is None else sigmas,
            Window(*window),
            eta,
            noise or noise_for(4),
            group_size,
            shared=shared,
        )
    return velocity.rows


def test_what_does_not_fit_is_refused_before_the_model_is_called():
    assert refused(SigmaError, "fall at every step", sigmas=torch.tensor([1.0, 0.5, 0.6, 0.0])) == 0
    assert refused(WindowError, "at most 5", window=(3, 3)) == 0
    assert refused(EtaError, "too large", eta=3.0) == 0
    assert refused(RolloutError, "at least one group", group_size=0) == 0
    assert refused(RolloutError, "at least one group", initial=start(2)[:0]) == 0
    assert refused(RolloutError, "5 initial rows are not whole groups of 2", initial=start(5), shared=False) == 0


def test_noise_that_would_be_broadcast_is_refused():
    refused(RolloutError, r"shape \(1, 3, 4\), but the samples have \(4, 3, 4\)", noise=noise_for(1))
