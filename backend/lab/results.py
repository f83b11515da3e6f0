"""What a comparison leaves: the table, the grid of pictures, the chart, and the files that they are kept in."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..files import save_json, write_atomically
from ..pictures import GridColumn, comparison_grid, save_picture
from ..plot import compare_chart
from ..specs import RewardSpec
from .compare import Result
from .entries import Case, LabError
from .scores import score_pictures
from .table import COLUMNS, make_table

_SMALLEST_CELL, _LARGEST_CELL = 128, 256


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    Attributes:
        settings: what was compared, as plain data.
        rows: the table, see :func:`~.table.make_table`.
        grid: rows are cases, columns are entries; of each group its first sample. Of a single case rows are the group's samples.
    """

    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    grid: Image.Image

    @property
    def chart(self) -> Image.Image:
        """Quality against cost, and what was measured, as bars."""
        return compare_chart(self.rows)

    @property
    def json(self) -> dict[str, Any]:
        """Settings and table as one object."""
        return {"settings": self.settings, "table": self.rows}

    def save(self, folder: Path) -> None:
        """Write table.csv, table.json, grid.png and chart.png into a folder."""
        save_json(folder / "table.json", self.json)
        write_atomically(folder / "table.csv", self._write_csv)
        save_picture(folder / "grid.png", self.grid)
        save_picture(folder / "chart.png", self.chart)

    def _write_csv(self, path: Path) -> None:
        names = list(self.rows[0]["scores"])
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, *names])
            writer.writerows([*(row[name] for name in COLUMNS), *(row["scores"][name] for name in names)] for row in self.rows)


def conclude(
    settings: dict[str, Any],
    results: Sequence[Result],
    pictures: Sequence[Tensor],
    cases: Sequence[Case],
    rewards: Sequence[RewardSpec],
) -> Comparison:
    """Score, tabulate and lay out.

    Args:
        pictures: for every result (cases, G, 3, H, W) in [0, 1].
    """
    prompts = [case.prompt for case in cases for _ in range(pictures[0].shape[1])]
    scores = [
        {name: value.view(shown.shape[:2]) for name, value in score_pictures(shown.flatten(0, 1), prompts, rewards).items()}
        for shown in pictures
    ]
    rows = make_table(results, scores, rewards)
    return Comparison(settings, rows, _grid(rows, pictures, cases))


def _grid(rows: Sequence[dict[str, Any]], pictures: Sequence[Tensor], cases: Sequence[Case]) -> Image.Image:
    columns = []
    for row, shown in zip(rows, pictures, strict=True):
        reward = "" if row["reward_mean"] is None else f" · reward {row['reward_mean']:.2f}"
        down = shown[:, 0] if len(cases) > 1 else shown[0]
        columns.append(GridColumn(torch.nan_to_num(down), row["label"], f"NFE {row['nfe']:g}{reward}"))
    labels, titles = _row_labels(cases, pictures[0].shape[1])
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, *pictures[0].shape[-2:]))
    return comparison_grid(columns, labels, titles, cell)


def _row_labels(cases: Sequence[Case], group_size: int) -> tuple[list[str], list[str]]:
    """What stands beside and above the rows of the grid."""
    if len(cases) == 1:
        words = (cases[0].prompt, f"seed {cases[0].seed}")
        return [f"sample {member}" for member in range(group_size)], [" · ".join(filter(None, words))]
    new = [not place or case.prompt != cases[place - 1].prompt for place, case in enumerate(cases)]
    titles = [case.prompt if first else "" for case, first in zip(cases, new, strict=True)]
    return [f"seed {case.seed}" for case in cases], titles


def fresh_folder(parent: Path) -> Path:
    """Make and return the first of compare_00001, compare_00002, … in ``parent`` that does not exist.

    Raises:
        LabError: nothing can be made there.
    """
    for number in count(1):
        folder = parent / f"compare_{number:05d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise LabError(f"cannot make a folder for the results: {error}; free some space or change its rights") from error
