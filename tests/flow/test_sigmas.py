"""Sigma tables and windows: the published numbers, and refusals that say what would fit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.sigmas import SigmaError, check_sigmas, dynamic_shift, shifted_sigmas
from mixgrpo.backend.flow.window import Window, WindowError

SHIFT_3_OF_25 = [
    1, 0.986301, 0.971831, 0.956522, 0.940299, 0.923077, 0.904762, 0.885246, 0.864407, 0.842105, 0.818182, 0.792453, 0.764706,
    0.734694, 0.702128, 0.666667, 0.627907, 0.585366, 0.538462, 0.486486, 0.428571, 0.363636, 0.290323, 0.206897, 0.111111, 0,
]  # fmt: skip


def test_shift_3_is_the_papers_table():
    table = shifted_sigmas(25, 3.0)
    assert table.dtype == torch.float64
    assert table.tolist() == pytest.approx(SHIFT_3_OF_25, abs=5e-7)
    assert shifted_sigmas(10, 3.0).tolist() == pytest.approx(
        [1, 0.9643, 0.9231, 0.875, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0], abs=5e-5
    )


@given(steps=st.integers(1, 200), shift=st.floats(0.05, 50))
def test_a_shifted_table_has_steps_plus_one_entries_from_exactly_1_to_exactly_0(steps, shift):
    table = shifted_sigmas(steps, shift)
    check_sigmas(table)
    assert len(table) == steps + 1
    assert table[0] == 1 and table[-1] == 0


@pytest.mark.parametrize(("side", "mu", "shift"), [(512, 0.630, 1.878), (720, 0.7994, 2.224), (1024, 1.15, 3.158)])
def test_dynamic_shift_has_fluxs_values(side, mu, shift):
    tokens = (side // 16) ** 2
    assert math.log(dynamic_shift(tokens)) == pytest.approx(mu, abs=5e-4)
    assert dynamic_shift(tokens) == pytest.approx(shift, abs=1e-3)


def test_dynamic_shift_as_a_static_one_equals_fluxs_own_formula():
    mu, u = math.log(dynamic_shift(2025)), torch.linspace(1, 1 / 25, 25, dtype=torch.float64)
    flux = math.exp(mu) / (math.exp(mu) + (1 / u - 1))
    torch.testing.assert_close(shifted_sigmas(25, dynamic_shift(2025))[:-1], flux, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([1.0], "at least two entries"),
        ([[1.0, 0.0]], "one axis"),
        ([1.5, 0.5, 0.0], "sigma 0 is 1.5"),
        ([1.0, 0.5, -0.1], "sigma 2 is -0.1"),
        ([1.0, float("nan"), 0.0], "sigma 1 is nan"),
        ([1.0, 0.5, 0.5, 0.0], "2 is 0.5 after 0.5"),
        ([1.0, 0.4, 0.5, 0.0], "2 is 0.5 after 0.4"),
    ],
)
def test_a_table_that_is_no_flow_schedule_is_refused(table, words):
    with pytest.raises(SigmaError, match=words):
        check_sigmas(torch.tensor(table))


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(SigmaError, match="whole number"):
        shifted_sigmas(steps, 3.0)


@pytest.mark.parametrize("shift", [0, -1.0, float("inf"), float("nan")])
def test_shifts_out_of_range_are_refused(shift):
    with pytest.raises(SigmaError, match="above 0"):
        shifted_sigmas(10, shift)


def test_dynamic_shift_refuses_no_tokens():
    with pytest.raises(SigmaError, match="image_tokens"):
        dynamic_shift(0)


@given(steps=st.integers(1, 40), start=st.integers(0, 40), size=st.integers(0, 40))
def test_a_window_fits_exactly_when_it_leaves_out_the_last_step(steps, start, size):
    window = Window(start, size)
    assert [i for i in range(100) if window.contains(i)] == list(window.steps) == list(range(start, start + size))
    if not size or start + size < steps:
        window.check(steps)
    else:
        with pytest.raises(WindowError, match=f"start \\+ size may be at most {steps - 1}"):
            window.check(steps)


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (0, -1), (1.0, 2), (0, True), ("0", 1)])
def test_a_window_of_other_than_whole_numbers_from_0_is_refused(start, size):
    with pytest.raises(WindowError, match="whole number of at least 0"):
        Window(start, size)
