"""Group advantages: ALGORITHM identity 14."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.advantages import AdvantageError, combine_advantages, group_advantages

NAN = float("nan")


def rewards(groups=5, size=12, seed=0):
    return torch.randn(groups, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 2**31), size=st.integers(2, 26), scale=st.floats(0.01, 1e4), shift=st.floats(-1e3, 1e3))
def test_groups_have_mean_0_and_std_1_whatever_the_unit_of_the_reward(seed, size, scale, shift):
    r = rewards(3, size, seed)
    a = group_advantages(r).values
    torch.testing.assert_close(a.mean(1), torch.zeros(3, dtype=a.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(a.std(1), torch.ones(3, dtype=a.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(group_advantages(scale * r + shift).values, a, rtol=0, atol=1e-7)


def test_a_group_is_compared_with_itself_only():
    r = rewards()
    r[1] += 100
    torch.testing.assert_close(group_advantages(r).values[[0, 2]], group_advantages(r[[0, 2]]).values, rtol=0, atol=0)


@pytest.mark.parametrize(("size", "largest"), [(12, 3.1754), (24, 4.6949), (27, 5.0), (40, 5.0)])
def test_the_clip_is_reached_by_groups_of_27_or_more(size, largest):
    one_best = torch.zeros(1, size, dtype=torch.float64)
    one_best[0, 3] = 1
    assert group_advantages(one_best).values.max().item() == pytest.approx(largest, abs=1e-4)
    assert group_advantages(one_best, clip=math.inf).values.max().item() == pytest.approx((size - 1) / math.sqrt(size))


@pytest.mark.parametrize("constant", [0.0, 0.3, 1234.567, -1e6])
def test_a_constant_group_teaches_nothing_and_is_reported(constant):
    r = rewards(2).float()
    r[1] = constant
    a = group_advantages(r)
    assert a.flat.tolist() == [False, True]
    assert a.values[1].eq(0).all() and a.values.dtype == torch.float32


def test_rounding_is_not_made_an_advantage():
    r = 0.3 + 1e-8 * rewards(1)
    assert group_advantages(r).flat.all() and group_advantages(r).values.eq(0).all()
    assert not group_advantages(r, std_floor=1e-12).flat.any()


@pytest.mark.parametrize("failure", [NAN, float("inf"), float("-inf")])
def test_a_failed_item_is_left_out_and_gets_0(failure):
    r = rewards()
    whole = group_advantages(r[:, 1:]).values
    r[:, 0] = failure
    a = group_advantages(r)
    assert a.values[:, 0].eq(0).all()
    torch.testing.assert_close(a.values[:, 1:], whole, rtol=0, atol=1e-12)
    assert a.failed[:, 0].all() and not a.failed[:, 1:].any() and not a.flat.any()


@pytest.mark.parametrize("left", [[], [2.0]])
def test_a_group_with_no_two_items_left_is_flat(left):
    r = torch.tensor([left + [NAN] * (4 - len(left)), [1.0, 2.0, 3.0, 4.0]])
    a = group_advantages(r)
    assert a.flat.tolist() == [True, False]
    assert a.values[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 3, 4)])
def test_rewards_without_anything_to_compare_are_refused(shape):
    with pytest.raises(AdvantageError, match="at least 2 samples"):
        group_advantages(torch.zeros(shape))


def test_one_reward_under_several_names_is_that_reward():
    r = rewards()
    mixed = combine_advantages({"a": r, "b": r, "c": r}, {"a": 1.0, "b": 1.0, "c": 1.0}).values
    torch.testing.assert_close(mixed, group_advantages(r).values, rtol=0, atol=1e-12)


def test_weights_are_normalised_and_spread_has_no_say():
    r, q = rewards(seed=1), rewards(seed=2)
    expected = 0.25 * group_advantages(r).values + 0.75 * group_advantages(q).values
    torch.testing.assert_close(combine_advantages({"r": r, "q": q}, {"r": 2, "q": 6}).values, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        combine_advantages({"r": 1000 * r - 5, "q": q}, {"r": 1, "q": 3}).values, expected, rtol=0, atol=1e-12
    )


def test_the_clip_comes_after_the_sum():
    r = torch.zeros(1, 64, dtype=torch.float64)
    r[0, 0] = 1  # alone 7.875, so a clip before the sum would give (5 - 0.125) / 2
    mixed = combine_advantages({"r": r, "against": -r}, {"r": 3, "against": 1}).values
    assert mixed[0, 0].item() == pytest.approx((63 / 8) * 0.5)


def test_a_failure_in_one_reward_leaves_the_others_say():
    r, q = rewards(seed=1), rewards(seed=2)
    r[0, 3] = NAN
    mixed = combine_advantages({"r": r, "q": q}, {"r": 1, "q": 1})
    assert mixed.values[0, 3] == pytest.approx(0.5 * group_advantages(q).values[0, 3].item())
    assert mixed.failed.nonzero().tolist() == [[0, 3]]


def test_a_group_is_flat_when_every_reward_is():
    r, q = rewards(2, seed=1), rewards(2, seed=2)
    r[:] = 1
    q[0] = 1
    assert combine_advantages({"r": r, "q": q}, {"r": 1, "q": 1}).flat.tolist() == [True, False]


def test_a_reward_of_weight_0_is_shown_but_not_followed():
    r, q = rewards(seed=1), rewards(seed=2)
    q[:] = NAN
    mixed = combine_advantages({"r": r, "q": q}, {"r": 1, "q": 0})
    torch.testing.assert_close(mixed.values, group_advantages(r).values, rtol=0, atol=1e-12)
    assert not mixed.failed.any() and not mixed.flat.any()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"r": 1.0}, "one weight"),
        ({"r": 1.0, "q": 1.0, "s": 1.0}, "one weight"),
        ({"r": 1.0, "q": -1.0}, "at least 0"),
        ({"r": 1.0, "q": NAN}, "finite"),
        ({"r": 0.0, "q": 0.0}, "not all 0"),
    ],
)
def test_weights_that_make_no_mixture_are_refused(weights, words):
    with pytest.raises(AdvantageError, match=words):
        combine_advantages({"r": rewards(), "q": rewards()}, weights)
