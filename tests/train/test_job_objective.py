"""The objective's settings in a job: what reaches the gradient, who is trained, what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_gradient import EXACT, relative
from training_jobs import job, run, trainer
from two_ranks import trained_before

from mixgrpo.backend.flow.advantages import MIXINGS
from mixgrpo.backend.flow.dynamics import LOG_PROBS, sde_mean
from mixgrpo.backend.flow.window import WindowError, some_steps
from mixgrpo.backend.models.base import take
from mixgrpo.backend.models.families import load_model
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.trainer import Trainer

TWO = [{"scorer": "jpeg_compressibility", "weight": 3}, {"scorer": "scene_accuracy", "options": {"partial": True}}]


def continued(**changes: Any) -> Trainer:
    """A trainer in float64 whose adapter does something already."""
    spec = job(**EXACT | changes)
    return Trainer(spec, Ranks.join(), trained_before(spec))


def moved(one: Trainer, size: float = 3e-3) -> Trainer:
    """The same after something like an update, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in sorted(one.parameters.items()):
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return one


def gradient(one, batch, members):
    one.optimizer.zero_grad()
    numbers = one.accumulate(batch, members)
    return torch.cat([parameter.grad.flatten() for parameter in one.parameters.values()]), numbers


class Written:
    """The objective written out sample by sample, against a base model that was loaded on its own and never had an adapter."""

    def __init__(self, one: Trainer, batch):
        self.one, self.batch, self.base = one, batch, load_model(one.spec.model, torch.device("cpu"))

    def velocity(self, model, x, sigma, group):
        one = self.one
        prompt = take(one.conditions, self.batch.prompts[group : group + 1])
        v_prompt, v_negative = (model.velocity(x, sigma, conditions) for conditions in (prompt, one.negative))
        return v_negative + one.spec.sampling.guidance * (v_prompt - v_negative)

    def loss(self, members, steps, low, high, weight, kl=0.0, space=None):
        """``weight`` and ``space`` are functions of a step's coefficients."""
        trajectory, spec, total = self.batch.trajectory, self.one.spec, 0.0
        scale = LOG_PROBS[spec.sampling.mode.log_prob]
        for index in steps:
            sigma, k = trajectory.sigma(index).double(), trajectory.coefficients(index)
            for row in members.tolist():
                group = row // spec.group_size
                x = trajectory.states[index][group if index == 0 else row][None]
                v = self.velocity(self.one.model, x, sigma, group)
                after, old = trajectory.states[index + 1][row][None], trajectory.means[index][row][None]
                ratio = (scale(after, sde_mean(x, v, k), old, k.s)[0] - trajectory.log_probs[index][row]).exp()
                advantage = self.batch.advantages.values.flatten()[row].double()
                policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
                total = total + weight(k) * policy
                if kl:
                    with torch.no_grad():
                        base = self.velocity(self.base, x, sigma, group)
                    total = total + kl * space(k) * (v - base).square().mean()
        return total / (len(members) * len(steps))

    def gradient(self, *args, **settings):
        loss = self.loss(*args, **settings)
        parts = torch.autograd.grad(loss, list(self.one.parameters.values()))
        return torch.cat([part.flatten() for part in parts]), loss.item()


def gain(k):
    return k.c * (1 - k.sigma) - (1 - k.sigma_next) * k.sigma


@pytest.mark.parametrize(
    ("space", "weight"),
    [
        ("velocity", lambda k: 1.0),
        ("mean", lambda k: gain(k) ** 2 / (2 * k.s**2)),
        ("mean_rate", lambda k: gain(k) ** 2 * (k.sigma - k.sigma_next) / (2 * k.s**2)),
        ("mean_square", lambda k: gain(k) ** 2),
    ],
)
def test_the_kl_pulls_towards_the_model_without_the_adapter(space, weight):
    one = continued(objective={"kl": {"weight": 2.0, "space": space}})
    batch = one.collect()
    members = one.members(batch, 1)
    ours, numbers = gradient(one, batch, members)
    written = Written(one, batch)
    theirs, loss = written.gradient(members, [0, 1], 1e-4, 1e-4, lambda k: 1.0, 2.0, weight)
    assert relative(ours, theirs) <= 1e-10
    assert numbers["loss"] == pytest.approx(loss, rel=1e-9)
    without, policy = written.gradient(members, [0, 1], 1e-4, 1e-4, lambda k: 1.0)
    assert relative(ours, without) > 1e-4  # the comparison would see a KL that pulls nothing
    assert numbers["kl"] == pytest.approx((loss - policy) / 2.0, rel=1e-6) and numbers["kl"] > 0


def test_at_the_base_the_kl_is_nothing():
    held, plain = trainer(**EXACT, objective={"kl": {"weight": 1e3}}), trainer(**EXACT)
    (ours, numbers), (theirs, _) = (gradient(one, one.collect(), torch.arange(8)) for one in (held, plain))
    assert numbers["kl"] == 0 and torch.equal(ours, theirs)


def test_the_kl_counts_for_groups_that_teach_nothing():
    """A flat group has no part in the clipped objective; the KL says how far the model is there all the same."""
    slopes = []
    for objective in ({"kl": {"weight": 1.0}}, {}):
        one = continued(objective=objective)
        batch = one.collect()
        batch.advantages.values.zero_()
        slope, numbers = gradient(one, batch, torch.arange(8))
        slopes.append(slope.norm().item())
        assert numbers["loss"] == pytest.approx(numbers.get("kl", 0.0))
    assert slopes[0] > 0 and slopes[1] == 0


def test_every_setting_of_the_objective_reaches_the_gradient():
    sampling = EXACT["sampling"] | {"steps": 8, "window": {"start": 1, "size": 4}, "mode": {"log_prob": "ratio_norm"}}
    clips = {"updates_per_rollout": 2, "clip_range": 3e-6, "clip_range_high": 7e-6}
    objective = {"step_weights": "inverse_dt", "trained_steps": 3, "kl": {"weight": 0.5}}
    one = continued(sampling=sampling, optimizer=clips, objective=objective)
    batch = one.collect()
    moved(one)
    members = torch.arange(8)
    ours, numbers = gradient(one, batch, members)
    written, steps = Written(one, batch), some_steps(2, 4, 3, seed=0)
    right = {"low": 3e-6, "high": 7e-6, "weight": lambda k: 1 / (8 * (k.sigma - k.sigma_next)), "kl": 0.5, "space": lambda k: 1.0}
    theirs, loss = written.gradient(members, steps, **right)
    assert 0 < numbers["clip_fraction"] < 1
    assert relative(ours, theirs) <= 1e-9 and numbers["loss"] == pytest.approx(loss, rel=1e-9)
    for wrong in ({"high": 3e-6}, {"low": 7e-6}, {"weight": lambda k: 1.0}, {"kl": 0.0}):  # each of them is seen
        assert relative(ours, written.gradient(members, steps, **right | wrong)[0]) > 1e-4
    assert relative(ours, written.gradient(members, [0, 1, 2, 3], **right)[0]) > 1e-2


@pytest.mark.parametrize("space", ["velocity", "mean"])
def test_how_calls_are_cut_does_not_change_the_gradient_of_the_kl(space):
    objective = {"kl": {"weight": 1.0, "space": space}}
    whole = continued(objective=objective)
    batch = whole.collect()
    expected, _ = gradient(whole, batch, whole.members(batch, 0))
    for rows_per_call in (1, 3):
        cut = continued(objective=objective, rows_per_call=rows_per_call)
        assert relative(gradient(cut, cut.collect(), cut.members(batch, 0))[0], expected) <= 1e-10


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_switched_off_the_model_is_the_base_bit_for_bit(precision):
    spec = job(model={"precision": precision})
    one, base = Trainer(spec, Ranks.join(), trained_before(spec)), load_model(spec.model, torch.device("cpu"))
    x, sigma = torch.randn(2, *one.latent_shape, generator=torch.Generator().manual_seed(0)), torch.tensor(0.7)
    prompts = take(one.conditions, torch.tensor([0, 1]))
    with torch.no_grad():
        before = one.model.velocity(x, sigma, prompts)
        with adapter.switched_off(one.model.transformer):
            assert torch.equal(one.model.velocity(x, sigma, prompts), base.velocity(x, sigma, prompts))
        assert torch.equal(one.model.velocity(x, sigma, prompts), before)
        assert not torch.equal(before, base.velocity(x, sigma, prompts))
    assert all(parameter.requires_grad for parameter in one.parameters.values())


# ------------------------------------------------------------------ who and what is trained


def test_some_steps_are_drawn_evenly_and_by_seed_and_iteration_alone():
    draws = [some_steps(iteration, 24, 14, seed=3) for iteration in range(600)]
    assert draws == [some_steps(iteration, 24, 14, seed=3) for iteration in range(600)]
    assert draws != [some_steps(iteration, 24, 14, seed=4) for iteration in range(600)]
    assert all(len(set(draw)) == 14 and draw == sorted(draw) and 0 <= draw[0] and draw[-1] < 24 for draw in draws)
    counts = torch.bincount(torch.tensor(sum(draws, [])), minlength=24)
    expected, spread = 600 * 14 / 24, math.sqrt(600 * 14 / 24 * 10 / 24)
    assert (counts - expected).abs().max() < 4 * spread
    assert some_steps(0, 5, 5, seed=0) == [0, 1, 2, 3, 4]
    for count in (0, 6):
        with pytest.raises(WindowError, match="1 to 5 can be trained"):
            some_steps(0, 5, count, seed=0)


def test_the_updates_share_out_the_best_and_the_worst():
    one = trainer(group_size=8, prompts_per_iteration=2, advantage={"best_and_worst": 4}, optimizer={"updates_per_rollout": 2})
    batch = one.collect()
    parts = [one.members(batch, number).tolist() for number in range(2)]
    assert all([row // 8 for row in part] == [0, 0, 1, 1] for part in parts)
    values = batch.advantages.values
    for group in range(2):
        rising = values[group].argsort(stable=True).tolist()
        trained = {row % 8 for part in parts for row in part if row // 8 == group}
        assert trained == {*rising[:2], *rising[-2:]}


class Failing:
    """A scorer that fails for some places of every call."""

    def __init__(self, scorer, places):
        self._scorer, self._places = scorer, places

    def score(self, pictures, texts):
        scores = self._scorer.score(pictures, texts)
        scores[self._places] = math.nan
        return scores


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_job_mixes_its_rewards_as_it_says_and_failures_are_masked(mixing):
    advantage = {"mixing": mixing, "trim": 0.25} | ({"std": "global"} if mixing != "gdpo" else {})
    changes = {"rewards": TWO, "group_size": 4, "prompts_per_iteration": 2, "monitors": [{"scorer": "held_out_judge"}]}
    one = trainer(**changes, advantage=advantage, optimizer={"advantage_clip": 1.2})
    one.scorers["jpeg_compressibility"] = Failing(one.scorers["jpeg_compressibility"], [1, 6, 7])
    batch = one.collect()
    rewards = {name: batch.everyone[name] for name in ("jpeg_compressibility", "scene_accuracy")}
    weights = {"jpeg_compressibility": 3, "scene_accuracy": 1}
    settings = {name: value for name, value in advantage.items() if name != "mixing"}
    expected = MIXINGS[mixing](rewards, weights, 1e-6, 1.2, **settings)
    assert torch.equal(batch.advantages.values, expected.values) and batch.advantages.values.abs().max() > 0
    assert batch.advantages.failed.nonzero().tolist() == [[0, 1], [1, 2], [1, 3]]
    numbers = one.train_iteration()
    assert numbers["failed"] == 3 and numbers["gradient_norm"] == numbers["gradient_norm"]


# ------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("shared", [True, False])
def test_a_kl_costs_a_forward_row_for_every_trained_row(shared, guidance):
    sampling = {"steps": 6, "window": {"start": 1, "size": 3}, "shared_noise": shared, "guidance": guidance}
    changes = {"sampling": sampling, "group_size": 4, "prompts_per_iteration": 2, "optimizer": {"updates_per_rollout": 2}}
    plain, held = trainer(**changes), trainer(**changes, objective={"kl": {"weight": 0.1}})
    rows, rows_held = (one.train_iteration()["rows"] for one in (plain, held))
    assert rows_held == rows | {"reference": rows["training"]}
    branches, per_group = (1 if guidance == 1 else 2), 2 * (1 + 2 * 2) if shared else 4 * 3
    assert rows["training"] == 2 * branches * per_group


def test_only_those_who_are_trained_cost_training_rows():
    changes = {"sampling": {"steps": 8, "window": {"size": 5}}, "group_size": 6, "optimizer": {"updates_per_rollout": 1}}
    objective = {"trained_steps": 3, "kl": {"weight": 0.1}}
    one = trainer(**changes, advantage={"best_and_worst": 4}, objective=objective)
    for iteration in range(3):
        numbers = one.train_iteration()
        steps = some_steps(iteration, 5, 3, seed=0)
        assert numbers["trained"] == steps  # the window starts at step 0
        rows = sum(1 if step == 0 else 4 for step in steps)
        assert numbers["rows"]["training"] == numbers["rows"]["reference"] == rows
        assert numbers["rows"]["rollout"] == 1 + 6 * 7


def test_the_gate_looks_at_everything_whatever_is_trained():
    one = trainer(
        sampling={"steps": 8, "window": {"size": 5}}, group_size=6,
        advantage={"best_and_worst": 2}, objective={"trained_steps": 1, "kl": {"weight": 0.1}},
    )  # fmt: skip
    numbers = one.train_iteration()
    assert numbers["rows"]["replay"] == 1 + 6 * 4 and max(numbers["replay_gate"].values()) <= 1e-5
    assert "replay_gate" not in one.train_iteration()


def test_the_events_of_a_plain_job_name_no_setting_it_does_not_use(tmp_path):
    plain = run(tmp_path / "plain", job(iterations=1))[0]
    assert not {"kl", "trained"} & plain.keys() and "reference" not in plain["rows"]
    held = run(tmp_path / "held", job(iterations=1, objective={"trained_steps": 1, "kl": {"weight": 0.1}}))[0]
    assert held["kl"] == 0 and held["trained"] == some_steps(0, 2, 1, seed=0)
    assert held["rows"]["reference"] == 1 + held["trained"][0]
