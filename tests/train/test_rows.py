"""Model rows, counted by the forward hook, against the closed forms."""

import pytest
from training_jobs import job, run, trainer

STEPS = 6


def closed_forms(start, size, group, updates, shared, guidance):
    """(rollout, training) rows of a group in one iteration."""
    branches = 1 if guidance == 1 else 2
    rollout = (start + 1) + group * (STEPS - start - 1) if shared else group * STEPS
    training = updates * (1 + (group // updates) * (size - 1)) if shared else group * size
    return branches * rollout, branches * training


@pytest.mark.parametrize(
    ("start", "size", "group", "updates", "shared", "guidance", "prompts", "rows_per_call"),
    [
        (0, 1, 4, 4, True, 1.0, 1, 256),
        (0, 2, 4, 1, True, 1.0, 2, 256),
        (2, 3, 4, 2, True, 1.0, 1, 256),
        (4, 1, 4, 2, True, 1.0, 1, 256),
        (0, 5, 3, 3, True, 1.0, 1, 256),
        (1, 2, 4, 2, True, 3.0, 2, 256),
        (1, 2, 4, 2, True, 0.0, 1, 256),
        (1, 2, 4, 2, False, 1.0, 2, 256),
        (0, 3, 4, 4, False, 2.0, 1, 256),
        (1, 3, 4, 2, True, 2.0, 3, 3),  # calls that a group does not fit into
        (1, 3, 4, 2, True, 1.0, 3, 5),  # calls of two groups, and a rest
    ],
)
def test_rows_are_those_of_the_closed_forms(start, size, group, updates, shared, guidance, prompts, rows_per_call):
    one = trainer(
        sampling={"steps": STEPS, "window": {"start": start, "size": size}, "shared_noise": shared, "guidance": guidance},
        group_size=group,
        prompts_per_iteration=prompts,
        optimizer={"updates_per_rollout": updates},
        rows_per_call=rows_per_call,
    )
    calls = []
    one.model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    rollout, training = closed_forms(start, size, group, updates, shared, guidance)
    for first in (True, False):
        rows = one.train_iteration()["rows"]
        assert rows["rollout"] == prompts * rollout and rows["training"] == prompts * training
        replay = prompts * closed_forms(start, size, group, 1, shared, guidance)[1]
        assert rows.keys() == ({"rollout", "training", "replay"} if first else {"rollout", "training"})
        assert rows.get("replay", replay) == replay  # every stored step once, before the first update of a process
        assert sum(calls) == sum(rows.values()) and max(calls) <= rows_per_call
        calls.clear()


def test_rows_follow_a_moving_window_into_the_events(tmp_path):
    window = {"start": 0, "size": 2, "stride": 1, "every": 1}
    spec = job(sampling={"steps": STEPS, "window": window}, iterations=5, checkpoint_every=5)
    events = run(tmp_path, spec)
    assert [event["window"] for event in events] == [[0, 2], [1, 2], [2, 2], [3, 2], [3, 2]]
    expected = [closed_forms(event["window"][0], 2, 2, 1, True, 1.0) for event in events]
    assert [(event["rows"]["rollout"], event["rows"]["training"]) for event in events] == expected
