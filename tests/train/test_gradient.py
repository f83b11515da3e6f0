"""The adapter's gradient: through both branches of guidance, equal to slopes, and independent of how calls are cut."""

import pytest
import torch
from training_jobs import job
from two_ranks import trained_before

from mixgrpo.backend.flow.dynamics import log_prob, sde_mean
from mixgrpo.backend.models.base import take
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.trainer import Trainer

EXACT = {
    "model": {"precision": "float64"},
    "group_size": 4,
    "prompts_per_iteration": 2,
    "optimizer": {"updates_per_rollout": 2},
    "sampling": {"guidance": 2.5, "window": {"start": 1, "size": 2}},
}


def continued(**changes):
    """A trainer whose adapter does something already, in float64."""
    spec = job(**EXACT | changes)
    return Trainer(spec, Ranks.join(), trained_before(spec))


def gradient(one, batch, members):
    one.optimizer.zero_grad()
    one.accumulate(batch, members)
    return torch.cat([parameter.grad.flatten() for parameter in one.parameters.values()])


def explicit_loss(one, batch, members, prompt_branch=True, negative_branch=True):
    """The objective written out sample by sample, the two branches as two model calls, no step shared by a group."""
    trajectory, spec, total = batch.trajectory, one.spec, 0.0
    for index, step in enumerate(trajectory.window.steps):
        sigma, k = trajectory.sigmas.double()[step], trajectory.coefficients(index)
        for row in members.tolist():
            group = row // spec.group_size
            x = trajectory.states[index][group if index == 0 else row][None]
            prompt = take(one.conditions, batch.prompts[group : group + 1])
            v_prompt, v_negative = (one.model.velocity(x, sigma, conditions) for conditions in (prompt, one.negative))
            v_prompt = v_prompt if prompt_branch else v_prompt.detach()
            v_negative = v_negative if negative_branch else v_negative.detach()
            velocity = v_negative + spec.sampling.guidance * (v_prompt - v_negative)
            new = log_prob(trajectory.states[index + 1][row][None], sde_mean(x, velocity, k), k.s)[0]
            ratio = (new - trajectory.log_probs[index][row]).exp()
            advantage = batch.advantages.values.flatten()[row].double()
            held = ratio.clamp(1 - spec.optimizer.clip_range, 1 + spec.optimizer.clip_range)
            total = total + torch.maximum(-advantage * ratio, -advantage * held)
    return total / (len(members) * len(trajectory.means))


def explicit_gradient(one, *args, **branches):
    loss = explicit_loss(one, *args, **branches)
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(one.parameters.values()))])


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_the_gradient_flows_through_both_branches_of_guidance():
    one = continued()
    batch = one.collect()
    members = one.members(batch, 1)
    ours = gradient(one, batch, members)
    assert relative(ours, explicit_gradient(one, batch, members)) <= 1e-10
    for missing in ("prompt_branch", "negative_branch"):  # the comparison would see a branch cut off
        assert relative(ours, explicit_gradient(one, batch, members, **{missing: False})) > 1e-2


def test_the_gradient_is_the_slope_of_the_objective():
    one = continued()
    batch = one.collect()
    members = one.members(batch, 0)
    slope = gradient(one, batch, members)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(parameter.shape, generator=generator).double() for parameter in one.parameters.values()]

    @torch.no_grad()
    def moved(step):
        for parameter, direction in zip(one.parameters.values(), directions, strict=True):
            parameter += step * direction

    def objective(step):
        moved(step)
        with torch.no_grad():
            value = explicit_loss(one, batch, members).item()
        moved(-step)
        return value

    step = 1e-7  # inside the clip range, where the objective is smooth
    measured = (objective(step) - objective(-step)) / (2 * step)
    predicted = sum((part * whole.flatten()).sum() for part, whole in _pairs(slope, directions)).item()
    assert measured == pytest.approx(predicted, rel=1e-5)


def _pairs(flat, tensors):
    return zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)


@pytest.mark.parametrize("shared", [True, False])
def test_how_calls_are_cut_does_not_change_the_gradient(shared):
    changes = {"sampling": EXACT["sampling"] | {"shared_noise": shared}}
    whole = continued(**changes)
    batch = whole.collect()
    expected = gradient(whole, batch, whole.members(batch, 0))
    for rows_per_call in (1, 3, 5):
        cut = continued(rows_per_call=rows_per_call, **changes)
        again = cut.collect()
        assert relative(gradient(cut, again, cut.members(again, 0)), expected) <= 1e-10


def test_updates_share_the_samples_out_equally():
    one = continued(group_size=6, optimizer={"updates_per_rollout": 3})
    batch = one.collect()
    parts = [one.members(batch, number).tolist() for number in range(3)]
    assert sorted(sum(parts, [])) == list(range(12))
    assert all([row // 6 for row in part] == [0, 0, 1, 1] for part in parts)


def test_the_gradients_of_the_updates_average_to_that_of_the_whole():
    one = continued()
    batch = one.collect()
    parts = [gradient(one, batch, one.members(batch, number)) for number in range(2)]
    whole = gradient(one, batch, torch.arange(8))
    assert relative((parts[0] + parts[1]) / 2, whole) <= 1e-10


def test_frozen_weights_get_no_gradient_and_keep_their_bits():
    one = continued()
    frozen = {name: value for name, value in one.model.transformer.named_parameters() if ".lora_" not in name}
    before = {name: value.clone() for name, value in frozen.items()}
    one.train_iteration()
    assert all(value.grad is None and not value.requires_grad for value in frozen.values())
    assert all(torch.equal(value, before[name]) for name, value in frozen.items())
    assert {parameter.dtype for parameter in one.parameters.values()} == {torch.float64}
