"""Labelled Pictures: rows of pictures under one another, to compare what a setting or a LoRA does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from comfy_api.latest import io

from ..backend.errors import MixGRPOError
from ..backend.lab.scores import weighted_sum
from ..backend.pictures import SheetRow, sheet_of_rows
from ..backend.specs import RewardSpec
from .score import json_number, prompts_for, score_images
from .types import CATEGORY, PictureRows, Rewards

_COLUMNS = 8
_SMALLEST_CELL, _LARGEST_CELL = 128, 256


class RowsError(MixGRPOError):
    """Pictures that cannot be put into a row."""


@dataclass(frozen=True)
class PictureRow:
    """Pictures (N, 3, H, W) in [0, 1] on the CPU, and their scores (N,), NaN where one could not be scored."""

    label: str
    pictures: torch.Tensor
    scores: torch.Tensor | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the scores that there are; None if there is none."""
        return None if self.scores is None else json_number(self.scores.nanmean())

    @property
    def title(self) -> str:
        """What stands above the row: label, mean score, number of pictures."""
        count = len(self.pictures)
        parts = [
            self.label.strip(),
            "" if self.mean is None else f"mean {self.mean:.2f}",
            "1 picture" if count == 1 else f"{count} pictures",
        ]
        return " · ".join(part for part in parts if part)

    @property
    def captions(self) -> list[str]:
        """What stands below each picture: its score."""
        scores = [] if self.scores is None else self.scores.tolist()
        return ["no score" if score != score else f"{score:.2f}" for score in scores]

    @property
    def summary(self) -> dict[str, Any]:
        """What ``/history`` keeps of the row."""
        return {"label": self.label, "pictures": len(self.pictures), "mean": self.mean}


def make_row(images: torch.Tensor, label: str, rewards: tuple[RewardSpec, ...] | None, prompts: str) -> PictureRow:
    """A row of an IMAGE (N, height, width, 3 or 4) in [0, 1], scored when there are rewards; transparency is ignored.

    Raises:
        RowsError: there is no picture, or no colour picture.
        ScoreError, ScorerError, BatchError: pictures, prompts and rewards do not go together.
    """
    if images.ndim != 4 or images.shape[-1] not in (3, 4) or 0 in images.shape:
        raise RowsError(
            f"the row {label!r} was given {tuple(images.shape)} (pictures, height, width, channels); connect an IMAGE with at "
            "least one picture of 3 or 4 channels"
        )
    images = images[..., :3].float().cpu()
    scores = None
    if rewards:
        scores = weighted_sum(score_images(images, prompts_for(prompts, len(images)), rewards), rewards)
    return PictureRow(label, images.movedim(-1, 1), scores)


def draw_rows(rows: tuple[PictureRow, ...]) -> torch.Tensor:
    """All rows on one sheet, as an IMAGE (1, height, width, 3)."""
    columns = min(_COLUMNS, max(len(row.pictures) for row in rows))
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, *(side for row in rows for side in row.pictures.shape[2:])))
    sheet = sheet_of_rows([SheetRow(row.pictures, row.title, row.captions) for row in rows], columns, cell)
    return torch.from_numpy(numpy.array(sheet)).float().div(255)[None]


class LabelledPictures(io.ComfyNode):
    """Puts a batch as one row under the rows given before."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_PictureRows",
            display_name="Labelled Pictures",
            category=CATEGORY,
            description="Puts pictures with a label, and their scores if you like, under rows of other pictures, to compare.",
            inputs=[
                io.Image.Input("images", tooltip="The pictures of this row; eight stand side by side, more go on below."),
                io.String.Input("label", default="pictures", tooltip="What the row is called in its title."),
                PictureRows.Input("rows", optional=True, tooltip="Rows that this one is put under."),
                Rewards.Input(
                    "rewards", optional=True,
                    tooltip="Labels every picture with its score, the sum of weight x reward, and the row with the mean.",
                ),
                io.String.Input(
                    "prompts", multiline=True, default="", optional=True,
                    tooltip="What the pictures should show, when rewards are connected: one line for all, or one line for each "
                    "group.",
                ),
            ],
            outputs=[
                PictureRows.Output("rows_out", display_name="ROWS", tooltip="For the next row's input."),
                io.Image.Output("grid", display_name="grid", tooltip="All rows so far, as one picture."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, images, label, rows=None, rewards=None, prompts="") -> io.NodeOutput:
        everything = (*(rows or ()), make_row(images, label, rewards, prompts))
        return io.NodeOutput(everything, draw_rows(everything), ui={"mixgrpo_rows": [row.summary for row in everything]})
