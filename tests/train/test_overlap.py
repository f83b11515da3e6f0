"""Groups drawn one after the other, scored meanwhile: the same numbers, and the scoring does overlap."""

import threading

import pytest
import torch
from training_jobs import trainer

from mixgrpo.backend.train.scoring import Scoring

FIELDS = {"prompts_per_iteration": 3, "model": {"precision": "float64"}}


def test_groups_at_once_change_no_number():
    together, apart = trainer(**FIELDS).collect(), trainer(**FIELDS, groups_at_once=2).collect()
    assert together.everyone.keys() == apart.everyone.keys()
    for name, scores in together.everyone.items():
        assert torch.allclose(scores, apart.everyone[name], rtol=1e-6)
    torch.testing.assert_close(together.trajectory.final, apart.trajectory.final, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together.trajectory.log_probs, apart.trajectory.log_probs)
    assert (apart.trajectory.groups, len(apart.pictures)) == (3, 6)
    for ours, theirs in zip(together.trajectory.states, apart.trajectory.states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_an_iteration_of_parts_passes_the_replay_gate():
    training = trainer(**FIELDS, groups_at_once=1)
    numbers = training.train_iteration()
    assert numbers["replay_gate"]["mean_gap"] < 1e-9 and training.layout["groups_at_once"] == 1


def test_the_next_groups_are_drawn_while_the_former_are_scored():
    training, drawn, met = trainer(**FIELDS, groups_at_once=1), threading.Event(), []
    draw, score = training._draw, training._score

    def drawing(velocity, prompts, places):
        if places.start:
            drawn.set()
        return draw(velocity, prompts, places)

    def scoring(pictures, prompts):
        met.append(drawn.wait(60))  # the first would wait in vain if nothing was drawn meanwhile
        return score(pictures, prompts)

    training._draw, training._score = drawing, scoring
    training.collect()
    assert met == [True] * 3


def test_what_scoring_raises_is_raised_to_whoever_waits_for_it():
    def fail(pictures, prompts):
        raise ValueError("no score")

    with pytest.raises(ValueError, match="no score"), Scoring(fail) as scoring:
        scoring.add(torch.zeros(1, 3, 8, 8), torch.zeros(1))
        scoring.scores()
