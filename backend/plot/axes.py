"""Lines and marks in a pair of axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .canvas import (
    FAINT,
    GRID,
    INK,
    LABEL,
    TICK,
    TITLE,
    Box,
    Canvas,
    Colour,
    Number,
    Point,
    colour_of,
    cut,
    known,
    note,
    paler,
    text_width,
)
from .ticks import nice_ticks, tick_labels

SHADE: Colour = (255, 234, 196)
_TITLE_HEIGHT, _LEGEND_HEIGHT, _TICK_HEIGHT, _X_LABEL_HEIGHT = 26, 20, 20, 18
_SWATCH, _LEGEND_GAP = 18, 16
_TICK_WIDTH, _TICK_SPACE = 64, 36  # at least so far apart
_DOTTED = 25  # a line of so few values shows each of them
_LEVEL = ((9, 0), (-9, 0))  # where a mark's label may be, from nearest to farthest
_FAR = [(dx, dy) for dy in (18, -18, 32, -32, 46, -46, 60, -60, 74, -74) for dx in (18, -18, 50, -50)]
_DODGE, _DODGED_SHARE, _DOT = 13, 0.2, 4.5


@dataclass(frozen=True)
class Axes(Box):
    """The area that data is drawn in, and the ranges that it spans."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def place(self, x: float, y: float) -> Point:
        """Where the point (x, y) is drawn."""
        (x_low, x_high), (y_low, y_high) = self.x_range, self.y_range
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


@dataclass(frozen=True)
class Line:
    """Values against x, joined; None, NaN and infinities leave a gap.

    Attributes:
        x, y: as many of one as of the other.
        name: for the legend.
        low, high: edges of a band around the line, or nothing.
        mean_over: when not 0, the values are thin, and a thick line is the mean of each and those before it, so many at most.
    """

    x: Sequence[float]
    y: Sequence[Number]
    name: str = ""
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    mean_over: int = 0


@dataclass(frozen=True)
class Mark:
    """A point with a label, and a whisker from ``low`` to ``high`` when both are known.

    Those of the same x are drawn beside one another.
    """

    x: float
    y: float
    label: str = ""
    low: Number = None
    high: Number = None
    colour: Colour = colour_of(0)


@dataclass(frozen=True)
class Plot:
    """Lines and marks in one pair of axes.

    Attributes:
        shaded: ranges of x.
        shaded_name: what they are, for the legend.
        whole_x: x counts something, so that ticks are whole numbers.
        from_zero: the y axis begins at 0, if no value is below.
        note: said instead, when there is nothing to draw.
    """

    title: str
    x_label: str = ""
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    shaded: Sequence[tuple[float, float]] = ()
    shaded_name: str = ""
    whole_x: bool = False
    from_zero: bool = False
    note: str = "no data"

    def axes(self, box: Box) -> Axes:
        """Where the data of this plot goes when it is drawn into ``box``."""
        x_range, y_range = self._x_range(), self._y_range()
        top = box.top + _TITLE_HEIGHT + _LEGEND_HEIGHT * len(self._legend(box)) + 4
        bottom = box.bottom - _TICK_HEIGHT - (_X_LABEL_HEIGHT if self.x_label else 0)
        labels = tick_labels(self._y_ticks(y_range, bottom - top))
        left = box.left + 8 + max((text_width(label, TICK) for label in labels), default=0)
        return Axes(left, top, box.right - 6, bottom, x_range, y_range)

    def draw(self, canvas: Canvas, box: Box) -> None:
        """Draw it into ``box``."""
        axes = self.axes(box)
        canvas.text((axes.left, box.top), cut(self.title, box.right - axes.left, TITLE), TITLE)
        if not self._values():
            note(canvas, axes, self.note)
            return
        self._draw_legend(canvas, box, axes)
        for low, high in self.shaded:
            edges = [min(max(axes.place(x, 0)[0], axes.left), axes.right) for x in (low, high)]
            canvas.box(edges[0], axes.top, edges[1], axes.bottom, SHADE)
        self._draw_grid(canvas, axes)
        for line, colour in self._coloured():
            _draw_band(canvas, axes, line, colour)
        for line, colour in self._coloured():
            _draw_line(canvas, axes, line, colour)
        _draw_marks(canvas, axes, self.marks)

    def _coloured(self) -> Iterator[tuple[Line, Colour]]:
        return ((line, colour_of(index)) for index, line in enumerate(self.lines))

    def _values(self) -> list[float]:
        rows = [values for line in self.lines for values in (line.y, line.low, line.high)]
        rows += [(mark.y, mark.low, mark.high) for mark in self.marks]
        return [value for row in rows for value in row if known(value) is not None]

    def _x_range(self) -> tuple[float, float]:
        values = [x for line in self.lines for x in line.x] + [mark.x for mark in self.marks]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if low == high:
            return low - 0.5, high + 0.5
        dotted = any(_is_dotted(line) for line in self.lines)
        room = (high - low) * (0.08 if self.marks else 0.02 if dotted else 0.0)
        return low - room, high + room

    def _y_range(self) -> tuple[float, float]:
        values = self._values() + ([0.0] if self.from_zero else [])
        low, high = min(values, default=0.0), max(values, default=1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            room = abs(high) * 0.1 or 0.5
        else:
            room = (high - low) * 0.06
        return (low if self.from_zero and low == 0 else low - room), high + room

    @staticmethod
    def _y_ticks(y_range: tuple[float, float], height: float) -> list[float]:
        return nice_ticks(*y_range, max(2, int(height / _TICK_SPACE)))

    def _draw_grid(self, canvas: Canvas, axes: Axes) -> None:
        y_ticks = self._y_ticks(axes.y_range, axes.bottom - axes.top)
        for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
            y = axes.place(0, tick)[1]
            canvas.box(axes.left, y - 0.5, axes.right, y + 0.5, GRID)
            canvas.text((axes.left - 6, y), label, TICK, FAINT, "rm")
        x_ticks = nice_ticks(*axes.x_range, max(2, int((axes.right - axes.left) / _TICK_WIDTH)), self.whole_x)
        for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
            x = axes.place(tick, 0)[0]
            canvas.box(x - 0.5, axes.top, x + 0.5, axes.bottom, GRID)
            canvas.text((x, axes.bottom + 6), label, TICK, FAINT, "ma")
        canvas.box(axes.left, axes.bottom - 0.5, axes.right, axes.bottom + 0.5, FAINT)
        canvas.box(axes.left - 0.5, axes.top, axes.left + 0.5, axes.bottom, FAINT)
        if self.x_label:
            centre = (axes.left + axes.right) / 2
            name = cut(self.x_label, axes.right - axes.left, LABEL)
            canvas.text((centre, axes.bottom + _TICK_HEIGHT + 2), name, LABEL, INK, "ma")

    def _legend(self, box: Box) -> list[list[tuple[str, Colour, bool]]]:
        """Its lines, each of (text, colour, is an area); nothing when there is nothing to draw."""
        if not self._values():
            return []
        entries = [(line.name, colour, False) for line, colour in self._coloured() if line.name]
        entries += [(self.shaded_name, SHADE, True)] if self.shaded and self.shaded_name else []
        room, rows, used = box.right - box.left - 60, [], math.inf
        for name, colour, area in entries:
            name = cut(name, room - _SWATCH, LABEL)
            width = _SWATCH + 6 + text_width(name, LABEL) + _LEGEND_GAP
            if used + width > room + _LEGEND_GAP:
                rows.append([])
                used = 0.0
            rows[-1].append((name, colour, area))
            used += width
        return rows

    def _draw_legend(self, canvas: Canvas, box: Box, axes: Axes) -> None:
        for index, row in enumerate(self._legend(box)):
            x, y = axes.left, box.top + _TITLE_HEIGHT + (index + 0.5) * _LEGEND_HEIGHT - 3
            for name, colour, area in row:
                half = 5 if area else 1.5
                canvas.box(x, y - half, x + _SWATCH, y + half, colour)
                canvas.text((x + _SWATCH + 6, y), name, LABEL, INK, "lm")
                x += _SWATCH + 6 + text_width(name, LABEL) + _LEGEND_GAP


def _runs(x: Sequence[float], *rows: Sequence[Number]) -> list[list[tuple[float, ...]]]:
    """(x, a value of every row) where all are known, parted at the gaps."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for place, *values in zip(x, *rows, strict=True):
        if any(known(value) is None for value in values):
            runs.append([])
        else:
            runs[-1].append((place, *values))
    return [run for run in runs if run]


def running_mean(values: Sequence[Number], span: int) -> list[Number]:
    """Mean of each value and those before it, ``span`` at most; a gap where all of them are gaps."""
    windows = ([v for v in values[max(0, end - span) : end] if known(v) is not None] for end in range(1, len(values) + 1))
    return [sum(seen) / len(seen) if seen else None for seen in windows]


def _is_dotted(line: Line) -> bool:
    return len(line.x) <= _DOTTED and not line.mean_over


def _draw_band(canvas: Canvas, axes: Axes, line: Line, colour: Colour) -> None:
    if not line.low:
        return
    for run in _runs(line.x, line.low, line.high):
        low, high = [axes.place(x, low) for x, low, _ in run], [axes.place(x, high) for x, _, high in run]
        canvas.area([*low, *reversed(high)], paler(colour, 0.2))
        if len(run) <= _DOTTED:
            for (x, bottom), (_, top) in zip(low, high, strict=True):
                canvas.whisker((x, bottom), (x, top), paler(colour, 0.6))


def _draw_line(canvas: Canvas, axes: Axes, line: Line, colour: Colour) -> None:
    thin = (paler(colour, 0.4), 1.2) if line.mean_over else (colour, 2.2)
    _draw_joined(canvas, axes, line.x, line.y, *thin, dots=_is_dotted(line))
    if line.mean_over:
        _draw_joined(canvas, axes, line.x, running_mean(line.y, line.mean_over), colour, 2.6, dots=False)


def _draw_joined(
    canvas: Canvas, axes: Axes, x: Sequence[float], y: Sequence[Number], colour: Colour, width: float, dots: bool
) -> None:
    for run in _runs(x, y):
        places = [axes.place(*point) for point in run]
        if len(places) > 1:
            canvas.line(places, colour, width)
        for place in places if dots or len(places) == 1 else ():
            canvas.dot(place, colour, width * 1.5)


def _draw_marks(canvas: Canvas, axes: Axes, marks: Sequence[Mark]) -> None:
    """Marks, their whiskers, and those of their labels that find room near them."""
    placed = [(mark, _beside(axes, mark, marks)) for mark in marks if known(mark.y) is not None]
    taken: list[Box] = []
    for mark, (x, y) in placed:
        if known(mark.low) is not None and known(mark.high) is not None:
            bottom, top = (axes.place(0, edge)[1] for edge in (mark.low, mark.high))
            canvas.whisker((x, bottom), (x, top), paler(mark.colour, 0.7))
            taken.append(Box(x - 2, top, x + 2, bottom))
        canvas.dot((x, y), mark.colour, _DOT)
        taken.append(Box(x - _DOT, y - _DOT, x + _DOT, y + _DOT))
    far = [entry for entry in placed if not _draw_label(canvas, axes, *entry, taken, _LEVEL)]
    for entry in far:
        _draw_label(canvas, axes, *entry, taken, _FAR)


def _draw_label(canvas: Canvas, axes: Axes, mark: Mark, place: Point, taken: list[Box], offsets: Sequence[Point]) -> bool:
    """The label in the first place that nothing has taken; False if there is none. A line leads to one above or below."""
    text = cut(mark.label, 0.4 * (axes.right - axes.left), TICK)
    width, half, (x, y) = text_width(text, TICK), TICK / 2 + 1, place
    for dx, dy in offsets:
        left = x + dx - (width if dx < 0 else 0)
        box = Box(left, y + dy - half, left + width, y + dy + half)
        if _inside(box, axes) and not any(_overlap(box, other) for other in taken):
            if dy:
                canvas.line([place, (x + dx - math.copysign(3, dx), y + dy)], paler(mark.colour, 0.6))
            canvas.text((left, y + dy), text, TICK, INK, "lm")
            taken.append(box)
            return True
    return False


def _beside(axes: Axes, mark: Mark, marks: Sequence[Mark]) -> Point:
    """Where a mark is drawn: those of one x stand beside one another around it, as far as that leaves them near it."""
    same = [other for other in marks if other.x == mark.x and known(other.y) is not None]
    index = next(index for index, other in enumerate(same) if other is mark)
    room = min(_DODGE, _DODGED_SHARE * (axes.right - axes.left) / len(same))
    x, y = axes.place(mark.x, mark.y)
    return x + (index - (len(same) - 1) / 2) * room, y


def _inside(box: Box, area: Box) -> bool:
    return box.left >= area.left and box.right <= area.right + 6 and box.top >= area.top and box.bottom <= area.bottom


def _overlap(one: Box, other: Box) -> bool:
    return one.left < other.right and other.left < one.right and one.top < other.bottom and other.top < one.bottom
