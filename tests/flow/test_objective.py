"""The clipped objective, replay with a shared first step, and the gate: ALGORITHM identities 8, 9, 10 and 15."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.noise import initial_noise, step_noise
from mixgrpo.backend.flow.objective import (
    ReplayGap,
    ReplayMismatch,
    check_replay,
    clipped_objective,
    replay_gap,
    replay_groups,
    replay_log_prob,
    replay_step,
)
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window

GROUPS, GROUP_SIZE, SHAPE = 3, 4, (2, 8)
ROWS = GROUPS * GROUP_SIZE
EVERYONE = torch.arange(ROWS)
CLIP = 1e-4


class Flow(torch.nn.Module):
    """A small prompt-conditional velocity with guidance, in any dtype; counts model rows."""

    def __init__(self, dtype=torch.float64, guidance=2.0):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.inner = torch.nn.Parameter(0.3 * torch.randn(16, 16, generator=g, dtype=torch.float64).to(dtype))
        self.prompts = torch.randn(GROUPS, 16, generator=g, dtype=torch.float64).to(dtype)
        self.guidance, self.rows = guidance, 0

    def forward(self, x, sigma, groups):
        self.rows += len(x)
        h = x.flatten(1).to(self.inner.dtype) @ self.inner + sigma.to(self.inner.dtype)
        plain, prompted = torch.tanh(h), torch.tanh(h + self.prompts[groups])
        return (plain + self.guidance * (prompted - plain)).reshape(x.shape) - x.to(h.dtype)

    def of(self, groups):
        return lambda x, sigma: self(x, sigma, groups)

    def anywhere(self, x, sigma):
        return self(x, sigma, torch.arange(GROUPS).repeat_interleave(len(x) // GROUPS))


def sample(flow, dtype=torch.float64, shared=True):
    rows = GROUPS if shared else ROWS
    initial = initial_noise(5, (rows, *SHAPE)).to(dtype)

    def noise(step):
        return step_noise(0, range(ROWS), step, SHAPE)

    return rollout(flow.anywhere, initial, shifted_sigmas(8, 3.0), Window(2, 3), 0.7, noise, GROUP_SIZE, shared=shared)


def replay(flow, trajectory, index, members):
    return replay_step(flow.of(replay_groups(trajectory, index, members)), trajectory, index, members).mean


def losses(flow, trajectory, index, members, advantages, clip=CLIP):
    new = replay_log_prob(trajectory, index, members, replay(flow, trajectory, index, members))
    return clipped_objective(new, trajectory.log_probs[index][members], advantages[members], clip).loss


def gradient(flow, loss):
    return torch.autograd.grad(loss, flow.inner)[0]


def moved(flow, size):
    """The same flow a little later in training, so that ratios are not 1."""
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        flow.inner += size * torch.randn(flow.inner.shape, generator=g, dtype=flow.inner.dtype)
    return flow


def advantages_of(rows=ROWS, seed=2):
    return torch.randn(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.floats(-3e-4, 3e-4), st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3))
def test_the_gradient_is_0_exactly_where_the_ratio_has_gone_too_far_the_good_way(log_ratio, advantage):
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    old, a = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    terms = clipped_objective(new, old, a, CLIP)
    terms.loss.sum().backward()
    ratio = terms.ratio.item()
    too_far = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
    assert new.grad.item() == pytest.approx(0.0 if too_far else -advantage * ratio, rel=1e-12, abs=0)
    assert terms.clipped.item() == (abs(ratio - 1) > CLIP)
    held = min(max(ratio, 1 - CLIP), 1 + CLIP)
    assert terms.loss.item() == pytest.approx(max(-advantage * ratio, -advantage * held), rel=1e-12)


def test_the_old_log_prob_and_the_ratio_carry_no_gradient():
    new, old = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    terms = clipped_objective(new, old, torch.ones(3), CLIP)
    terms.loss.sum().backward()
    assert old.grad is None and not terms.ratio.requires_grad


def test_on_policy_the_gradient_of_the_loss_is_the_score_times_the_advantage():
    flow = Flow()
    t, a = sample(flow), advantages_of()
    mean = replay(flow, t, 1, EVERYONE).detach().requires_grad_()
    new = replay_log_prob(t, 1, EVERYONE, mean)
    clipped_objective(new, t.log_probs[1], a, CLIP).loss.sum().backward()
    expected = -a.reshape(-1, 1, 1) * (t.states[2] - mean.detach()) / (t.coefficients(1).s ** 2 * 16)
    torch.testing.assert_close(mean.grad, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_replay_in_batches_of_the_rollout_is_exact(dtype, shared):
    flow = Flow(dtype)
    t = sample(flow, torch.float64 if dtype == torch.float64 else torch.float32, shared)
    for index in range(3):
        mean = replay(flow, t, index, EVERYONE)
        gap = replay_gap(t, index, EVERYONE, mean)
        assert gap == ReplayGap(0.0, 0.0)
        ratio = clipped_objective(replay_log_prob(t, index, EVERYONE, mean), t.log_probs[index], advantages_of(), CLIP).ratio
        assert ratio.eq(1).all()
        check_replay(gap, dtype, CLIP)


def test_replay_of_any_members_in_any_order_is_theirs():
    flow = Flow(torch.float32)
    t = sample(flow, torch.float32)
    for index in range(3):
        for members in ([7, 0, 7, 11], [3], [8, 9, 10, 11]):
            members = torch.tensor(members)
            gap = replay_gap(t, index, members, replay(flow, t, index, members))
            check_replay(gap, torch.float32, CLIP)


def test_a_shared_first_step_is_one_model_row_per_group_with_a_member():
    flow = Flow()
    t = sample(flow)
    members = torch.tensor([11, 1, 0, 8, 9])
    assert replay_groups(t, 0, members).tolist() == [0, 2]
    assert replay_groups(t, 1, members).tolist() == [2, 0, 0, 2, 2]
    flow.rows = 0
    for index in range(3):
        replay(flow, t, index, members)
    assert flow.rows == 2 + 5 + 5
    each = sample(Flow(), shared=False)
    assert replay_groups(each, 0, members).tolist() == [2, 0, 0, 2, 2]


def test_updates_of_one_rollout_cost_u_plus_g_times_w_minus_1_rows_per_group():
    flow, updates = Flow(), 2
    t = sample(flow)
    flow.rows = 0
    for members in EVERYONE.reshape(GROUPS, updates, -1).transpose(0, 1).reshape(updates, -1):
        for index in range(3):
            replay(flow, t, index, members)
    assert flow.rows == GROUPS * updates * (1 + (GROUP_SIZE // updates) * (3 - 1))


@pytest.mark.parametrize("clip", [CLIP, 1.0])
def test_the_gradient_of_a_shared_first_step_is_the_sum_of_per_sample_gradients(clip):
    flow = Flow()
    t, a = sample(flow), advantages_of()
    moved(flow, 1e-3)
    together = gradient(flow, losses(flow, t, 0, EVERYONE, a, clip).sum())
    one_by_one = sum(gradient(flow, losses(flow, t, 0, EVERYONE[i : i + 1], a, clip).sum()) for i in range(ROWS))
    assert together.norm() > 1e-6
    assert (together - one_by_one).norm() <= 1e-12 * one_by_one.norm()


def test_steps_and_samples_accumulate_to_one_big_batch_and_their_order_is_free():
    flow = Flow()
    t, a = sample(flow), advantages_of()
    moved(flow, 1e-3)
    big = gradient(flow, torch.stack([losses(flow, t, i, EVERYONE, a).mean() for i in range(3)]).mean())
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    small = sum(gradient(flow, losses(flow, t, i, part, a).sum() / (ROWS * 3)) for i in (2, 0, 1) for part in order.split(5))
    assert (big - small).norm() <= 1e-12 * big.norm()


def stopped(trajectory, flow, dtype=torch.float32, words="another computation"):
    gap = ReplayGap(0.0, 0.0)
    for index in range(3):
        gap = gap.worst(replay_gap(trajectory, index, EVERYONE, replay(flow, trajectory, index, EVERYONE)))
    with pytest.raises(ReplayMismatch, match=words):
        check_replay(gap, dtype, CLIP)


def test_the_gate_stops_at_a_corrupted_sigma():
    flow = Flow(torch.float32)
    t = sample(flow, torch.float32)
    sigmas = t.sigmas.clone()
    sigmas[3] *= 0.99
    stopped(dataclasses.replace(t, sigmas=sigmas), flow)


def test_the_gate_stops_at_another_guidance():
    t = sample(Flow(torch.float32), torch.float32)
    stopped(t, Flow(torch.float32, guidance=2.02))


def test_the_gate_stops_at_another_dtype():
    t = sample(Flow(torch.float32), torch.float32)
    stopped(t, Flow(torch.bfloat16))
    stopped(t, Flow(torch.bfloat16), torch.bfloat16, "rounding: .* train in float32 or set the clip range to at least")


def test_the_gate_stops_at_another_prompt_or_row_order():
    flow = Flow(torch.float32)
    t = sample(flow, torch.float32)
    flow.prompts = flow.prompts.flip(0)
    stopped(t, flow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [ReplayGap(float("nan"), float("nan")), ReplayGap(float("inf"), float("inf"))])
def test_the_gate_stops_at_nan_and_infinity(gap, dtype):
    with pytest.raises(ReplayMismatch, match="NaN or infinity"):
        check_replay(gap, dtype, CLIP)


@pytest.mark.parametrize(
    ("dtype", "allowed", "refused"),
    [
        (torch.float32, ReplayGap(1e-5, 1e-5), ReplayGap(1.1e-5, 0.0)),
        (torch.float64, ReplayGap(1e-5, 1e-5), ReplayGap(0.0, 1.1e-5)),
        (torch.bfloat16, ReplayGap(0.01, 2.5e-5), ReplayGap(0.01, 2.6e-5)),
        (torch.float16, ReplayGap(0.01, 2.5e-5), ReplayGap(0.0, 2.6e-5)),
    ],
)
def test_the_limits_of_the_gate(dtype, allowed, refused):
    check_replay(allowed, dtype, CLIP)
    with pytest.raises(ReplayMismatch, match="rounding"):
        check_replay(refused, dtype, CLIP)


def test_the_worst_of_two_gaps_keeps_nan():
    assert ReplayGap(1.0, 2.0).worst(ReplayGap(3.0, 0.5)) == ReplayGap(3.0, 2.0)
    for worst in (
        ReplayGap(float("nan"), 0.0).worst(ReplayGap(1.0, 0.0)),
        ReplayGap(1.0, 0.0).worst(ReplayGap(float("nan"), 0.0)),
    ):
        assert worst.mean_gap != worst.mean_gap


@pytest.mark.parametrize("shared", [True, False])
def test_every_member_has_the_velocity_of_its_row(shared):
    flow = Flow()
    t = sample(flow, shared=shared)
    members = torch.tensor([11, 1, 0, 8, 9])
    for index in range(3):
        step = replay_step(flow.of(replay_groups(t, index, members)), t, index, members)
        x = t.states[index][members // GROUP_SIZE if shared and index == 0 else members]
        torch.testing.assert_close(step.velocity, flow(x, t.sigma(index), members // GROUP_SIZE), rtol=0, atol=1e-12)
        torch.testing.assert_close(step.mean, t.means[index][members], rtol=0, atol=1e-12)
