"""The same few pictures after every checkpoint, drawn from the same noise without any randomness: what training has changed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from ..pictures import contact_sheet, save_picture
from .evaluate import draw_rows
from .run_folder import RunFolder
from .trainer import Trainer

_PROMPTS = 4


class FixedPictures:
    """Writes ``fixed/fixed_NNNNNN.png``: up to four of the job's prompts, each with the seeds 0, 1, … by the plain ODE.

    It draws nothing from a random generator and leaves no count behind, so a run with it and one without train the same bits.
    """

    def __init__(self, run: RunFolder, trainer: Trainer):
        self._folder, self._trainer = run.path / "fixed", trainer
        spec = trainer.spec
        count = min(_PROMPTS, len(spec.prompts), spec.fixed_pictures)
        self._rows = [place * len(spec.prompts) // count for place in range(count)]
        self._seeds = spec.fixed_pictures // count if count else 0

    def begin(self) -> None:
        """Draw the present iteration's, unless it is there: a run's beginning, or what a kill has prevented (collective)."""
        there = self._trainer.ranks.first and self._file().exists()
        if not self._trainer.ranks.largest({"there": float(there)})["there"]:
            self.draw()

    def draw(self) -> None:
        """Draw the present iteration's (a collective call: sharded models are asked by all ranks together).

        Raises:
            StorageError: it cannot be written.
        """
        if not self._rows:
            return
        one, spec = self._trainer, self._trainer.spec
        rows = torch.tensor(self._rows).repeat_interleave(self._seeds)
        seeds = list(range(self._seeds)) * len(self._rows)
        exported = one.ema.swapped_in() if spec.exported_weights == "ema" else nullcontext()
        with one.counter.phase("fixed"), exported:
            pictures = draw_rows(one.model, one.guided_velocity(), rows, seeds, spec.sampling, len(seeds))
        one.counter.rows.pop("fixed")  # they belong to no iteration
        if one.ranks.first:
            titles = [spec.prompts[row] for row in self._rows]
            sheet = contact_sheet(pictures, self._seeds, [f"seed {seed}" for seed in seeds], titles)
            save_picture(self._file(), sheet)

    def _file(self) -> Path:
        return self._folder / f"fixed_{self._trainer.iteration:06d}.png"
