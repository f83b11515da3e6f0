"""Very small jobs with the real starter, and what to compare of their runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.specs import TrainSpec
from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.run_folder import RunFolder
from mixgrpo.backend.train.trainer import Trainer
from mixgrpo.backend.train.worker import train

PROMPTS = [
    "a red circle on a white background",
    "a blue square on a black background",
    "a green triangle on a white background",
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
"""For processes that the tests start."""
WORKER = [sys.executable, "-m", "mixgrpo.backend.train.worker"]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]

_SMALL: dict[str, Any] = {
    "prompts": PROMPTS,
    "sampling": {"steps": 4, "window": {"size": 2}},
    "group_size": 2,
    "prompts_per_iteration": 1,
    "rewards": [{"scorer": "jpeg_compressibility"}],
    "lora": {"rank": 2, "alpha": 4},
    "optimizer": {"updates_per_rollout": 1},
    "iterations": 2,
    "checkpoint_every": 1,
}


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of the small job; mappings are merged, everything else is replaced."""
    return _merged(_SMALL, changes)


def job(**changes: Any) -> TrainSpec:
    """The small job with changes, as :func:`fields` takes them."""
    return parse_job(fields(**changes))


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(old[name], new[name]) for name in old.keys() & new.keys() if isinstance(new[name], dict)}
    return old | new | both


def trainer(**changes: Any) -> Trainer:
    """A trainer of the small job in this process alone."""
    return Trainer(job(**changes), Ranks.join())


def run(folder: Path, spec: TrainSpec) -> list[dict[str, Any]]:
    """Train in this process; returns the iterations' numbers."""
    train(folder, spec)
    return RunFolder(folder).iterations()


NUMBERS = (
    "iteration", "scores", "dead_groups", "failed", "window", "loss", "ratio_deviation", "clip_fraction", "gradient_norm",
    "replay", "adapter_hash",
)  # fmt: skip


def numbers(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a continued run must repeat bit for bit: everything but times, attempts and the rows of the first replay."""
    return [{name: event[name] for name in NUMBERS} for event in events]


def lora_bytes(folder: Path) -> dict[str, bytes]:
    """Every LoRA file of a run: its tensors' exact bits by file name."""
    files = sorted((folder / "lora").glob("*.safetensors"))
    return {file.name: b"".join(value.numpy().tobytes() for _, value in sorted(load_tensors(file).items())) for file in files}


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files under a folder with their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
