"""Every sampling mode through the rollout and the training pass: finite, counted, replayed, split, or refused by name."""

import dataclasses
import itertools

import pytest
import torch

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.flow.dynamics import LOG_PROBS, SDE_DYNAMICS, log_prob
from mixgrpo.backend.flow.noise import initial_noise, step_noise
from mixgrpo.backend.flow.objective import (
    check_replay,
    clipped_objective,
    replay_gap,
    replay_groups,
    replay_log_prob,
    replay_step,
)
from mixgrpo.backend.flow.plan import FLASH, MIXGRPO, SamplingMode, plan_rollout
from mixgrpo.backend.flow.rollout import RolloutError, rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.solvers import SOLVERS, Prediction, ode_step
from mixgrpo.backend.flow.window import Window

SHAPE, GROUPS, MEMBERS, WINDOW = (2, 8), 2, 3, Window(2, 3)
ROWS = GROUPS * MEMBERS
EVERYONE = torch.arange(ROWS)
MIX = 0.3 * torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Flow:
    """A smooth nonlinear velocity that counts its model rows; ``nudge`` is what training would have changed."""

    def __init__(self, nudge=0.0):
        self.rows, self.nudge = 0, nudge

    def __call__(self, x, sigma):
        assert sigma.ndim == 0 and sigma.dtype == x.dtype
        self.rows += len(x)
        return (torch.tanh(x.flatten(1) @ MIX.to(x.dtype) + sigma) + self.nudge).reshape(x.shape) - x


def start(rows=GROUPS, dtype=torch.float64):
    return initial_noise(3, (rows, *SHAPE)).to(dtype)


def noise(step):
    return step_noise(0, range(ROWS), step, SHAPE)


def sample(mode, table=None, window=WINDOW, eta=0.7, dtype=torch.float64, flow=None, shared=True, **more):
    table = shifted_sigmas(9, 3.0) if table is None else table
    initial = start(GROUPS if shared else ROWS, dtype)
    return rollout(flow or Flow(), initial, table, window, eta, noise, MEMBERS, shared=shared, mode=mode, **more)


def same(a, b, tolerance=1e-12):
    assert (a - b).norm() <= tolerance * b.norm()


def all_tensors(trajectory):
    return [*trajectory.states, *trajectory.means, trajectory.log_probs, trajectory.final]


WINDOWS, ETAS = (Window(0, 0), Window(0, 1), Window(1, 2), Window(0, 9)), (0.0, 0.3, 1.0, 1.6)
MATRIX = list(itertools.product(SDE_DYNAMICS, SOLVERS, WINDOWS, ETAS, (1.0, 0.4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_the_matrix_of_modes_is_finite_with_the_right_rows_and_shapes_or_refused_in_a_sentence(steps, dtype):
    table, refused, ran = shifted_sigmas(steps, 3.0).float(), 0, 0
    for dynamics, solver, window, eta, ratio in MATRIX:
        flow, mode = Flow(), SamplingMode(dynamics, list(LOG_PROBS)[steps % 3], solver, ratio=ratio)
        try:
            t = sample(mode, table, window, eta, dtype, flow)
        except MixGRPOError as refusal:
            assert flow.rows == 0 and len(str(refusal)) > 40
            refused += 1
            continue
        ran += 1
        stored = window.size if eta else 0
        assert t.plan.nfe > 0 and flow.rows == t.plan.rows(MEMBERS, GROUPS)
        assert t.final.shape == (ROWS, *SHAPE) and t.log_probs.shape == (stored, ROWS)
        assert len(t.means) == stored and len(t.states) == (stored + 1 if stored else 0)
        assert all(x.isfinite().all() for x in all_tensors(t))
        assert {x.dtype for x in all_tensors(t)} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert ran >= len(MATRIX) / 4 and refused > 0


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_eta_0_is_the_solver_alone_bit_for_bit_whatever_the_dynamics(dynamics, solver):
    calm = sample(SamplingMode(dynamics, solver=solver), eta=0.0, dtype=torch.float32)
    plain = sample(SamplingMode(solver=solver), window=Window(0, 0), dtype=torch.float32)
    assert torch.equal(calm.final, plain.final) and not calm.states


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("history", ["carry", "reset"])
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_a_shared_rollout_equals_one_with_a_row_per_sample(dynamics, history, solver):
    mode = SamplingMode(dynamics, solver=solver, history=history)
    shared = sample(mode)
    initial = start().repeat_interleave(MEMBERS, 0)
    each = rollout(Flow(), initial, shared.sigmas, WINDOW, 0.7, noise, MEMBERS, shared=False, mode=mode)
    same(shared.final, each.final)
    same(shared.log_probs, each.log_probs)
    assert len(shared.final.unique(dim=0)) == ROWS


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_rollout_takes_the_steps_of_its_plan_with_the_predictions_made_on_the_way(solver):
    t, flow = sample(SamplingMode(solver=solver), window=Window(0, 0)), Flow()
    x, predictions = start(), []
    for i, step in enumerate(t.plan.steps):
        v = flow(x, t.sigmas[i])
        predictions.insert(0, Prediction(step.sigma, x - step.sigma * v))
        x = ode_step(SOLVERS[solver], x, v, t.sigmas, i, flow, predictions[: step.order])
    assert [step.order for step in t.plan.steps][3:-1] == [SOLVERS[solver].order] * 5
    assert torch.equal(t.final, x.repeat_interleave(MEMBERS, 0))


@pytest.mark.parametrize("solver", ["dpmpp_2m", "dpmpp_3m"])
def test_carried_history_is_what_the_window_predicted(solver):
    carried, reset = (sample(SamplingMode(solver_after=solver, history=history)) for history in ("carry", "reset"))
    assert torch.equal(carried.states[-1], reset.states[-1])
    assert (carried.final - reset.final).abs().max() > 1e-4


@pytest.mark.parametrize("solver", SOLVERS)
def test_full_flash_at_order_1_is_the_plain_rollout(solver):
    plain = sample(MIXGRPO)
    first_order = sample(SamplingMode(solver_after="dpmpp_1m", ratio=1.0))
    same(first_order.final, plain.final)
    flash = sample(SamplingMode(solver_after=solver, ratio=0.4))
    for a, b in zip([*flash.states, *flash.means, flash.log_probs], [*plain.states, *plain.means, plain.log_probs], strict=True):
        assert torch.equal(a, b)  # what is trained is the same
    assert flash.plan.nfe < (15 if solver == "heun" else 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [MIXGRPO, FLASH], ids=["full", "flash"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", LOG_PROBS)
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_the_training_pass_repeats_every_mode_exactly(dynamics, kind, shared, mode, dtype):
    mode = dataclasses.replace(mode, dynamics=dynamics, log_prob=kind)
    t = sample(mode, dtype=dtype, shared=shared)
    for index in range(3):
        mean = replay_step(Flow(), t, index, EVERYONE).mean
        gap = replay_gap(t, index, EVERYONE, mean)
        assert (gap.mean_gap, gap.log_prob_gap) == (0.0, 0.0)
        some = torch.tensor([5, 0, 4])
        check_replay(replay_gap(t, index, some, replay_step(Flow(), t, index, some).mean), dtype, 1e-4)


@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_the_log_ratio_of_a_changed_model_is_each_scales_closed_form(dynamics):
    for kind in LOG_PROBS:
        t = sample(SamplingMode(dynamics, kind))
        for index in range(3):
            s = t.stds[index]
            mean = replay_step(Flow(nudge=1e-3), t, index, EVERYONE).mean
            moved, z = mean - t.means[index], (t.states[index + 1] - t.means[index]) / s
            cross, square = (moved * z).flatten(1).mean(1), moved.square().flatten(1).mean(1)
            expected = {"gaussian": cross / s - square / (2 * s**2), "variance_free": 2 * s * cross - square, "ratio_norm": cross}
            new = replay_log_prob(t, index, EVERYONE, mean)
            torch.testing.assert_close(new - t.log_probs[index], expected[kind], rtol=0, atol=1e-10)
            terms = clipped_objective(new, t.log_probs[index], torch.ones(ROWS), 1.0)
            torch.testing.assert_close(terms.ratio, expected[kind].exp(), rtol=0, atol=1e-10)


def test_stored_log_probs_are_of_the_stored_states_on_the_named_scale():
    for dynamics in SDE_DYNAMICS:
        gaussian, mse, norm = (sample(SamplingMode(dynamics, kind)) for kind in ("gaussian", "variance_free", "ratio_norm"))
        for i, (state, mean, s) in enumerate(zip(gaussian.states[1:], gaussian.means, gaussian.stds, strict=True)):
            torch.testing.assert_close(gaussian.log_probs[i], log_prob(state, mean, s), rtol=0, atol=1e-12)
            torch.testing.assert_close(mse.log_probs[i], -(state - mean).square().flatten(1).mean(1), rtol=0, atol=1e-12)
        assert norm.log_probs.eq(0).all() and torch.equal(norm.final, gaussian.final)


# ---------------------------------------------------------------------- split tables


def split(mode, cut, shared=True, dtype=torch.float32):
    """The same rollout in two parts, as a sampler that is handed split sigmas would run it; and the model rows of both."""
    table, flow = shifted_sigmas(9, 3.0), Flow()

    def part(latent, sigmas, first_step, together):
        more = {"shared": together, "mode": mode, "first_step": first_step}
        return rollout(flow, latent, sigmas, WINDOW, 0.7, noise, MEMBERS, **more)

    first = part(start(GROUPS if shared else ROWS, dtype), table[: cut + 1], 0, shared)
    together = shared and WINDOW.start >= cut
    return first, part(first.final[::MEMBERS] if together else first.final, table[cut:], cut, together), flow.rows


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("solver", ["euler", "heun"])
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_split_sigmas_give_the_whole_rollout_bit_for_bit(dynamics, solver, cut, shared):
    mode = SamplingMode(dynamics, solver=solver)
    whole = sample(mode, dtype=torch.float32, shared=shared)
    first, second, rows = split(mode, cut, shared=shared)
    assert torch.equal(second.final, whole.final)
    assert [*first.window.steps, *second.window.steps] == [2, 3, 4]
    assert torch.equal(torch.cat([first.log_probs, second.log_probs]), whole.log_probs)
    for a, b in zip([*first.means, *second.means], whole.means, strict=True):
        assert torch.equal(a, b)
    assert first.stds + second.stds == whole.stds
    assert rows == whole.plan.rows(MEMBERS, GROUPS, shared=shared)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_part_can_be_replayed(cut):
    first, second, _ = split(SamplingMode("precise"), cut, dtype=torch.float64)
    for t in (first, second):
        for index in range(len(t.means)):
            assert replay_groups(t, index, EVERYONE).tolist() == ([0, 1] if t.shared and index == 0 else [0, 0, 0, 1, 1, 1])
            assert replay_gap(t, index, EVERYONE, replay_step(Flow(), t, index, EVERYONE).mean).mean_gap == 0


def test_a_multistep_solver_begins_anew_at_a_split_so_that_only_those_differ():
    mode = SamplingMode(solver="dpmpp_2m")
    whole, (_, second, _) = sample(mode, dtype=torch.float32), split(mode, 7)
    assert [step.order for step in whole.plan.steps[7:]] == [2, 1] and [step.order for step in second.plan.steps] == [1, 1]
    assert not torch.equal(second.final, whole.final)


def test_a_part_whose_members_have_parted_is_not_shared():
    table = shifted_sigmas(9, 3.0)
    for cut in (3, 7):
        with pytest.raises(RolloutError, match=f"window began at step 2, before this part's first step {cut}"):
            rollout(Flow(), start(), table[cut:], Window(2, 3), 0.7, noise, MEMBERS, first_step=cut)
    rollout(Flow(), start(), table[3:], Window(2, 3), 0.0, noise, MEMBERS, first_step=3)  # without noise none has parted


def test_a_trajectory_knows_its_plan():
    t = sample(FLASH)
    assert t.plan == plan_rollout(t.sigmas, Window(2, 3), 0.7, FLASH)
    assert [step.coefficients for step in t.plan.steps if step.coefficients] == [t.coefficients(i) for i in range(3)]
    first, second, _ = split(MIXGRPO, 3)
    assert (first.plan.steps + second.plan.steps) == sample(MIXGRPO).plan.steps
