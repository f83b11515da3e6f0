"""Group advantages: ALGORITHM identity 14."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.advantages import (
    MIXINGS,
    AdvantageError,
    Advantages,
    best_and_worst,
    combine_advantages,
    combine_rewards,
    gdpo,
    group_advantages,
)
from mixgrpo.backend.flow.names import UnknownName

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


def test_every_reward_is_normalised_as_asked():
    r, q = rewards(seed=1), rewards(seed=2)
    for settings in ({"trim": 0.25, "clip": math.inf}, {"std": "global", "clip": math.inf}):
        expected = 0.5 * group_advantages(r, **settings).values + 0.5 * group_advantages(q, **settings).values
        mixed = combine_advantages({"r": r, "q": q}, {"r": 1, "q": 1}, **settings).values
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)


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


# ------------------------------------------------------------------ the other statistics


def test_one_std_for_all_groups_is_that_of_all_their_rewards():
    r = rewards()
    r[1] = 3 * r[1] + 10
    a = group_advantages(r, std="global").values
    torch.testing.assert_close(a, (r - r.mean(1, keepdim=True)) / r.std(), rtol=0, atol=1e-12)
    assert (a[1].std() / a[0].std()).item() == pytest.approx((r[1].std() / r[0].std()).item())


def test_failed_items_are_in_no_global_std():
    r = rewards()
    r[0, :3], r[2, 5] = NAN, math.inf
    a = group_advantages(r, std="global").values
    finite = r[r.isfinite()]
    assert a[1, 4].item() == pytest.approx(((r[1, 4] - r[1].mean()) / finite.std()).item(), abs=1e-12)
    assert a[0, :3].eq(0).all() and a[2, 5] == 0 and a.isfinite().all()


def test_a_constant_group_is_flat_under_the_global_std_too():
    r = rewards(3)
    r[1] = 7.0
    a = group_advantages(r, std="global")
    assert a.flat.tolist() == [False, True, False] and a.values[1].eq(0).all()
    r[:] = 7.0
    assert group_advantages(r, std="global").flat.all()


def test_a_batch_below_the_floor_is_flat_though_a_group_is_not():
    r = torch.zeros(5, 12, dtype=torch.float64)
    r[0] = rewards(1)
    between = (r.std() + r[0].std()).item() / 2
    assert r.std() < between < r[0].std()
    assert group_advantages(r, std_floor=between, std="global").flat.all()
    assert group_advantages(r, std_floor=between).flat.tolist() == [False, True, True, True, True]


def test_trimmed_statistics_leave_out_the_lowest_and_judge_all():
    r = rewards()
    lowest = r.argsort(1)[:, :3]
    rest = torch.stack([row[[i for i in range(12) if i not in out.tolist()]] for row, out in zip(r, lowest, strict=True)])
    a = group_advantages(r, trim=0.25, clip=math.inf).values
    expected = (r - rest.mean(1, keepdim=True)) / rest.std(1, keepdim=True)
    torch.testing.assert_close(a, expected, rtol=0, atol=1e-12)
    assert a.gather(1, lowest).ne(0).all()
    for share in (0.2, 0.24999):  # floor(2.4), floor(2.99…)
        assert not torch.equal(group_advantages(r, trim=share).values, a)
    torch.testing.assert_close(group_advantages(r, trim=0.17).values, group_advantages(r, trim=0.24).values, rtol=0, atol=0)


def test_what_is_trimmed_is_a_share_of_what_has_not_failed():
    r = torch.tensor([[NAN, 4.0, 1.0, 3.0, 2.0, math.inf]], dtype=torch.float64)
    a = group_advantages(r, trim=0.25).values  # of four, one: the 1
    std = 1.0  # of 2, 3, 4
    assert a.tolist() == [[0.0, pytest.approx(1 / std), pytest.approx(-2 / std), pytest.approx(0), pytest.approx(-1 / std), 0.0]]
    two_left = group_advantages(r, trim=0.99).values
    assert two_left[0, 1].item() == pytest.approx(0.5 / math.sqrt(0.5))


@pytest.mark.parametrize("trim", [-0.1, 1.0, NAN])
def test_a_share_that_leaves_nothing_is_refused(trim):
    with pytest.raises(AdvantageError, match=r"lies in \[0, 1\)"):
        group_advantages(rewards(), trim=trim)


def test_an_unknown_std_is_refused():
    with pytest.raises(UnknownName, match="choose one of group, global"):
        group_advantages(rewards(), std="batch")


# ------------------------------------------------------------------ several rewards


def test_mixing_rewards_is_not_mixing_advantages():
    r, q = rewards(seed=1), 100 * rewards(seed=2)
    mixed = combine_rewards({"r": r, "q": q}, {"r": 3, "q": 1}).values
    torch.testing.assert_close(mixed, group_advantages(0.75 * r + 0.25 * q).values, rtol=0, atol=1e-12)
    other_unit = combine_rewards({"r": 1000 * r, "q": q}, {"r": 3, "q": 1}).values
    assert (mixed - other_unit).abs().max() > 0.5
    assert torch.corrcoef(torch.stack([mixed[0], q[0]]))[0, 1] > 0.99  # the wide one decides


@pytest.mark.parametrize("failure", [NAN, math.inf, -math.inf])
def test_a_sum_of_rewards_fails_where_one_of_them_does(failure):
    r, q = rewards(seed=1), rewards(seed=2)
    whole = group_advantages((0.5 * r + 0.5 * q)[:, 1:]).values
    r[0, 0], q[1, 0] = failure, -failure
    mixed = combine_rewards({"r": r, "q": q}, {"r": 1, "q": 1})
    assert mixed.failed.nonzero().tolist() == [[0, 0], [1, 0]] and mixed.values[:2, 0].eq(0).all()
    torch.testing.assert_close(mixed.values[:2, 1:], whole[:2], rtol=0, atol=1e-12)


def test_gdpo_normalises_the_sum_over_the_batch():
    r, q = rewards(seed=1), 50 * rewards(seed=2) + 3
    summed = combine_advantages({"r": r, "q": q}, {"r": 1, "q": 3}, clip=math.inf).values
    ours = gdpo({"r": r, "q": q}, {"r": 1, "q": 3}, clip=math.inf).values
    torch.testing.assert_close(ours, (summed - summed.mean()) / summed.std(), rtol=0, atol=1e-12)
    assert ours.std().item() == pytest.approx(1) and summed.std().item() < 0.9
    one_unit = gdpo({"r": 7 * r, "q": q}, {"r": 1, "q": 3}, clip=math.inf).values
    torch.testing.assert_close(one_unit, ours, rtol=0, atol=1e-9)


def test_gdpo_keeps_flat_groups_and_failed_items_out_of_the_batch():
    r, q = rewards(4, seed=1), rewards(4, seed=2)
    r[1], q[1] = 2.0, 5.0
    r[2, 4], q[2, 4] = NAN, math.inf
    r[3, 0] = NAN  # the other reward still judges it
    mixed = gdpo({"r": r, "q": q}, {"r": 1, "q": 1}, clip=math.inf)
    assert mixed.flat.tolist() == [False, True, False, False]
    assert mixed.values[1].eq(0).all() and mixed.values[2, 4] == 0 and mixed.values[3, 0] != 0
    live = torch.ones(4, 12, dtype=torch.bool)
    live[1], live[2, 4] = False, False
    assert mixed.values[live].mean().item() == pytest.approx(0, abs=1e-12)
    assert mixed.values[live].std().item() == pytest.approx(1)


def test_gdpo_makes_no_advantage_of_rewards_that_cancel():
    r = rewards()
    mixed = gdpo({"r": r, "against": 1e-9 * rewards(seed=3) - r}, {"r": 1, "against": 1})  # a sum of rounding, not of judgements
    assert mixed.values.eq(0).all() and not mixed.flat.any()


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("settings", [{}, {"std": "global"}, {"trim": 0.25}, {"std_floor": 1e-3, "clip": 1.5}])
def test_nothing_but_finite_numbers_comes_out_whatever_has_failed(mixing, settings):
    r, q = rewards(6, seed=1).float(), rewards(6, seed=2).float()
    r[0], q[1], r[2, 1:], q[2, 1:], q[3, 2] = NAN, math.inf, NAN, -math.inf, NAN
    r[4], q[4] = 0.1, 0.2
    mixed = MIXINGS[mixing]({"r": r, "q": q}, {"r": 2, "q": 1}, **settings)
    assert mixed.values.isfinite().all() and mixed.values.dtype == torch.float32
    assert mixed.values.abs().max() <= settings.get("clip", 5.0)
    assert mixed.flat[[2, 4]].all() and mixed.values[mixed.flat].eq(0).all()
    assert not mixed.flat[[3, 5]].any() and mixed.values[5].ne(0).all()
    nothing = MIXINGS[mixing]({"r": r * NAN, "q": q * NAN}, {"r": 2, "q": 1}, **settings)
    assert nothing.values.eq(0).all() and nothing.flat.all() and nothing.failed.all()


@pytest.mark.parametrize("mixing", MIXINGS)
def test_weights_are_checked_by_every_mixing(mixing):
    with pytest.raises(AdvantageError, match="not all 0"):
        MIXINGS[mixing]({"r": rewards()}, {"r": 0.0})


def test_the_groups_of_a_rank_are_a_part_of_the_batch():
    a = combine_advantages({"r": rewards()}, {"r": 1})
    part = a.of(slice(2, 4))
    assert torch.equal(part.values, a.values[2:4]) and part.failed.shape == (2, 12) and part.flat.shape == (2,)


# ------------------------------------------------------------------ who is trained


def judged(values, failed=()):
    values = torch.tensor([values], dtype=torch.float64)
    bad = torch.zeros_like(values, dtype=torch.bool)
    bad[0, list(failed)] = True
    return Advantages(values, bad, torch.tensor([False]))


def test_the_best_and_the_worst_are_taken_in_their_order():
    values = judged([0.1, -2.0, 3.0, 0.2, -0.1, 1.0])
    assert best_and_worst(values, 2).tolist() == [[1, 2]]
    assert best_and_worst(values, 4).tolist() == [[1, 2, 4, 5]]
    assert best_and_worst(values, 6).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_every_group_has_its_own_best_and_worst():
    r = rewards()
    kept = best_and_worst(group_advantages(r), 4)
    rising = r.argsort(1)
    assert kept.shape == (5, 4) and kept.dtype == torch.int64
    for row, order in zip(kept, rising, strict=True):
        assert set(row.tolist()) == {*order[:2].tolist(), *order[-2:].tolist()}


def test_a_failed_member_is_neither_best_nor_worst_but_fills_up():
    values = judged([0.0, -2.0, 0.5, 0.7, 0.0, 0.8], failed=[0, 4])
    assert best_and_worst(values, 4).tolist() == [[1, 2, 3, 5]]
    assert best_and_worst(values, 6).tolist() == [[0, 1, 2, 3, 4, 5]]
    only_one = judged([0.0, 0.0, 0.0, 1.0], failed=[0, 1, 2])
    assert best_and_worst(only_one, 2).shape == (1, 2) and 3 in best_and_worst(only_one, 2)[0]
    assert best_and_worst(judged([0.0] * 4, failed=range(4)), 2).shape == (1, 2)


@pytest.mark.parametrize("n", [0, 1, 3, 5, 14, -2])
def test_an_uneven_or_too_large_choice_is_refused(n):
    with pytest.raises(AdvantageError, match="even number from 2 to 12"):
        best_and_worst(group_advantages(rewards()), n)
