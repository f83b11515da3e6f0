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
_INK, _FAINT, _PAPER, _GREEN, _RED = (40, 40, 40), (110, 110, 110), (250, 250, 250), (30, 140, 60), (190, 40, 40)


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


@dataclass(frozen=True)
class GridColumn:
    """Pictures (R, 3, H, W) in [0, 1] of one column, with a label and a note above them."""

    pictures: torch.Tensor
    label: str
    note: str = ""


def comparison_grid(
    columns: Sequence[GridColumn], row_labels: Sequence[str], titles: Sequence[str] = (), cell: int = 128
) -> Image.Image:
    """Columns of R pictures of one size side by side, with labels above and at the left.

    Args:
        row_labels: R, one for every row.
        titles: R, what stands above a row across all columns; "" for nothing. May be left out.
        cell: longer side of every picture, in pixels.
    """
    label_font, font = ImageFont.load_default(_TITLE_FONT), ImageFont.load_default(_LABEL_FONT)
    size = _scaled(columns[0].pictures.shape[-1], columns[0].pictures.shape[-2], cell)
    across, down = size[0] + _GAP, size[1] + _GAP
    headings = [_lines(column.label, size[0], 2) for column in columns]
    left = _GAP + max((round(font.getlength(label)) for label in row_labels), default=0) + _GAP
    top = _GAP + _LABEL * (max(map(len, headings)) + 1)
    titles = [*titles, *[""] * (len(row_labels) - len(titles))]
    width = left + len(columns) * across
    sheet = Image.new("RGB", (width, top + len(titles) * down + _TITLE * sum(map(bool, titles))), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, heading in enumerate(headings):
        for line, text in enumerate(heading):
            draw.text((left + column * across, _GAP + line * _LABEL), text, fill=_INK, font=label_font)
        place = left + column * across, _GAP + len(heading) * _LABEL
        draw.text(place, _cut(columns[column].note, size[0]), fill=_FAINT, font=font)
    for row, (label, title) in enumerate(zip(row_labels, titles, strict=True)):
        if title:
            draw.text((_GAP, top + 2), _cut(title, width - 2 * _GAP), fill=_INK, font=label_font)
            top += _TITLE
        draw.text((_GAP, top + size[1] // 2), label, fill=_FAINT, font=font, anchor="lm")
        for column, shown in enumerate(columns):
            (image,) = to_images(shown.pictures[row : row + 1])
            sheet.paste(image.resize(size, Image.Resampling.LANCZOS), (left + column * across, top))
        top += down
    return sheet


def _lines(text: str, width: int, most: int) -> list[str]:
    """The text in lines that fit, broken between words; at most so many, the last of them with an ellipsis if it was cut."""
    font = ImageFont.load_default(_TITLE_FONT)
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (font.getlength(longer) <= width or len(lines) == most):
            lines[-1] = longer
        else:
            lines.append(word)
    return [_cut(line, width) for line in lines]


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
