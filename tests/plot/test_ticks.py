"""Ticks are 1, 2 or 5 times a power of ten, few, and their labels say which."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.plot.ticks import figure, nice_ticks, tick_labels

finite = st.floats(-1e20, 1e20, allow_nan=False)


@given(low=finite, span=st.floats(1e-12, 1e20), most=st.integers(2, 12))
def test_ticks_are_nice(low, span, most):
    span = max(span, 1e-6 * abs(low))
    high = low + span
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most + 1 and all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    assert len(ticks) >= (most - 2) // 3, "a step 2.5 times too long at most"
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        first_digit = step / 10.0 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(first_digit - nice) for nice in (1, 2, 5)) < 1e-3
        labels = tick_labels(ticks)
        assert len(set(labels)) == len(labels)
        assert all(abs(float(label) - tick) < 0.01 * step for label, tick in zip(labels, ticks, strict=True))


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "labels"),
    [
        (0, 1, 5, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-0.3, 0.3, 3, False, ["-0.2", "0.0", "0.2"]),
        (0.0019, 0.0039, 5, False, ["0.0020", "0.0025", "0.0030", "0.0035"]),
        (12, 15, 8, True, ["12", "13", "14", "15"]),
        (1, 60, 7, True, ["10", "20", "30", "40", "50", "60"]),
        (0, 5e-6, 5, False, ["0", "1e-6", "2e-6", "3e-6", "4e-6", "5e-6"]),
        (0, 3e7, 3, False, ["0", "1e7", "2e7", "3e7"]),
        (100_000, 300_000, 2, False, ["100000", "200000", "300000"]),
    ],
)
def test_labels_read_well(low, high, most, whole, labels):
    assert tick_labels(nice_ticks(low, high, most, whole)) == labels


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.0, "0"), (0.12345, "0.123"), (25, "25"), (1234.5, "1234"), (-0.5, "-0.5"), (1.5e-5, "1.50e-5"), (2e7, "2.00e7")],
)
def test_numbers_are_short(value, label):
    assert figure(value) == label
