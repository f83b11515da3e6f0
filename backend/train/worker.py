"""One run from its folder: ``python -m mixgrpo.backend.train.worker RUN_FOLDER``, alone or under PyTorch's launcher."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..console import describe
from ..errors import MixGRPOError
from ..files import load_json
from ..models.families import base_model_hash
from ..models.lora_export import export_lora
from ..pictures import contact_sheet, save_picture
from ..specs import TrainSpec
from ..specs.job import parse_job
from .ranks import Ranks
from .run_folder import Checkpoint, RunError, RunFolder
from .trainer import Rollout, Trainer

Report = Callable[[dict[str, Any], float], None]
"""Called with an iteration's numbers and the seconds left."""


def train(folder: Path, spec: TrainSpec, report: Report = lambda numbers, left: None) -> Path:
    """Train the job to its last iteration, continuing from the newest checkpoint, and return the LoRA's path.

    A run that has already come so far is not trained further; its finished LoRA is returned.
    """
    run, ranks = RunFolder(folder), Ranks.join()
    if ranks.first:
        run.lock()
    try:
        return _train(run, spec, ranks, report)
    finally:
        run.unlock()


def _train(run: RunFolder, spec: TrainSpec, ranks: Ranks, report: Report) -> Path:
    if ranks.first:
        run.open(spec)
    ranks.barrier()
    finished = run.lora_file(spec.name, spec.iterations)
    base = base_model_hash(spec.model)
    resume = run.load_checkpoint(spec.identity(), base)
    reached = 0 if resume is None else resume.iteration
    ranks.require_equal(str(reached), "the iteration to continue from")
    if reached >= spec.iterations and finished.exists():
        return finished
    if reached > spec.iterations:
        raise RunError(
            f"{run.path} is already trained to iteration {reached} and has no LoRA of iteration {spec.iterations}; set "
            f"iterations to {reached} or more, or take a LoRA that is in {finished.parent}"
        )
    trainer = Trainer(spec, ranks, resume)
    if ranks.first:
        run.append("start", from_iteration=trainer.iteration, until=spec.iterations, base_model=base, **trainer.layout)
        if resume is not None:
            _export(run, trainer, resume, base)  # a kill may have come between the checkpoint and its LoRA
            if resume.layout != trainer.layout:
                run.append("layout_changed", was=resume.layout, now=trainer.layout, bit_equal=False)
    started, first = time.monotonic(), trainer.iteration
    while trainer.iteration < spec.iterations:
        due = (trainer.iteration + 1) % spec.checkpoint_every == 0 or trainer.iteration + 1 == spec.iterations
        numbers = trainer.train_iteration(
            lambda batch, due=due: _save_samples(run, trainer, batch) if ranks.first and due else None
        )
        left = (time.monotonic() - started) / (trainer.iteration - first) * (spec.iterations - trainer.iteration)
        checkpoint = trainer.checkpoint() if due else None
        if ranks.first:
            run.append("iteration", seconds_left=round(left, 1), **numbers)
            report(numbers, left)
            if checkpoint is not None:  # the checkpoint first: what a LoRA is named after can always be continued
                run.save_checkpoint(checkpoint, spec.identity(), base, spec.keep_checkpoints)
                _export(run, trainer, checkpoint, base)
    if ranks.first:
        run.append("done", iteration=trainer.iteration, lora=finished.name)
    ranks.barrier()
    return finished


def _export(run: RunFolder, trainer: Trainer, checkpoint: Checkpoint, base: str) -> None:
    """Write the checkpoint's LoRA, unless it is there."""
    spec, path = trainer.spec, run.lora_file(trainer.spec.name, checkpoint.iteration)
    if path.exists():
        return
    metadata = {
        "modelspec.title": f"{spec.name} {checkpoint.iteration}",
        "mixgrpo.base_model": spec.model.family,
        "mixgrpo.base_model_sha256": base,
        "mixgrpo.spec": spec.identity(),
        "mixgrpo.iteration": str(checkpoint.iteration),
        "mixgrpo.rewards": ", ".join(f"{reward.scorer} x {reward.weight:g}" for reward in spec.rewards),
        "mixgrpo.guidance": f"{spec.sampling.guidance:g}",
    }
    lora = spec.lora
    export_lora(
        trainer.model.transformer,
        checkpoint.adapter,
        rank=lora.rank,
        alpha=lora.alpha,
        rslora=lora.rslora,
        path=path,
        metadata=metadata,
    )


def _save_samples(run: RunFolder, trainer: Trainer, batch: Rollout) -> None:
    """The first groups of this rollout as a sheet, one row a prompt, every picture with its mixed advantage."""
    size, rows = trainer.spec.group_size, min(4, len(batch.prompts))
    labels = [f"{value:+.2f}" for value in batch.advantages.values[:rows].flatten().tolist()]
    titles = [trainer.spec.prompts[row] for row in batch.prompts[:rows].tolist()]
    sheet = contact_sheet(batch.pictures[: rows * size], size, labels, titles)
    save_picture(run.path / "samples" / f"iteration_{trainer.iteration + 1:06d}.png", sheet)


def main(arguments: list[str]) -> None:
    """Entry point of a worker process: the job is the folder's own ``spec.json``."""
    if len(arguments) != 1:
        sys.exit("give one run folder")
    folder = Path(arguments[0])

    def report(numbers: dict[str, Any], left: float) -> None:
        print(f"iteration {numbers['iteration']}  {describe(numbers)}  {left / 60:.1f} min left", flush=True)

    try:
        train(folder, parse_job(load_json(folder / "spec.json")), report)
    except MixGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        Ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
