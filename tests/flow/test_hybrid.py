"""Hybrid inference: a share of 0 is the base model and 1 the trained one, bit for bit; between them the paper's boundaries."""

import math

import pytest
import torch

from mixgrpo.backend.flow.hybrid import hybrid_boundary, hybrid_velocity
from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.plan import FLASH, MIXGRPO, PlanError, SamplingMode
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import dynamic_shift, shifted_sigmas
from mixgrpo.backend.flow.window import Window

TABLE = shifted_sigmas(10, 3.0)


def trained(x, sigma):
    return torch.tanh(x + sigma)


def base(x, sigma):
    return torch.sin(2 * x) - sigma


def ended(velocity, table=TABLE, mode=MIXGRPO, dtype=torch.float32):
    x = initial_noise(0, (3, 4, 4)).to(dtype)
    return rollout(velocity, x, table, Window(0, 0), 0.0, lambda step: None, 1, mode=mode).final


@pytest.mark.parametrize("mode", [MIXGRPO, FLASH, SamplingMode(solver="heun"), SamplingMode(solver="dpmpp_3m")])
@pytest.mark.parametrize("table", [TABLE, TABLE.float(), TABLE[2:7]], ids=["64", "32", "part"])
def test_a_share_of_0_is_base_and_1_is_trained_bit_for_bit(mode, table):
    if table[-1] > 0:
        mode = SamplingMode(solver=mode.solver)
    for share, model in ((0.0, base), (1.0, trained)):
        assert torch.equal(ended(hybrid_velocity(trained, base, table, share), table, mode), ended(model, table, mode))


@pytest.mark.parametrize(
    ("steps", "share", "first_of_base", "boundary"),
    [(50, 0.6, 30, 0.678), (50, 0.8, 40, 0.441), (28, 0.6, 17, 0.671), (28, 0.8, 22, 0.463)],
)
def test_the_published_boundaries_at_1024_pixels(steps, share, first_of_base, boundary):
    table = shifted_sigmas(steps, dynamic_shift(4096))
    assert hybrid_boundary(table, share) == table[first_of_base].item() == pytest.approx(boundary, abs=6e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("table", [shifted_sigmas(25, 3.0), shifted_sigmas(25, 3.0).float()], ids=["64", "32"])
@pytest.mark.parametrize("share", [0.04, 0.2, 0.48, 0.6, 0.8, 0.96])
def test_the_first_steps_are_the_trained_models_and_the_rest_the_bases(dtype, table, share):
    asked = []

    def said_by(name):
        return lambda x, sigma: asked.append(name) or -x

    ended(hybrid_velocity(said_by("trained"), said_by("base"), table, share), table, dtype=dtype)
    taken = round(share * 25)
    assert asked == ["trained"] * taken + ["base"] * (25 - taken)


def test_shares_of_0_and_1_hold_for_another_table_too():
    assert hybrid_boundary(TABLE[3:], 0.0) == math.inf and hybrid_boundary(TABLE[3:7], 1.0) == -math.inf


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(PlanError, match="between 0 and 1"):
        hybrid_boundary(TABLE, share)
