"""Plans: which step is taken how, Flash's shorter tables, and costs in closed form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.dynamics import EtaError
from mixgrpo.backend.flow.names import UnknownName
from mixgrpo.backend.flow.plan import FLASH, FLASH_STAR, MIXGRPO, PlanError, SamplingMode, flash_sigmas, plan_rollout
from mixgrpo.backend.flow.sigmas import SigmaError, check_sigmas, shifted_sigmas
from mixgrpo.backend.flow.solvers import SOLVERS
from mixgrpo.backend.flow.window import Window, WindowError

TABLE = shifted_sigmas(25, 3.0)


def shift(u, amount=3.0):
    return amount * u / (1 + (amount - 1) * u)


def methods(plan):
    return [(step.kind, step.method, step.order) for step in plan.steps]


def test_the_plain_plan_is_euler_around_flow_sde():
    plan = plan_rollout(TABLE, Window(2, 3), 0.7)
    euler, sde = ("ode", "euler", 1), ("sde", "flow_sde", 1)
    assert methods(plan) == [euler] * 2 + [sde] * 3 + [euler] * 20
    assert plan.sigmas == TABLE.tolist()
    assert [step.index for step in plan.steps] == list(range(25))
    assert plan.nfe == 25 and plan.window == Window(2, 3)
    assert MIXGRPO == SamplingMode()


@pytest.mark.parametrize(("eta", "window"), [(0.0, Window(2, 3)), (0.7, Window(0, 0)), (0.7, Window(9, 0))])
def test_without_noise_every_step_is_the_odes(eta, window):
    plan = plan_rollout(TABLE, window, eta)
    assert {step.kind for step in plan.steps} == {"ode"} and plan.sigmas == TABLE.tolist()


def test_a_multistep_solver_grows_its_order_from_sigma_1_and_ends_with_order_1():
    plan = plan_rollout(TABLE, Window(0, 0), 0.0, SamplingMode(solver="dpmpp_3m"))
    assert [step.order for step in plan.steps] == [1, 1, 2] + [3] * 21 + [1]
    partial = plan_rollout(TABLE[5:], Window(0, 0), 0.0, SamplingMode(solver="dpmpp_3m"))
    assert [step.order for step in partial.steps] == [1, 2] + [3] * 17 + [1]


@pytest.mark.parametrize(("history", "orders"), [("carry", [3, 3, 3, 3]), ("reset", [1, 2, 3, 3])])
def test_history_is_carried_or_reset_across_the_window(history, orders):
    mode = SamplingMode(solver="euler", solver_after="dpmpp_3m", history=history)
    plan = plan_rollout(TABLE, Window(4, 3), 0.7, mode)
    assert [step.order for step in plan.steps[7:11]] == orders
    assert {step.method for step in plan.steps[:4]} == {"euler"}
    assert {step.method for step in plan.steps[7:]} == {"dpmpp_3m"}
    calm = plan_rollout(TABLE, Window(4, 3), 0.0, mode)  # nothing was crossed
    assert [step.order for step in calm.steps[7:11]] == [3, 3, 3, 3]


def test_the_solver_before_the_window_serves_after_it_too_unless_another_is_named():
    plan = plan_rollout(TABLE, Window(3, 2), 0.7, SamplingMode(solver="dpmpp_2m"))
    assert {step.method for step in plan.steps if step.kind == "ode"} == {"dpmpp_2m"}
    assert [step.order for step in plan.steps] == [1, 1, 2, 1, 1] + [2] * 19 + [1]


def test_heun_is_two_calls_a_step_but_for_the_last():
    plan = plan_rollout(TABLE, Window(3, 2), 0.7, SamplingMode(solver="heun"))
    assert [step.calls for step in plan.steps] == [2] * 3 + [1] * 2 + [2] * 19 + [1]
    assert [step.order for step in plan.steps] == [2] * 3 + [1] * 2 + [2] * 19 + [1]
    assert plan.nfe == 47


def test_109_of_200_rows():
    plan = plan_rollout(TABLE, Window(12, 4), 0.7)
    assert plan.rows(8) == 109 and plan.rows(8, shared=False) == 200
    assert plan.rows(8, groups=3, cfg=True) == 654


@given(
    steps=st.integers(2, 30),
    start=st.integers(0, 28),
    size=st.integers(1, 29),
    ratio=st.floats(0.05, 1),
    group_size=st.integers(1, 12),
    before=st.sampled_from(list(SOLVERS)),
    after=st.sampled_from(list(SOLVERS)),
)
def test_rows_are_the_closed_form(steps, start, size, ratio, group_size, before, after):
    start = min(start, steps - 2)
    size = min(size, steps - 1 - start)
    plan = plan_rollout(
        shifted_sigmas(steps, 3.0), Window(start, size), 0.1, SamplingMode(solver=before, solver_after=after, ratio=ratio)
    )
    left = max(1, math.ceil((steps - start - size) * ratio - 1e-9))
    b, a = (2 if name == "heun" else 1 for name in (before, after))
    prefix, rest = b * start + 1, size - 1 + a * (left - 1) + 1
    assert plan.nfe == prefix + rest
    assert plan.rows(group_size) == prefix + group_size * rest
    assert plan.rows(group_size, 3, shared=False, cfg=True) == 6 * group_size * (prefix + rest)
    calm = plan_rollout(shifted_sigmas(steps, 3.0), Window(start, size), 0.0)
    assert calm.rows(group_size) == steps  # nothing parts the members


# ---------------------------------------------------------------------- Flash


def nfe_of(ratio, starts, size=4):
    mode = SamplingMode(solver_after="dpmpp_2m", ratio=ratio)
    return [plan_rollout(TABLE, Window(start, size), 0.7, mode).nfe for start in starts]


def test_flash_costs_what_the_paper_counts():
    assert nfe_of(0.4, range(15)) == [start + 4 + math.ceil((21 - start) * 2 / 5) for start in range(15)]
    assert nfe_of(0.4, [0, 14]) == [13, 21] and sum(nfe_of(0.4, range(15))) / 15 == 17
    assert plan_rollout(TABLE, Window(0, 4), 0.7, FLASH).nfe == 13
    assert plan_rollout(TABLE, Window(0, 4), 0.7, FLASH_STAR).nfe == 9


def test_the_reference_code_takes_one_step_less_and_so_a_coarser_grid():
    """It takes int((N - last) ratio) points, not intervals; our grid of as many intervals is the same entries of the table."""
    points = int((25 - 3) * 0.4)
    reference = [shift((25 - 4) / 25 * (points - 1 - k) / (points - 1)) for k in range(points)]
    assert reference == pytest.approx([0.9403, 0.88525, 0.81818, 0.73469, 0.62791, 0.48649, 0.29032, 0], abs=5e-5)
    assert flash_sigmas(TABLE.tolist(), 4, (points - 1) / 21)[4:] == pytest.approx(reference, abs=1e-12)


@given(
    steps=st.integers(1, 60), kept=st.integers(0, 59), ratio=st.floats(0.01, 1), amount=st.floats(0.3, 12), cut=st.integers(0, 20)
)
def test_flash_points_lie_evenly_in_the_tables_own_time_whatever_its_shift_and_where_it_begins(steps, kept, ratio, amount, cut):
    kept = min(kept, steps - 1)
    whole = shifted_sigmas(steps + cut, amount)
    shortened = flash_sigmas(whole[cut:].tolist(), kept, ratio)
    n = steps - kept
    intervals = max(1, math.ceil(n * ratio - 1e-9))
    assert len(shortened) == kept + intervals + 1
    assert shortened[: kept + 1] == whole[cut : cut + kept + 1].tolist() and shortened[-1] == 0
    u = [n / (steps + cut) * (intervals - k) / intervals for k in range(intervals + 1)]
    assert shortened[kept:] == pytest.approx([shift(point, amount) for point in u], rel=1e-10, abs=1e-12)
    check_sigmas(torch.tensor(shortened, dtype=torch.float64))


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=12, unique=True), st.integers(0, 10), st.floats(0.05, 1))
def test_flash_of_any_table_falls_at_every_step_and_keeps_its_entries_at_ratio_1(entries, kept, ratio):
    table = [*sorted(entries, reverse=True), 0.0]
    kept = min(kept, len(table) - 2)
    if min(a - b for a, b in zip(table, table[1:], strict=False)) > 1e-6:
        check_sigmas(torch.tensor(flash_sigmas(table, kept, ratio), dtype=torch.float64))
    assert flash_sigmas(table, kept, 1.0) == table


def test_a_ratio_that_is_a_whole_number_of_steps_is_not_rounded_up():
    assert [len(flash_sigmas(shifted_sigmas(n, 3.0).tolist(), 0, 0.1)) - 1 for n in (10, 20, 30, 70)] == [1, 2, 3, 7]
    assert 25 * 0.28 > 7 and len(flash_sigmas(TABLE.tolist(), 0, 0.28)) - 1 == 7


def test_flash_takes_the_first_step_after_the_window_at_order_2_and_only_that_end_differs():
    plan = plan_rollout(TABLE, Window(3, 4), 0.7, FLASH)
    assert plan.sigmas[:8] == TABLE[:8].tolist()
    assert methods(plan)[:7] == methods(plan_rollout(TABLE, Window(3, 4), 0.7))[:7]
    assert methods(plan)[7:] == [("ode", "dpmpp_2m", 2)] * 7 + [("ode", "dpmpp_2m", 1)]
    assert [step.index for step in plan.steps] == list(range(15))


# ---------------------------------------------------------------------- split tables


@pytest.mark.parametrize("cut", [1, 3, 5, 7, 12, 24])
@pytest.mark.parametrize("mode", [MIXGRPO, SamplingMode(solver="heun", dynamics="precise")])
def test_the_parts_of_a_split_table_take_the_steps_of_the_whole(cut, mode):
    window = Window(3, 4)
    whole = plan_rollout(TABLE, window, 0.7, mode)
    parts = [plan_rollout(TABLE[: cut + 1], window, 0.7, mode), plan_rollout(TABLE[cut:], window, 0.7, mode, first_step=cut)]
    assert parts[0].steps + parts[1].steps == whole.steps
    assert parts[0].window.size + parts[1].window.size == 4
    assert {*parts[0].window.steps, *parts[1].window.steps} == {3, 4, 5, 6}


def test_a_part_within_right_after_or_before_the_window_may_be_flashed():
    window = Window(3, 4)
    whole = plan_rollout(TABLE, window, 0.7, FLASH)
    for cut in (1, 3, 5, 7):
        parts = [plan_rollout(TABLE[: cut + 1], window, 0.7, FLASH), plan_rollout(TABLE[cut:], window, 0.7, FLASH, cut)]
        assert parts[0].sigmas[:-1] + parts[1].sigmas == whole.sigmas
    for part, first in ((TABLE[:10], 0), (TABLE[9:], 9)):
        with pytest.raises(PlanError, match="only some of them; split the sigmas within or right after the window"):
            plan_rollout(part, window, 0.7, FLASH, first)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (WindowError, "at most 24", (TABLE, Window(21, 4), 0.7)),
        (WindowError, "at most 24", (TABLE[20:], Window(22, 3), 0.7, MIXGRPO, 20)),
        (SigmaError, "fall at every step", (torch.tensor([1.0, 0.5, 0.5, 0.0]), Window(0, 1), 0.7)),
        (EtaError, "too large", (TABLE, Window(0, 4), 3.0)),
        (EtaError, "at most 1,", (TABLE, Window(0, 4), 1.2, SamplingMode(dynamics="cps"))),
        (PlanError, "counted from 0, got -1", (TABLE, Window(0, 4), 0.7, MIXGRPO, -1)),
    ],
)
def test_what_does_not_fit_is_refused(error, words, arguments):
    with pytest.raises(error, match=words):
        plan_rollout(*arguments)


@pytest.mark.parametrize(
    ("error", "words", "settings"),
    [
        (UnknownName, "dynamics 'sde' does not exist; choose one of flow_sde", {"dynamics": "sde"}),
        (UnknownName, "log-prob 'mse' does not exist; choose one of gaussian", {"log_prob": "mse"}),
        (UnknownName, "solver 'rk4' does not exist; choose one of euler", {"solver": "rk4"}),
        (UnknownName, "solver 'rk4'", {"solver_after": "rk4"}),
        (UnknownName, "history 'keep' does not exist; choose one of carry, reset", {"history": "keep"}),
        (PlanError, "above 0 and at most at 1, got 0", {"ratio": 0}),
        (PlanError, "got 1.5", {"ratio": 1.5}),
        (PlanError, "got nan", {"ratio": float("nan")}),
    ],
)
def test_a_mode_that_does_not_exist_is_refused(error, words, settings):
    with pytest.raises(error, match=words):
        SamplingMode(**settings)
