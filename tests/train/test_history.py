"""What counts of the events: of whatever was done twice, the last attempt's."""

from __future__ import annotations

from mixgrpo.backend.train.history import History, layout_sentence

WEIGHTS = {"a": 2.0}


def history(*events: dict) -> History:
    taken = History()
    for event in events:
        taken.take(event)
    return taken


def start(from_iteration: int = 0, until: int = 100) -> dict:
    return {"event": "start", "from_iteration": from_iteration, "until": until}


def trained(rewards: dict[int, float | None]) -> list[dict]:
    return [{"event": "iteration", "iteration": n, "scores": {"a": {"mean": mean}}} for n, mean in rewards.items()]


def saved(iteration: int) -> dict:
    return {"event": "saved", "iteration": iteration}


def changed(**threads: int) -> dict:
    both = {"ranks": 1, "torch": "2"}
    return {"event": "layout_changed", "was": both | {"threads": threads["was"]}, "now": both | {"threads": threads["now"]}}


def test_the_curve_is_the_last_attempts():
    taken = history(start(), *trained({1: 0.1, 2: 0.2, 3: 0.9}), start(1))
    assert taken.rewards(WEIGHTS) == {1: 0.2} and taken.iteration == 1 and taken.attempts == 2
    for event in trained({2: 0.4, 3: None}):
        taken.take(event)
    assert taken.rewards(WEIGHTS) == {1: 0.2, 2: 0.8, 3: None} and [row["iteration"] for row in taken.iterations] == [1, 2, 3]


def test_the_best_is_of_the_iterations_since_the_save_before():
    rewards = {1: 0.1, 2: 0.9, 3: 0.4, 4: 0.4, 5: 0.5, 6: 0.3}
    taken = history(start(), *trained(rewards), saved(2), saved(4), saved(6))
    assert taken.best({2, 4, 6}, WEIGHTS) == 2
    assert taken.best({4, 6}, WEIGHTS) == 6, "as good as 4, and newer"
    assert taken.best({4}, WEIGHTS) == 4 and taken.best(set(), WEIGHTS) is None


def test_what_was_removed_still_bounds_what_the_next_one_is_worth():
    taken = history(start(), *trained({1: 0.9, 2: 0.9, 3: 0.1, 4: 0.5, 5: 0.2}), saved(2), saved(3), saved(4), saved(5))
    assert taken.best({3, 4, 5}, WEIGHTS) == 4
    assert taken.best({3, 5}, WEIGHTS) == 5, "5 is not worth what 4 was"


def test_a_run_without_announcements_is_bounded_by_its_files():
    taken = history(start(), *trained({1: 0.1, 2: 0.6, 3: 0.2, 4: 0.3}))
    assert taken.best({2, 4}, WEIGHTS) == 2


def test_a_lora_of_an_attempt_that_no_longer_counts_is_not_the_best():
    """Its checkpoint was lost, training goes on from an earlier one, and has not come there again."""
    taken = history(start(), *trained({1: 0.1, 2: 0.1, 3: 0.9, 4: 0.9}), saved(2), saved(4), start(2), *trained({3: 0.8}))
    assert taken.best({2, 4}, WEIGHTS) == 2 and not taken.saved(4) and taken.saved(2)


def test_the_targets_of_all_attempts_are_known():
    assert history(start(until=5), start(5, until=9), start(7, until=9)).targets == {5, 9}


def test_a_layout_change_counts_as_long_as_its_numbers_do():
    taken = history(start(), start(10), changed(was=2, now=1))
    assert taken.layout_changes == [{"iteration": 10, "was": {"threads": 2}, "now": {"threads": 1}}]
    sentence = layout_sentence(taken.layout_changes[0])
    assert "from iteration 10" in sentence and "threads 2 -> 1" in sentence and "no longer bit-equal" in sentence
    taken.take(start(20))
    assert len(taken.layout_changes) == 1
    taken.take(start(10))  # killed, and begun again on the old layout
    assert taken.layout_changes == []
