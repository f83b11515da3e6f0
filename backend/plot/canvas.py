"""A surface to draw charts on, in units of its own; lines are anti-aliased, text is sharp at every size."""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Point = tuple[float, float]
Number = float | None

PAPER, INK, FAINT, GRID = (255, 255, 255), (40, 40, 40), (110, 110, 110), (232, 232, 232)
PALETTE: tuple[Colour, ...] = (
    (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (100, 100, 100),
)  # fmt: skip
"""Okabe and Ito's colours, which people who are colour-blind can tell apart too; the yellow, too pale on white, is a grey."""

TITLE, LABEL, TICK = 16, 13, 12  # font sizes
_LINE, _EDGE = 20, 12  # of notes
_FINER = 3  # shapes are drawn this many times larger, then shrunk
_BEYOND_ASCII = frozenset("©«°±´·»‘’“”…‹›⁄™")  # what else Pillow's own font can draw
_INSTEAD = str.maketrans({"–": "-", "—": "-", "−": "-", "×": "x", "≤": "<=", "≥": ">=", "σ": "sigma", "η": "eta", "ß": "ss"})


@dataclass(frozen=True)
class Box:
    """A part of a canvas, in its units."""

    left: float
    top: float
    right: float
    bottom: float


def known(value: Number) -> Number:
    """A number that can be drawn, or None."""
    return value if value is not None and math.isfinite(value) and abs(value) < 1e100 else None


def colour_of(index: int) -> Colour:
    """The colour of a series; when they are used up they come again, paler."""
    rounds, place = divmod(index, len(PALETTE))
    return paler(PALETTE[place], 0.5 if rounds % 2 else 1.0)


def paler(colour: Colour, share: float) -> Colour:
    """``share`` of the colour on paper, as an opaque colour."""
    return tuple(round(share * part + (1 - share) * white) for part, white in zip(colour, PAPER, strict=True))


def drawable(text: str) -> str:
    """The text in one line, in letters of Pillow's own font: accents are left out, and a letter that it lacks is a ``?``."""
    text = " ".join(str(text).translate(_INSTEAD).split())
    return "".join(letter if _has(letter) else _nearest(letter) for letter in text)


def _has(letter: str) -> bool:
    return letter.isascii() or letter in _BEYOND_ASCII


def _nearest(letter: str) -> str:
    parts = (part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(part))
    return "".join(part if _has(part) else "?" for part in parts)


@lru_cache(maxsize=64)
def font(size: float) -> ImageFont.FreeTypeFont:
    """Pillow's own font."""
    return ImageFont.load_default(size)


def text_width(text: str, size: float) -> float:
    """Width of a drawable text."""
    return font(size).getlength(text)


def cut(text: str, width: float, size: float) -> str:
    """The text in one drawable line, or what of it fits into ``width``, with an ellipsis."""
    text = drawable(text)
    if text_width(text, size) <= width:
        return text
    fits = bisect_right(range(len(text)), width, key=lambda end: text_width(f"{text[:end]}…", size))
    return f"{text[: max(0, fits - 1)].rstrip()}…"


def wrapped(text: str, width: float, size: float) -> list[str]:
    """The text in lines that fit into ``width``, broken between words."""
    lines: list[str] = []
    for word in drawable(text).split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [cut(line, width, size) for line in lines]


class Canvas:
    """A picture of ``width`` x ``height`` units, each ``scale`` pixels wide; (0, 0) is the upper left corner."""

    def __init__(self, width: float, height: float, scale: float = 1.0):
        self._size, self._scale = (round(width * scale), round(height * scale)), scale
        self._large = Image.new("RGB", (self._size[0] * _FINER, self._size[1] * _FINER), PAPER)
        self._shapes = ImageDraw.Draw(self._large)
        self._texts: list[tuple[Point, str, float, Colour, str]] = []

    def _up(self, *numbers: float) -> list[float]:
        return [number * self._scale * _FINER for number in numbers]

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """A filled box; nothing if it has no area."""
        left, top, right, bottom = (round(edge) for edge in self._up(left, top, right, bottom))
        if left < right and top < bottom:
            self._shapes.rectangle((left, top, right - 1, bottom - 1), fill=colour)

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.0) -> None:
        """A line with round corners and ends."""
        (thick,) = self._up(width)
        self._shapes.line([tuple(self._up(*point)) for point in points], fill=colour, width=max(1, round(thick)), joint="curve")
        for point in (points[0], points[-1]):
            self.dot(point, colour, width / 2)

    def dot(self, point: Point, colour: Colour, radius: float) -> None:
        """A filled circle."""
        x, y, r = self._up(*point, radius)
        self._shapes.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def area(self, points: Sequence[Point], colour: Colour) -> None:
        """A filled polygon."""
        self._shapes.polygon([tuple(self._up(*point)) for point in points], fill=colour)

    def whisker(self, start: Point, end: Point, colour: Colour) -> None:
        """An upright or level interval with a bar at either end."""
        upright = start[0] == end[0]
        for one, other, half_x, half_y in (
            (start, end, 1.0, 1.0),
            (start, start, *((4, 1.0) if upright else (1.0, 4))),
            (end, end, *((4, 1.0) if upright else (1.0, 4))),
        ):
            (left, right), (top, bottom) = (sorted(pair) for pair in zip(one, other, strict=True))
            self.box(left - half_x, top - half_y, right + half_x, bottom + half_y, colour)

    def text(self, point: Point, text: str, size: float, colour: Colour = INK, anchor: str = "la") -> None:
        """A line of drawable text; ``anchor`` as Pillow's."""
        self._texts.append((point, text, size, colour, anchor))

    def finish(self) -> Image.Image:
        """The picture, RGB."""
        picture = self._large.reduce(_FINER)
        draw = ImageDraw.Draw(picture)
        for (x, y), text, size, colour, anchor in self._texts:
            draw.text((x * self._scale, y * self._scale), text, fill=colour, font=font(size * self._scale), anchor=anchor)
        return picture


def note(canvas: Canvas, box: Box, text: str) -> None:
    """A sentence in the middle of an empty box."""
    canvas.box(box.left, box.top, box.right, box.bottom, paler(GRID, 0.4))
    lines = wrapped(text, box.right - box.left - 2 * _EDGE, LABEL)
    first = (box.top + box.bottom - (len(lines) - 1) * _LINE) / 2
    for index, line in enumerate(lines):
        canvas.text(((box.left + box.right) / 2, first + index * _LINE), line, LABEL, FAINT, "mm")
