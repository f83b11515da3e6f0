"""A job's rollouts: whose noise is whose, and which prompt belongs to which picture."""

import torch
from training_jobs import PROMPTS, job, trainer

from mixgrpo.backend.rewards import SCORERS

GROUPS = {"group_size": 3, "prompts_per_iteration": 2}


def rollouts(iterations, **changes):
    """The rollouts of some iterations of an adapter that is not trained."""
    one = trainer(**GROUPS | changes)
    batches = []
    for one.iteration in range(iterations):
        batches.append(one.collect())
    return batches


def step_noises(batch):
    """(w, P G, numbers): what was added to the means, in standard deviations."""
    trajectory = batch.trajectory
    return torch.stack(
        [
            ((trajectory.states[index + 1] - mean) / trajectory.coefficients(index).s).flatten(1)
            for index, mean in enumerate(trajectory.means)
        ]
    )


def all_different(rows):
    """No two rows correlate, as standard normal noise of a thousand numbers does by less than 0.2."""
    rows = rows.flatten(1)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    return correlation.abs().max() < 0.2 and (rows.std(1) - 1).abs().max() < 0.1


def test_groups_and_iterations_never_share_noise():
    batches = rollouts(3)
    assert [batch.trajectory.states[0].shape[0] for batch in batches] == [2, 2, 2]
    initial = torch.cat([batch.trajectory.states[0].flatten(1) for batch in batches])
    steps = torch.cat([step_noises(batch).flatten(0, 1) for batch in batches])
    assert len(steps) == 3 * 2 * 6 and all_different(torch.cat([initial, steps]))


def test_members_have_their_own_initial_noise_when_it_is_not_shared():
    batches = rollouts(2, sampling={"shared_noise": False})
    initial = torch.cat([batch.trajectory.states[0] for batch in batches])
    assert len(initial) == 2 * 6 and all_different(initial)


def test_a_group_is_the_same_however_the_job_is_cut_into_iterations_and_calls():
    """Two iterations of one prompt begin like one iteration of two, if both have the same prompts there."""
    prompts = [PROMPTS[0]]
    (together,) = rollouts(1, prompts=prompts)
    apart = rollouts(2, prompts=prompts, prompts_per_iteration=1, rows_per_call=2)
    final = torch.cat([batch.trajectory.final for batch in apart])
    assert (final - together.trajectory.final).norm() / final.norm() <= 1e-5


def test_the_seed_of_the_job_changes_everything():
    (one,), (other,) = rollouts(1), rollouts(1, seed=1)
    noises = [torch.cat([batch.trajectory.states[0].flatten(1), step_noises(batch).flatten(0, 1)]) for batch in (one, other)]
    assert all_different(torch.cat(noises))


def test_every_picture_is_scored_under_its_own_prompt(monkeypatch):
    seen = []

    class Recorder:
        name, held_out = "recorder", False

        def check_prompts(self, prompts):
            assert prompts == job().prompts

        def score(self, images, prompts):
            seen.append((images.clone(), list(prompts)))
            return torch.arange(float(len(images)))

    monkeypatch.setitem(SCORERS, "recorder", Recorder)
    (batch,) = rollouts(1, rewards=[{"scorer": "recorder", "weight": 2.0}], monitors=[{"scorer": "jpeg_compressibility"}])
    ((images, prompts),) = seen
    assert prompts == [PROMPTS[row] for row in batch.prompts.tolist() for _ in range(3)]
    assert torch.equal(images, batch.pictures) and batch.pictures.shape == (6, 3, 64, 64)
    assert batch.everyone["recorder"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert batch.advantages.values.tolist() == [[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]  # the monitor has no say
