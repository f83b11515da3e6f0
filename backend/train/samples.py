"""The sheet of the newest pictures, for whoever watches a run. It looks at a rollout and has no say in any number."""

from __future__ import annotations

import math
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from PIL.Image import Image

from ..pictures import contact_sheet, save_picture
from ..specs import TrainSpec
from .run_folder import RunFolder

if TYPE_CHECKING:
    from .trainer import Rollout

_LEAST_SECONDS = 1.0
_GROUPS, _MEMBERS = 4, 16


class SampleSheets:
    """Writes ``samples/iteration_NNNNNN.png``; sheets of iterations that have a LoRA stay, of all others only the newest."""

    def __init__(self, run: RunFolder, spec: TrainSpec):
        self._run, self._spec = run, spec
        self._folder = run.path / "samples"
        self._written = -math.inf

    def show(self, iteration: int, batch: Rollout, due: bool) -> None:
        """Write the sheet of an iteration's rollout, unless the last one is not a second old and no checkpoint is ``due``.

        Raises:
            StorageError: it cannot be written.
        """
        if not due and monotonic() - self._written < _LEAST_SECONDS:
            return
        sheet = save_picture(self._folder / f"iteration_{iteration:06d}.png", self._sheet(batch))
        self._written = monotonic()
        self._remove_others(sheet)

    def _sheet(self, batch: Rollout) -> Image:
        """The first members of the first groups, one row a prompt, every picture with its mixed advantage."""
        size, rows = len(batch.pictures) // len(batch.prompts), min(_GROUPS, len(batch.prompts))
        columns = min(_MEMBERS, size)
        pictures = batch.pictures.unflatten(0, (-1, size))[:rows, :columns].flatten(0, 1)
        labels = [f"{value:+.2f}" for value in batch.advantages.values[:rows, :columns].flatten().tolist()]
        titles = [self._spec.prompts[row] for row in batch.prompts[:rows].tolist()]
        return contact_sheet(pictures, columns, labels, titles)

    def _remove_others(self, newest: Path) -> None:
        kept = self._run.lora_iterations()
        for file in self._folder.glob("iteration_*.png"):
            number = file.stem.removeprefix("iteration_")
            if file == newest or not number.isdecimal() or int(number) in kept:
                continue
            try:
                file.unlink(missing_ok=True)
            except OSError:  # Windows, while somebody reads it: it goes with a later one
                continue
