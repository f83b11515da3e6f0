"""Starting a run: in this process for one rank, under PyTorch's own launcher for several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from ..console import console, describe, log_iteration, progress_bar
from ..errors import MixGRPOError
from ..files import load_json
from ..specs import TrainSpec
from .ranks import Ranks
from .run_folder import RunFolder
from .worker import train


class LaunchError(MixGRPOError):
    """The worker processes ended without finishing the run."""


def run_job(spec: TrainSpec, folder: Path, ranks: int = 1) -> Path:
    """Train a job in ``folder`` with so many processes, showing progress, and return the finished LoRA's path."""
    return _run_here(spec, folder) if ranks == 1 else _run_ranks(spec, folder, ranks)


def _run_here(spec: TrainSpec, folder: Path) -> Path:
    with progress_bar("training", spec.iterations) as update:

        def report(numbers: dict, seconds_left: float) -> None:
            update(numbers["iteration"], describe(numbers))
            log_iteration(numbers, seconds_left)

        return train(folder, spec, report)


def _run_ranks(spec: TrainSpec, folder: Path, ranks: int) -> Path:
    Ranks(0, ranks, torch.device("cpu")).share(spec.prompts_per_iteration, "prompts per iteration")
    run = RunFolder(folder)
    run.lock()
    try:
        run.open(spec)  # the job is checked before any process starts; the workers read it from the folder
    finally:
        run.unlock()
    worker = f"{__package__}.worker"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    console.print(f"starting {ranks} processes")
    ended = subprocess.run([sys.executable, *launcher, "-m", worker, str(run.path)], check=False)
    if ended.returncode:
        raise LaunchError(
            f"the {ranks} worker processes ended with code {ended.returncode}; the reason is printed above, checkpoints are in "
            f"{run.path / 'checkpoints'}, and the same command continues from the last one"
        )
    return run.lora_file(load_json(run.path / "spec.json")["name"], spec.iterations)
