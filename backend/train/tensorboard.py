"""A run's scalars for TensorBoard: ``tensorboard --logdir RUN_FOLDER/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ..files import StorageError
from ..specs.job import mixed_reward


class ScalarLog:
    """One attempt's event file in ``folder``, on the disk after every write."""

    def __init__(self, folder: Path, attempt: int, from_iteration: int):
        """Begin the file: what earlier attempts wrote beyond ``from_iteration`` is void.

        Raises:
            StorageError: it cannot be written.
        """
        self._folder = folder
        try:
            self._writer = SummaryWriter(
                str(folder), purge_step=from_iteration + 1, filename_suffix=f".attempt_{attempt:04d}"
            )
            self._writer.flush()
        except OSError as error:
            raise StorageError(f"cannot write to {folder}: {error}; checkpoints are safe") from error

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add scalars of a step; raises :class:`StorageError` when they cannot be written."""
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except OSError as error:
            raise StorageError(f"cannot write to {self._folder}: {error}; checkpoints are safe") from error

    def close(self) -> None:
        """End the file and the thread that writes it."""
        self._writer.close()


def scalars_of(event: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, float]:
    """What TensorBoard shows of an iteration's event, by tag; numbers that are missing there are left out.

    Args:
        weights: of the rewards by name; the mixed reward is their weighted sum.
    """
    scores = event["scores"]
    found: dict[str, float | None] = {"reward": mixed_reward({name: one["mean"] for name, one in scores.items()}, weights)}
    for name, one in scores.items():
        found |= {f"score/{name}": one["mean"], f"score_spread/{name}": one["group_std"]}
    for name in ("loss", "kl", "ratio_deviation", "clip_fraction", "gradient_norm", "learning_rate"):
        found[f"update/{name}"] = event.get(name)
    for one in event["steps"]:
        for name in ("ratio_deviation", "clip_fraction"):
            found[f"{name}/step_{one['step']:02d}"] = one[name]
    found |= {f"replay/{name}": value for name, value in event["replay"].items()}
    found |= {"groups/dead": event["dead_groups"], "groups/failed_scores": event["failed"], "window/start": event["window"][0]}
    found |= {f"rows/{name}": value for name, value in event["rows"].items()}
    found |= {f"seconds/{name}": value for name, value in event["seconds"].items()}
    memory = event["peak_memory"]
    found |= {f"peak_memory_{memory['kind']}/{name}": value for name, value in memory["bytes"].items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}
