"""What counts of a run's event log: of whatever was done twice, the last attempt's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..specs.job import mixed_reward


class History:
    """Takes a run's events in their order. A ``start`` ends the validity of everything beyond its iteration.

    Attributes:
        last: the last event.
        attempts: how many workers have begun.
        targets: the iterations that they were to train to.
        layout_changes: where the counting attempts went on with another layout, as ``iteration``, ``was`` and ``now``, the latter
            two with what differs only. Numbers after the first of them are not bit-equal to an uninterrupted run's.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.attempts = 0
        self.targets: set[int] = set()
        self.layout_changes: list[dict[str, Any]] = []
        self._from = 0
        self._iterations: dict[int, dict[str, Any]] = {}
        self._saved: set[int] = set()

    def take(self, event: dict[str, Any]) -> None:
        """Take in the next event."""
        self.last = event
        match event["event"]:
            case "start":
                self._begin(event)
            case "iteration":
                self._iterations[event["iteration"]] = event
            case "saved":
                self._saved.add(event["iteration"])
            case "layout_changed":
                was, now = event["was"], event["now"]
                differs = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
                change = {"was": {name: was.get(name) for name in differs}, "now": {name: now.get(name) for name in differs}}
                self.layout_changes.append({"iteration": self._from, **change})

    def _begin(self, start: dict[str, Any]) -> None:
        self._from = start["from_iteration"]
        self.attempts += 1
        self.targets.add(start["until"])
        self._iterations = {number: event for number, event in self._iterations.items() if number <= self._from}
        self._saved = {number for number in self._saved if number <= self._from}
        self.layout_changes = [change for change in self.layout_changes if change["iteration"] < self._from]

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """The iteration events that count, in order."""
        return [self._iterations[number] for number in sorted(self._iterations)]

    @property
    def iteration(self) -> int:
        """The last iteration that was trained."""
        return max(self._iterations, default=0)

    def saved(self, iteration: int) -> bool:
        """Whether a counting attempt has announced the checkpoint and the LoRA of an iteration."""
        return iteration in self._saved

    def rewards(self, weights: Mapping[str, float]) -> dict[int, float | None]:
        """The mixed reward (see :func:`mixed_reward`) by iteration."""
        means = {row["iteration"]: {name: score["mean"] for name, score in row["scores"].items()} for row in self.iterations}
        return {iteration: mixed_reward(scores, weights) for iteration, scores in means.items()}

    def best(self, loras: Collection[int], weights: Mapping[str, float]) -> int | None:
        """The one of ``loras`` whose iterations, since the save before it, had the highest mean reward.

        LoRAs that retention has removed still bound these iterations; a LoRA beyond the last iteration is an earlier attempt's.
        """
        rewards, means, since = self.rewards(weights), {}, 0
        for iteration in sorted(self._saved.union(number for number in loras if number <= self.iteration)):
            seen = [rewards[number] for number in range(since + 1, iteration + 1) if rewards.get(number) is not None]
            if seen and iteration in loras:
                means[iteration] = sum(seen) / len(seen)
            since = iteration
        return max(means, key=lambda iteration: (means[iteration], iteration), default=None)


def layout_sentence(change: Mapping[str, Any]) -> str:
    """One of :attr:`History.layout_changes` for people."""
    parts = ", ".join(f"{name} {change['was'][name]} -> {change['now'][name]}" for name in change["was"])
    return (
        f"continued from iteration {change['iteration']} with another layout ({parts}): from here on the numbers are no longer "
        "bit-equal to an uninterrupted run's"
    )
