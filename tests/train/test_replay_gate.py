"""The replay gate: a training pass that is not the rollout's stops the run before the first update."""

import dataclasses
import math

import pytest
import torch
from training_jobs import job, run, trainer

from mixgrpo.backend.flow.objective import FLOAT32_LIMIT, ReplayMismatch
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.trainer import TrainingError

GUIDED = {"group_size": 4, "sampling": {"guidance": 2.0}, "optimizer": {"updates_per_rollout": 2}}


def a_sigma(one, batch):
    """The table between rollout and training pass: one entry of the window off by a thousandth."""
    sigmas = batch.trajectory.sigmas.clone()
    sigmas[1] += 1e-3
    return dataclasses.replace(batch, trajectory=dataclasses.replace(batch.trajectory, sigmas=sigmas))


def the_guidance(one, batch):
    batch.velocity.guidance = 2.01
    return batch


def the_dtype(one, batch):
    one.model.autocast = torch.bfloat16
    return batch


def a_prompt(one, batch):
    return dataclasses.replace(batch, prompts=(batch.prompts + 1) % 3)


def the_adapter(one, batch):
    with torch.no_grad():
        for name, parameter in one.parameters.items():
            parameter.add_(0.01 if "lora_B" in name else 0)
    return batch


def a_stored_state(one, batch):
    """Of a sample that is not among the first update's members: the gate looks at all of them."""
    states = [state.clone() for state in batch.trajectory.states]
    assert 3 not in one.members(batch, 0)
    states[1][3] += 0.01
    return dataclasses.replace(batch, trajectory=dataclasses.replace(batch.trajectory, states=states))


CORRUPTIONS = [a_sigma, the_guidance, the_dtype, a_prompt, the_adapter, a_stored_state]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_a_corrupted_replay_stops_before_the_first_update(corrupt, monkeypatch):
    one = trainer(**GUIDED)
    before = adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer))
    collect = one.collect
    monkeypatch.setattr(one, "collect", lambda: corrupt(one, collect()))
    with pytest.raises(ReplayMismatch, match="the training pass does not repeat the rollout: .* before any update") as stopped:
        one.train_iteration()
    assert any(way_out in str(stopped.value) for way_out in ("must be the rollout's", "same autocast in both passes"))
    assert one.iteration == 0 and not one.optimizer.state
    if corrupt is not the_adapter:
        assert adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer)) == before


@pytest.mark.parametrize("corrupt", [a_sigma, the_guidance, the_dtype])
def test_the_gate_stands_in_every_iteration(corrupt, monkeypatch):
    one = trainer(**GUIDED)
    one.train_iteration()
    before = adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer))
    collect = one.collect
    monkeypatch.setattr(one, "collect", lambda: corrupt(one, collect()))
    with pytest.raises(ReplayMismatch):
        one.train_iteration()
    assert one.iteration == 1 and adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer)) == before


def test_a_healthy_run_logs_its_gaps(tmp_path):
    events = run(tmp_path, job(**GUIDED))
    assert ["replay_gate" in event for event in events] == [True, False]  # the whole rollout once per process
    for gaps in (events[0]["replay_gate"], *(event["replay"] for event in events)):
        assert gaps.keys() == {"mean_gap", "log_prob_gap"} and all(0 <= gap <= FLOAT32_LIMIT for gap in gaps.values())


def test_the_first_update_begins_at_a_ratio_of_one():
    """The gap logged for an iteration is the first update's; the ratio moves only with the updates after it."""
    one = trainer(**GUIDED)
    batch = one.collect()
    first, second = one.update(batch, 0), one.update(batch, 1)
    assert first["ratio_deviation"] <= FLOAT32_LIMIT and first["mean_gap"] <= FLOAT32_LIMIT
    assert second["mean_gap"] > FLOAT32_LIMIT


def test_bfloat16_trains_while_its_rounding_is_far_inside_the_clip_range():
    """The adapter stays in float32; |d log p|, not the mean, decides, and the limit is a quarter of the clip range."""
    one = trainer(**GUIDED | {"model": {"precision": "bfloat16"}, "optimizer": {"clip_range": 1e-2}})
    rough, fine = one.collect().trajectory.final, trainer(**GUIDED).collect().trajectory.final
    numbers = one.train_iteration()
    assert numbers["replay"]["log_prob_gap"] <= 1e-2 / 4 and numbers["gradient_norm"] > 0
    assert {parameter.dtype for parameter in one.parameters.values()} == {torch.float32}
    assert 1e-4 < (rough - fine).norm() / fine.norm() < 0.1  # it did compute in bfloat16


def test_bfloat16_stops_when_its_rounding_eats_the_clip_range(monkeypatch):
    """Rounding made visible: the training pass sees one row in the place of the rollout's, a rounding of bfloat16 away."""
    one = trainer(**GUIDED | {"model": {"precision": "bfloat16"}, "optimizer": {"clip_range": 1e-6}})

    def rounded(batch):
        states = [state.bfloat16().float() for state in batch.trajectory.states]
        return dataclasses.replace(batch, trajectory=dataclasses.replace(batch.trajectory, states=states))

    collect = one.collect
    monkeypatch.setattr(one, "collect", lambda: rounded(collect()))
    with pytest.raises(ReplayMismatch, match="bfloat16 allows .d log p. a quarter of the clip range, 2.5e-07.* train in float32"):
        one.train_iteration()


def test_a_model_that_returns_nan_is_named_before_anything_is_scored():
    one = trainer()
    with torch.no_grad():
        next(iter(one.parameters.values())).fill_(math.nan)
    with pytest.raises(TrainingError, match="the model returned NaN or infinity in iteration 1; lower the learning rate"):
        one.train_iteration()
