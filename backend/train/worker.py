"""One run from its folder: ``python -m mixgrpo.backend.train.worker RUN_FOLDER``, alone or under PyTorch's launcher."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from ..console import console, describe
from ..errors import MixGRPOError
from ..files import StorageError, load_json, load_metadata
from ..models.lora_export import export_lora
from ..models.weights import base_model_hash
from ..specs import TrainSpec
from ..specs.job import parse_job
from .adapter import adapter_hash
from .fixed import FixedPictures
from .history import layout_sentence
from .ranks import Ranks
from .retention import kept_loras
from .run_folder import Checkpoint, Request, RunError, RunFolder
from .samples import SampleSheets
from .tensorboard import ScalarLog, scalars_of
from .trainer import Rollout, Trainer

Report = Callable[[dict[str, Any], float], None]
"""Called with an iteration's numbers and the seconds left."""

Asked = Callable[[], Request | None]
"""Tells what the run has been asked meanwhile; called between phases, on the first rank only."""


class Stopped(MixGRPOError):
    """The run was asked to stop; what it has trained until a pause is saved."""

    def __init__(self, request: Request):
        super().__init__(f"the run was asked to {request}; the same job again continues from its last checkpoint")
        self.request = request


def train(folder: Path, spec: TrainSpec, report: Report = lambda numbers, left: None, asked: Asked | None = None) -> Path:
    """Train the job to its last iteration, continuing from the newest checkpoint, and return the LoRA's path.

    A run that has already come so far is not trained further; its finished LoRA is returned.

    Raises:
        Stopped: ``asked`` (by default the run folder's control file) said so. A pause saves a checkpoint first.
    """
    run, ranks = RunFolder(folder), Ranks.join()
    if ranks.first:
        run.lock()
    try:
        return _train(run, spec, ranks, report, asked or run.requested)
    finally:
        run.unlock()


def _train(run: RunFolder, spec: TrainSpec, ranks: Ranks, report: Report, asked: Asked) -> Path:
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
    first = resume is None and spec.lora.start_from is not None
    trainer = Trainer(spec, ranks, resume, run.start_file(spec.lora.start_from) if first else None)
    if ranks.first:
        run.append("start", from_iteration=trainer.iteration, until=spec.iterations, base_model=base, **trainer.layout)
        run.forget_sheets(trainer.iteration)
        if resume is not None:
            _export(run, trainer, resume, base)  # a kill may have come between the checkpoint and its LoRA
            if resume.layout != trainer.layout:
                run.append("layout_changed", was=resume.layout, now=trainer.layout, bit_equal=False)
                console.print(layout_sentence(run.history.layout_changes[-1]), markup=False, soft_wrap=True)
    try:
        _iterate(run, trainer, base, report, asked)
    except Stopped as stop:
        _stop(run, trainer, base, stop.request)
        raise
    if ranks.first:
        run.append("done", iteration=trainer.iteration, lora=finished.name)
    ranks.barrier()
    return finished


def _iterate(run: RunFolder, trainer: Trainer, base: str, report: Report, asked: Asked) -> None:
    spec, ranks = trainer.spec, trainer.ranks
    started, first, sheets = time.monotonic(), trainer.iteration, SampleSheets(run, spec)
    weights = {reward.scorer: reward.weight for reward in spec.rewards}
    fixed = FixedPictures(run, trainer)
    fixed.begin()

    def between_phases(batch: Rollout, due: bool) -> None:
        if ranks.first:
            sheets.show(trainer.iteration + 1, batch, due)
        _obey(ranks, asked)  # the adapter is still what it was before the iteration, which a continuation repeats

    log = closing(ScalarLog(run.path / "tensorboard", run.attempt, first)) if ranks.first else nullcontext()
    with log as scalars:
        while trainer.iteration < spec.iterations:
            _obey(ranks, asked)
            due = _due(run, trainer)
            numbers = trainer.train_iteration(lambda batch, due=due: between_phases(batch, due))
            left = (time.monotonic() - started) / (trainer.iteration - first) * (spec.iterations - trainer.iteration)
            if scalars is not None:
                run.append("iteration", seconds_left=round(left, 1), **numbers)
                scalars.write(trainer.iteration, scalars_of(numbers, weights))
                report(numbers, left)
            if due:
                _save(run, trainer, base)
                fixed.draw()


def _due(run: RunFolder, trainer: Trainer) -> bool:
    """Whether the next iteration is to be saved (a collective call: somebody may have asked the first rank for it)."""
    spec, following = trainer.spec, trainer.iteration + 1
    wanted = trainer.ranks.first and following in run.wanted()
    asked_for = trainer.ranks.largest({"wanted": float(wanted)})["wanted"]
    return following % spec.checkpoint_every == 0 or following == spec.iterations or bool(asked_for)


def _obey(ranks: Ranks, asked: Asked) -> None:
    """Raise :class:`Stopped` on every rank when the first one is asked to stop."""
    codes: dict[Request | None, float] = {None: 0.0, "pause": 1.0, "cancel": 2.0}
    code = ranks.largest({"request": codes[asked()] if ranks.first else 0.0})["request"]
    for request in codes:
        if request is not None and codes[request] == code:
            raise Stopped(request)


def _stop(run: RunFolder, trainer: Trainer, base: str, request: Request) -> None:
    if request == "pause" and trainer.iteration > 0:
        _save(run, trainer, base)
    if trainer.ranks.first:
        run.append({"pause": "paused", "cancel": "cancelled"}[request], iteration=trainer.iteration)
        run.withdraw_request()
    trainer.ranks.barrier()


def _save(run: RunFolder, trainer: Trainer, base: str) -> None:
    """Save the present iteration's checkpoint and LoRA (a collective call)."""
    checkpoint, spec = trainer.checkpoint(), trainer.spec
    if trainer.ranks.first:  # the checkpoint first: what a LoRA is named after can always be continued
        run.save_checkpoint(checkpoint, spec.identity(), base, spec.keep_checkpoints)
        _export(run, trainer, checkpoint, base)


def _export(run: RunFolder, trainer: Trainer, checkpoint: Checkpoint, base: str) -> None:
    """Write the checkpoint's LoRA unless it is there, announce it, and remove those that need not stay."""
    spec, iteration = trainer.spec, checkpoint.iteration
    path, adapter = run.lora_file(spec.name, iteration), adapter_hash(checkpoint.exported(spec.exported_weights))
    written = path.exists() and _adapter_in(path) == adapter
    if written and run.history.saved(iteration):
        return
    if not written:
        path.unlink(missing_ok=True)  # an earlier attempt's, whose checkpoint was lost, with other numbers
        _write_lora(path, trainer, checkpoint, base, adapter)
    run.append("saved", iteration=iteration, lora=path.name, weights=spec.exported_weights)
    weights = {reward.scorer: reward.weight for reward in spec.rewards}

    def keep(loras: set[int], wanted: set[int]) -> set[int]:
        best, targets = run.history.best(loras, weights), run.history.targets
        return kept_loras(loras, best, wanted | targets, spec.checkpoint_every, spec.keep_loras_every)

    removed = run.retain(keep)
    if removed:
        run.append("removed", iterations=sorted(removed))


def _adapter_in(lora: Path) -> str | None:
    """Hash of the adapter that a LoRA file was made from; None when it does not say, or is damaged."""
    try:
        return load_metadata(lora).get("mixgrpo.adapter")
    except StorageError:
        return None


def _write_lora(path: Path, trainer: Trainer, checkpoint: Checkpoint, base: str, adapter: str) -> None:
    spec = trainer.spec
    metadata = {
        "modelspec.title": f"{spec.name} {checkpoint.iteration}",
        "mixgrpo.base_model": spec.model.family,
        "mixgrpo.base_model_sha256": base,
        "mixgrpo.spec": spec.identity(),
        "mixgrpo.iteration": str(checkpoint.iteration),
        "mixgrpo.adapter": adapter,
        "mixgrpo.weights": spec.exported_weights,
        "mixgrpo.rewards": ", ".join(f"{reward.scorer} x {reward.weight:g}" for reward in spec.rewards),
        "mixgrpo.guidance": f"{spec.sampling.guidance:g}",
    }
    lora = spec.lora
    if lora.start_from is not None:
        metadata["mixgrpo.started_from"] = lora.start_from
    export_lora(
        trainer.model.transformer,
        checkpoint.exported(spec.exported_weights),
        rank=lora.rank,
        alpha=lora.alpha,
        rslora=lora.rslora,
        path=path,
        metadata=metadata,
    )


def _supervised(run: RunFolder) -> Asked:
    """What the control file says, and a pause once standard input ends: then the server that started this is gone."""
    gone = threading.Event()

    def wait() -> None:
        while os.read(0, 1):
            pass
        gone.set()

    threading.Thread(target=wait, daemon=True).start()
    return lambda: run.requested() or ("pause" if gone.is_set() else None)


def main(arguments: list[str]) -> None:
    """Entry point of a worker process: the job is the folder's own ``spec.json``.

    With ``--supervised`` the run pauses when standard input ends. Being asked to stop is no failure: the exit code is 0.
    """
    supervised = "--supervised" in arguments
    folders = [argument for argument in arguments if argument != "--supervised"]
    if len(folders) != 1:
        sys.exit("give one run folder, and --supervised or nothing")
    folder = Path(folders[0])

    def report(numbers: dict[str, Any], left: float) -> None:
        print(f"iteration {numbers['iteration']}  {describe(numbers)}  {left / 60:.1f} min left", flush=True)

    asked = _supervised(RunFolder(folder)) if supervised else None
    try:
        train(folder, parse_job(load_json(folder / "spec.json")), report, asked)
    except Stopped as stop:
        print(stop, flush=True)
    except MixGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        Ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
