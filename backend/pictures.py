"""Pictures for people: labelled contact sheets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from .files import write_atomically

_GAP, _TITLE, _LABEL = 6, 20, 15
_TITLE_FONT, _LABEL_FONT = 12, 11
_TITLED_WIDTH = 320  # a title needs room, even above one small picture
_INK, _PAPER, _GREEN, _RED = (40, 40, 40), (250, 250, 250), (30, 140, 60), (190, 40, 40)


def to_images(pictures: torch.Tensor) -> list[Image.Image]:
    """Pictures (N, 3, H, W) in [0, 1] as Pillow images."""
    pixels = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in pixels]


@dataclass(frozen=True)
class SheetRow:
    """Pictures (N, 3, H, W) in [0, 1] that belong together, with a title above them and a label below each of them."""

    pictures: torch.Tensor
    title: str = ""
    labels: Sequence[str] = ()


def contact_sheet(
    pictures: torch.Tensor, columns: int, labels: Sequence[str] = (), titles: Sequence[str] = (), cell: int = 96
) -> Image.Image:
    """Pictures (N, 3, H, W) in rows of ``columns``; a title above every row, a label below every picture.

    A label that begins with + is green, one that begins with - red.
    """
    starts = range(0, len(pictures), columns)
    rows = [
        SheetRow(pictures[start : start + columns], title, labels[start : start + columns])
        for start, title in zip_longest(starts, titles[: len(starts)], fillvalue="")
    ]
    return sheet_of_rows(rows, columns, cell, signs=True)


def sheet_of_rows(rows: Sequence[SheetRow], columns: int, cell: int, signs: bool = False) -> Image.Image:
    """Rows of pictures of any size, each in its own proportions with ``cell`` as its longer side; long rows go on below.

    Args:
        columns: pictures side by side, at most.
        cell: longer side of every picture, in pixels.
        signs: a label that begins with + is green, one that begins with - red.
    """
    titled, labelled = any(row.title for row in rows), any(row.labels for row in rows)
    sizes = [_scaled(row.pictures.shape[-1], row.pictures.shape[-2], cell) for row in rows]
    box = max(width for width, _ in sizes), max(height for _, height in sizes)
    title_height, line_height = _TITLE if titled else 0, box[1] + (_LABEL if labelled else 0) + _GAP
    lines = [-(-len(row.pictures) // columns) for row in rows]
    width = max(columns * (box[0] + _GAP) + _GAP, _TITLED_WIDTH if titled else 0)
    sheet = Image.new("RGB", (width, len(rows) * title_height + sum(lines) * line_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    top = 0
    for row, size, count in zip(rows, sizes, lines, strict=True):
        draw.text((_GAP, _GAP + top + 2), _cut(row.title, width - 2 * _GAP), fill=_INK, font=ImageFont.load_default(_TITLE_FONT))
        for index, picture in enumerate(row.pictures.split(1)):  # one at a time, since they may be large and on a GPU
            (image,) = to_images(picture)
            line, column = divmod(index, columns)
            corner = _GAP + column * (box[0] + _GAP), _GAP + top + title_height + line * line_height
            centred = tuple(edge + (room - side) // 2 for edge, room, side in zip(corner, box, size, strict=True))
            sheet.paste(image.resize(size, Image.Resampling.LANCZOS), centred)
            if row.labels:
                colour = {"+": _GREEN, "-": _RED}.get(row.labels[index][:1], _INK) if signs else _INK
                place = corner[0], corner[1] + box[1] + 1
                draw.text(place, row.labels[index], fill=colour, font=ImageFont.load_default(_LABEL_FONT))
        top += title_height + count * line_height
    return sheet


def _scaled(width: int, height: int, longer: int) -> tuple[int, int]:
    """The size with ``longer`` as its longer side."""
    return tuple(max(1, round(side * longer / max(width, height))) for side in (width, height))


def _cut(text: str, width: int) -> str:
    """The text in one line, or what of it fits, with an ellipsis."""
    text = " ".join(text.split())
    font = ImageFont.load_default(_TITLE_FONT)
    if font.getlength(text) <= width:
        return text
    fits = bisect_right(range(len(text)), width, key=lambda end: font.getlength(f"{text[:end]}…"))
    return f"{text[: max(0, fits - 1)]}…"


def save_picture(path: Path, picture: Image.Image) -> Path:
    """Write a PNG atomically."""
    return write_atomically(path, lambda temporary: picture.save(temporary, format="PNG"))
