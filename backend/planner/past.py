"""What earlier runs on this machine tell about time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import MixGRPOError
from ..files import load_json
from ..specs import TrainSpec
from ..specs.job import parse_job
from ..train.run_folder import RunFolder
from .rows import WindowRows

_NEWEST = 50  # iterations of a run that count


@dataclass(frozen=True)
class PastRun:
    """Seconds that a run took: per model row and per picture, the median over its newest iterations."""

    folder: Path
    iterations: int
    rollout_row: float
    training_row: float
    picture: float

    def seconds(self, rows: WindowRows, pictures: int) -> float:
        """Of an iteration with so many rows and pictures on all ranks together."""
        return (rows.rollout + rows.reference) * self.rollout_row + rows.training * self.training_row + pictures * self.picture


def find_past_run(folders: Iterable[Path], spec: TrainSpec, device: str, ranks: int) -> PastRun | None:
    """The newest run of the same model and picture size on the same kind of device and as many ranks; None if there is none.

    Args:
        folders: folders of run folders; those that do not exist are passed over.
    """
    runs = [run for folder in folders if folder.is_dir() for run in folder.iterdir() if (run / "events.jsonl").is_file()]
    for run in sorted(runs, key=lambda run: (run / "events.jsonl").stat().st_mtime, reverse=True):
        found = _past_run(run, spec, device, ranks)
        if found is not None:
            return found
    return None


def _past_run(path: Path, spec: TrainSpec, device: str, ranks: int) -> PastRun | None:
    try:
        folder = RunFolder(path)
        other, events = parse_job(load_json(path / "spec.json")), folder.events()
    except MixGRPOError:  # of another version, or no run: it tells nothing
        return None
    starts = [event for event in events if event["event"] == "start"]
    same = (other.model, other.sampling.width, other.sampling.height) == (spec.model, spec.sampling.width, spec.sampling.height)
    if not same or not starts or (starts[-1].get("device"), starts[-1].get("ranks")) != (device, ranks):
        return None
    rows = [_per_piece(event, other) for event in folder.iterations()[-_NEWEST:]]
    if not rows:
        return None
    rollout, training, picture = (median(values) for values in zip(*rows, strict=True))
    return PastRun(path, len(rows), rollout, training, picture)


def _per_piece(event: dict[str, Any], spec: TrainSpec) -> tuple[float, float, float]:
    """Seconds of one iteration per rolled-out row, per trained row, and per picture decoded and scored."""
    seconds, rows = event["seconds"], event["rows"]
    pictures = spec.prompts_per_iteration * spec.group_size
    return (
        seconds["rollout"] / rows["rollout"],
        seconds["training"] / rows["training"],
        (seconds.get("decode", 0.0) + seconds.get("score", 0.0)) / pictures,
    )
