"""Every sampling mode in a job: what the rollout does is what the training pass replays, and what it costs is known before."""

from __future__ import annotations

import itertools

import pytest
import torch
from training_jobs import trainer

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.flow.dynamics import LOG_PROBS, SDE_DYNAMICS
from mixgrpo.backend.flow.plan import plan_rollout

MODES = [
    *({"dynamics": dynamics, "log_prob": scale} for dynamics, scale in itertools.product(SDE_DYNAMICS, LOG_PROBS)),
    {"solver": "dpmpp_2m", "ratio": 0.4},
    {"solver_after": "heun", "history": "reset"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(map(str, mode.values())))
def test_a_mode_trains_on_what_it_has_drawn(mode):
    one = trainer(sampling={"steps": 8, "eta": 0.5, "mode": mode, "window": {"start": 2, "size": 2}}, group_size=4)
    before = one.checkpoint().adapter
    numbers = one.train_iteration()
    assert max(numbers["replay_gate"].values()) < 1e-5
    assert any(not torch.equal(before[name], tensor) for name, tensor in one.checkpoint().adapter.items())
    plan = plan_rollout(one.sigmas, one.window(), 0.5, one.mode)
    assert numbers["rows"]["rollout"] == plan.rows(4) and len(plan.steps) == (6 if "ratio" in mode else 8)


def test_a_windows_policy_moves_it():
    window = {"policy": "list", "size": 1, "starts": [2, 0], "every": 1}
    one = trainer(sampling={"steps": 4, "window": window})
    assert [one.train_iteration()["window"] for _ in range(3)] == [[2, 1], [0, 1], [2, 1]]


def test_a_noise_level_that_a_later_window_does_not_allow_is_refused_before_training():
    window = {"policy": "list", "size": 1, "starts": [10, 1]}
    with pytest.raises(MixGRPOError, match="eta 1.37 is too large for step 1"):
        trainer(sampling={"steps": 25, "eta": 1.37, "shift": 1.0, "window": window})
