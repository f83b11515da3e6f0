"""Starting a run: in this process for one rank, under PyTorch's own launcher for several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..console import console, describe, log_iteration, progress_bar
from ..errors import MixGRPOError
from ..files import load_json, sha256_of
from ..specs import SpecError, TrainSpec
from .run_folder import RunFolder
from .sharing import first_share
from .worker import train


class LaunchError(MixGRPOError):
    """The worker processes ended without finishing the run."""


def starting_from(spec: TrainSpec, lora: Path) -> TrainSpec:
    """The job with ``lora.start_from`` naming this file; raises :class:`SpecError` when it names another."""
    digest, named = sha256_of(lora), spec.lora.start_from
    if named not in (None, digest):
        raise SpecError(
            f"lora.start_from of the job is {named[:12]}…, but the SHA-256 of {lora} is {digest[:12]}…; name the right file, or "
            "take lora.start_from out of the job"
        )
    return spec.model_copy(update={"lora": spec.lora.model_copy(update={"start_from": digest})})


def run_job(spec: TrainSpec, folder: Path, ranks: int = 1, start: Path | None = None) -> Path:
    """Train a job in ``folder`` with so many processes, showing progress, and return the finished LoRA's path.

    Args:
        start: the file that ``spec.lora.start_from`` names; a run that has it already needs none.
    """
    if ranks > 1:
        first_share(spec, ranks)
    if ranks > 1 or start is not None:
        _prepare(spec, folder, start)
    return _run_here(spec, folder) if ranks == 1 else _run_ranks(spec, folder, ranks)


def _prepare(spec: TrainSpec, folder: Path, start: Path | None) -> None:
    """Check the job and put it into its folder before any process starts; the workers read it from there."""
    run = RunFolder(folder)
    run.lock()
    try:
        run.open(spec)
        if start is not None and spec.lora.start_from is not None:
            run.put_start(start, spec.lora.start_from)
    finally:
        run.unlock()


def _run_here(spec: TrainSpec, folder: Path) -> Path:
    with progress_bar("training", spec.iterations) as update:

        def report(numbers: dict, seconds_left: float) -> None:
            update(numbers["iteration"], describe(numbers))
            log_iteration(numbers, seconds_left)

        return train(folder, spec, report)


def _run_ranks(spec: TrainSpec, folder: Path, ranks: int) -> Path:
    run = RunFolder(folder)
    worker = f"{__package__}.worker"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    console.print(f"starting {ranks} processes")
    command = [sys.executable, *launcher, "-m", worker, str(run.path), "--supervised"]
    # the ranks hold the other end of the pipe: whoever of this process and the launcher is killed, they pause and end
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        code = process.wait()
    if code:
        raise LaunchError(
            f"the {ranks} worker processes ended with code {code}; the reason is printed above, checkpoints are in "
            f"{run.path / 'checkpoints'}, and the same command continues from the last one"
        )
    return run.lora_file(load_json(run.path / "spec.json")["name"], spec.iterations)
