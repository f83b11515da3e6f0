"""The prompt schedule: a pure function of seed and iteration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixgrpo.backend.train.prompts import prompt_rows


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2**63 - 1), st.integers(1, 40), st.integers(1, 25))
def test_every_pass_covers_every_prompt_once(seed, prompts, per_iteration):
    iterations = 1 + 3 * prompts // per_iteration
    row = [place for iteration in range(iterations) for place in prompt_rows(seed, iteration, prompts, per_iteration)]
    for start in range(0, len(row) - prompts + 1, prompts):
        assert sorted(row[start : start + prompts]) == list(range(prompts))


def test_the_row_of_prompts_does_not_depend_on_how_it_is_cut():
    whole = [place for iteration in range(12) for place in prompt_rows(7, iteration, 10, 2)]
    assert [place for iteration in range(4) for place in prompt_rows(7, iteration, 10, 6)] == whole


def test_a_continued_run_sees_what_the_uninterrupted_one_would():
    straight = [prompt_rows(1, iteration, 5, 3) for iteration in range(20)]
    assert [prompt_rows(1, iteration, 5, 3) for iteration in range(11, 20)] == straight[11:]


def test_passes_and_seeds_differ():
    passes = [tuple(prompt_rows(0, iteration, 12, 12)) for iteration in range(10)]
    assert len(set(passes)) == 10
    assert prompt_rows(0, 0, 12, 12) != prompt_rows(1, 0, 12, 12)


@pytest.mark.parametrize("per_iteration", [1, 7])
def test_one_prompt_is_always_the_same(per_iteration):
    assert prompt_rows(0, 3, 1, per_iteration) == [0] * per_iteration
