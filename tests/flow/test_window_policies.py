"""Window policies: pure, never empty, short or on the last step, and the published sequences."""

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mixgrpo.backend.flow.window import (
    WINDOW_POLICIES,
    Window,
    WindowError,
    decaying_window,
    exp_decaying_window,
    frozen_window,
    listed_window,
    progressive_window,
    random_window,
)

ENDS = ("hold", "wrap", "bounce")


def starts_of(policy, iterations, steps=25, size=4, **settings):
    return [policy(i, steps, size, **settings).start for i in range(iterations)]


def runs(starts):
    """[(start, how many iterations in a row)]."""
    found = []
    for start in starts:
        if found and found[-1][0] == start:
            found[-1][1] += 1
        else:
            found.append([start, 1])
    return [tuple(run) for run in found]


@st.composite
def policies(draw):
    """Any policy with any legal settings: (policy, steps, size, settings)."""
    name, steps = draw(st.sampled_from(list(WINDOW_POLICIES))), draw(st.integers(2, 40))
    size = draw(st.integers(1, steps - 1))
    fits = st.integers(0, steps - 1 - size)
    walk = {"start": fits, "stride": st.integers(0, 7), "every": st.integers(1, 9), "end": st.sampled_from(ENDS)}
    settings = {
        "frozen": {"start": fits},
        "progressive": walk,
        "decay": walk | {"every_last": st.integers(1, 9)},
        "exp_decay": walk | {"rate": st.floats(0, 3), "threshold": st.integers(0, 30)},
        "random": {"seed": st.integers(0, 2**63), "first": fits},
        "list": {"starts": st.lists(fits, min_size=1, max_size=6), "every": st.integers(1, 5), "end": st.sampled_from(ENDS)},
    }[name]
    return WINDOW_POLICIES[name], steps, size, {key: draw(values) for key, values in settings.items()}


@given(policy=policies(), iteration=st.integers(0, 10**6))
def test_every_window_is_whole_leaves_out_the_last_step_and_depends_on_the_iteration_alone(policy, iteration):
    formula, steps, size, settings = policy
    window = formula(iteration, steps, size, **settings)
    assert window.size == size and 0 <= window.start <= steps - 1 - size
    window.check(steps)
    assert formula(iteration, steps, size, **settings) == window


@given(policy=policies())
def test_a_walk_begins_at_its_start_and_moves_between_neighbouring_starts(policy):
    formula, steps, size, settings = policy
    if "stride" not in settings:
        return
    starts = starts_of(formula, 300, steps, size, **settings)
    assert starts[0] == settings["start"]
    moves = {b - a for a, b in zip(starts, starts[1:], strict=False)}
    back = starts[0] - (steps - 1 - size)
    assert all(abs(move) <= settings["stride"] or (settings["end"] == "wrap" and move == back) for move in moves)
    if settings["end"] == "hold":
        assert starts == sorted(starts)


def test_the_papers_progressive_window_holds_where_it_last_fits():
    starts = starts_of(progressive_window, 1000)
    assert runs(starts[:500]) == [(start, 25) for start in range(20)]
    assert set(starts[500:]) == {20}
    assert starts == [min(i // 25, 20) for i in range(1000)]


def test_progressive_ends():
    settings = dict(steps=8, size=2, start=1, stride=2, every=1)
    assert starts_of(progressive_window, 9, **settings, end="hold") == [1, 3, 5, 5, 5, 5, 5, 5, 5]
    assert starts_of(progressive_window, 9, **settings, end="wrap") == [1, 3, 5, 1, 3, 5, 1, 3, 5]
    assert starts_of(progressive_window, 9, **settings, end="bounce") == [1, 3, 5, 3, 1, 3, 5, 3, 1]
    assert starts_of(progressive_window, 5, 8, 2, start=5, every=1, end="bounce") == [5] * 5


def test_a_stride_that_does_not_divide_still_reaches_the_last_start():
    assert starts_of(progressive_window, 6, 12, 4, stride=4, every=1) == [0, 4, 7, 7, 7, 7]
    assert starts_of(progressive_window, 10, 25, 4, stride=4, every=1, end="wrap") == [0, 4, 8, 12, 16, 20, 0, 4, 8, 12]


@given(
    steps=st.integers(3, 30), start=st.integers(0, 5), size=st.integers(1, 6), stride=st.integers(0, 4), every=st.integers(1, 4)
)
def test_a_progressive_window_that_holds_is_its_closed_form(steps, start, size, stride, every):
    assume(start + size <= steps - 1)
    for i in range(60):
        expected = min(start + stride * (i // every), steps - 1 - size)
        assert progressive_window(i, steps, size, start=start, stride=stride, every=every) == Window(expected, size)


def test_linear_decay_has_the_published_stays():
    stays = [10, 9, 9, 8, 8, 8, 7, 7, 6, 6, 6, 5, 5, 4, 4, 4, 3, 3, 2, 2, 2]
    assert runs(starts_of(decaying_window, sum(stays))) == list(enumerate(stays))
    assert starts_of(decaying_window, sum(stays) + 50)[-50:] == [20] * 50


@given(reach=st.integers(1, 30), every=st.integers(1, 20), every_last=st.integers(1, 20))
def test_linear_decay_does_not_round_a_whole_number_down(reach, every, every_last):
    stays = [math.floor(every + Fraction((every_last - every) * start, reach)) for start in range(reach + 1)]
    found = starts_of(decaying_window, sum(stays), reach + 2, 1, every=every, every_last=every_last)
    assert runs(found) == list(enumerate(stays))


def test_exponential_decay_has_the_published_stays():
    stays = [25] * 14 + [23, 21, 19, 17, 16, 14, 13]
    assert runs(starts_of(exp_decaying_window, sum(stays))) == list(enumerate(stays))
    assert starts_of(exp_decaying_window, 3, every=1, rate=50.0, threshold=0) == [0, 1, 2]  # never less than one iteration


def test_bouncing_walks_back_with_each_starts_own_stay():
    starts = starts_of(decaying_window, 14, 5, 1, every=4, every_last=1, end="bounce")
    assert starts == [0] * 4 + [1] * 3 + [2] * 2 + [3] + [2] * 2 + [1] * 2


def test_the_frozen_window_stays():
    assert set(starts_of(frozen_window, 300, start=7)) == {7}
    assert set(starts_of(progressive_window, 300, start=7, stride=0)) == {7}


def test_a_random_window_is_even_over_its_range_and_another_for_another_seed():
    counts = Counter(starts_of(random_window, 21_000, seed=3))
    assert counts.keys() == set(range(21))
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in counts.values())
    assert starts_of(random_window, 50, seed=3) != starts_of(random_window, 50, seed=4)
    assert set(starts_of(random_window, 300, seed=3, first=2, last=5)) == {2, 3, 4, 5}


def test_a_random_window_is_the_same_in_every_process_and_version():
    assert starts_of(random_window, 12, seed=0) == [6, 0, 7, 13, 19, 15, 11, 6, 5, 9, 19, 15]


def test_listed_windows_come_in_turn():
    assert starts_of(listed_window, 7, starts=[3, 0, 20], every=2) == [3, 3, 0, 0, 20, 20, 3]
    assert starts_of(listed_window, 7, starts=[3, 0, 20], end="bounce") == [3, 0, 20, 0, 3, 0, 20]
    assert starts_of(listed_window, 4, starts=[3, 0], end="hold") == [3, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: frozen_window(0, 25, 4, start=21), "start \\+ size may be at most 24"),
        (lambda: frozen_window(0, 25, 25), "may be at most 24"),
        (lambda: frozen_window(0, 25, 0), "size of at least 1"),
        (lambda: frozen_window(-1, 25, 4), "iteration of at least 0"),
        (lambda: progressive_window(0, 25, 4, start=21), "may be at most 24"),
        (lambda: progressive_window(0, 25, 4, stride=-1), "stride of at least 0"),
        (lambda: progressive_window(0, 25, 4, every=0), "at least 1 iteration at every start, got 0"),
        (lambda: progressive_window(0, 25, 4, end="stop"), "hold, wrap or bounce, got 'stop'"),
        (lambda: decaying_window(0, 25, 1, every=10, every_last=0), "at least 1 iteration at every start, got 0"),
        (lambda: exp_decaying_window(0, 25, 4, rate=-0.1), "finite and at least 0, got -0.1"),
        (lambda: exp_decaying_window(0, 25, 4, rate=float("nan")), "finite and at least 0, got nan"),
        (lambda: random_window(0, 25, 4, seed=0, first=5, last=4), "nowhere to be"),
        (lambda: random_window(0, 25, 4, seed=0, last=21), "may be at most 24"),
        (lambda: random_window(0, 4, 4, seed=0), "nowhere to be"),
        (lambda: listed_window(0, 25, 4, starts=[]), "and 0 starts"),
        (lambda: listed_window(0, 25, 4, starts=[0, 21]), "may be at most 24"),
    ],
)
def test_what_would_be_no_window_is_refused(call, words):
    with pytest.raises(WindowError, match=words):
        call()
