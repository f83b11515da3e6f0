"""Noise is ComfyUI's at the start and, at a step, a function of (seed, sample, step) and of nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixgrpo.backend.flow.noise import NoiseError, derive_seed, initial_noise, step_noise

seeds = st.integers(0, 2**64 - 1)
SHAPE = (16, 8, 8)
STEP_NOISE_1_A2_3 = [-1.521969, -0.325774, 1.181903, 1.017474]


@given(seed=seeds, rows=st.integers(1, 4))
def test_initial_noise_is_one_cpu_stream_for_the_batch_as_torch_draws_it(seed, rows):
    expected = torch.randn((rows, *SHAPE), generator=torch.manual_seed(seed), device="cpu")
    assert torch.equal(initial_noise(seed, (rows, *SHAPE)), expected)


@given(seed=seeds, indices=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_batch_index_picks_rows_of_a_stream_drawn_row_by_row(seed, indices):
    torch.manual_seed(seed)
    stream = [torch.randn(1, 3, 5) for _ in range(7)]
    drawn = initial_noise(seed, (len(indices), 3, 5), indices)
    assert torch.equal(drawn, torch.cat([stream[i] for i in indices]))


def test_a_row_drawn_alone_by_its_index_is_the_row_of_the_batch():
    assert torch.equal(initial_noise(7, (1, *SHAPE), [2]), initial_noise(7, (4, *SHAPE))[2:3])


def test_initial_noise_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    initial_noise(7, (2, *SHAPE))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(NoiseError, match="between 0 and"):
        initial_noise(seed, (1, 4))


@pytest.mark.parametrize("indices", [[0], [0, -1], []])
def test_batch_indices_that_do_not_fit_the_rows_are_refused(indices):
    with pytest.raises(NoiseError, match="one index of at least 0 for each of 2 rows"):
        initial_noise(0, (2, 4), indices)


@given(ids=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), seed=seeds, step=st.integers(0, 99))
def test_step_noise_of_a_sample_does_not_depend_on_its_batch(ids, seed, step):
    together = step_noise(seed, ids, step, SHAPE)
    assert together.dtype == torch.float32 and together.shape == (len(ids), *SHAPE)
    assert torch.equal(together, torch.cat([step_noise(seed, [one], step, SHAPE) for one in ids]))


def test_step_noise_differs_in_every_seed_sample_and_step():
    keys = list(itertools.product((0, 1, 2**32), (0, 1, "0", "a"), (0, 1)))
    rows = [step_noise(seed, [one], step, SHAPE).flatten() for seed, one, step in keys]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(keys))
    assert correlation.abs().max() < 6 / len(rows[0]) ** 0.5


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1])
def test_step_noise_is_never_the_initial_noise(seed):
    start = initial_noise(seed, (1, *SHAPE)).flatten()
    for step in range(25):
        assert torch.corrcoef(torch.stack([start, step_noise(seed, [0], step, SHAPE).flatten()]))[0, 1].abs() < 0.2


def test_step_noise_is_standard_normal():
    z = step_noise(3, range(50), 4, (40, 50)).flatten().double()
    below = torch.arange(len(z)) / len(z)
    assert (torch.special.ndtr(z.sort().values) - below).abs().max() < 1.63 / len(z) ** 0.5  # Kolmogorov-Smirnov at 1 %
    assert z.isfinite().all() and z.abs().max() > 4


def test_step_noise_stays_what_it_was():
    assert step_noise(1, ["a", 2], 3, (2,)).flatten().tolist() == pytest.approx(STEP_NOISE_1_A2_3, abs=1e-6)


parts = st.lists(st.integers(-99, 2**70) | st.text('",[] 01a', max_size=3), max_size=4)


@given(a=parts, b=parts)
def test_derived_seeds_fit_63_bits_and_differ_where_their_parts_do(a, b):
    assert 0 <= derive_seed(*a) < 2**63
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)


def test_derived_seeds_tell_a_number_from_its_name_and_a_pair_from_its_join():
    assert len({derive_seed(1, 2), derive_seed("1", 2), derive_seed("1,2"), derive_seed(12)}) == 4
