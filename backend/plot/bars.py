"""Horizontal bars: a row for each thing, a column for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .canvas import FAINT, INK, LABEL, TICK, TITLE, Box, Canvas, Number, colour_of, cut, known, note, text_width
from .ticks import figure

_ROW, _HIGHEST_ROW, _HEADER, _TITLE_HEIGHT, _GAP = 28, 38, 50, 30, 14
_LABEL_SHARE = 0.22  # of the width, at most
_WIDER = 1.7  # a column with intervals
_UNKNOWN = "-"


@dataclass(frozen=True)
class Column:
    """One quantity of every row: bars from 0, whiskers from ``low`` to ``high`` where both are known, and the number."""

    title: str
    values: Sequence[Number]
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()

    def interval(self, row: int) -> tuple[float, float] | None:
        """The ends of a row's whisker."""
        if not self.low or known(self.low[row]) is None or known(self.high[row]) is None:
            return None
        return self.low[row], self.high[row]

    def range(self) -> tuple[float, float]:
        """0, every bar and every whisker."""
        ends = [end for row in range(len(self.values)) for end in self.interval(row) or ()]
        numbers = [0.0, *ends, *(value for value in self.values if known(value) is not None)]
        low, high = min(numbers), max(numbers)
        return (low, high) if low < high else (low, low + 1)


@dataclass(frozen=True)
class Bars:
    """The rows; ``labels`` and every column's values are as many. ``note`` is said instead when there is none."""

    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    note: str = "no data"

    @property
    def height(self) -> float:
        """What the rows need; they fill more, if there is more."""
        return _HEADER + _ROW * len(self.labels) + 4

    def cells(self, box: Box) -> list[Box]:
        """The columns of the first row, with room for the number on the right of every bar."""
        labels = max((text_width(cut(label, self._label_room(box), LABEL), LABEL) for label in self.labels), default=0)
        left = box.left + labels + _GAP
        shares = [_WIDER if column.low else 1.0 for column in self.columns]
        edges = [left + (box.right - left + _GAP) * before / sum(shares) for before in accumulate(shares, initial=0.0)]
        top = box.top + _HEADER
        row = min(_HIGHEST_ROW, (box.bottom - top) / max(1, len(self.labels)))
        return [Box(start, top, end - _GAP, top + row) for start, end in pairwise(edges)]

    @staticmethod
    def _label_room(box: Box) -> float:
        return _LABEL_SHARE * (box.right - box.left)

    def draw(self, canvas: Canvas, box: Box) -> None:
        """Draw it into ``box``, from its top."""
        canvas.text((box.left, box.top), cut(self.title, box.right - box.left, TITLE), TITLE)
        if not self.labels or not self.columns:
            note(canvas, Box(box.left, box.top + _TITLE_HEIGHT, box.right, box.bottom), self.note)
            return
        cells = self.cells(box)
        for row, label in enumerate(self.labels):
            middle = box.top + _HEADER + (row + 0.5) * (cells[0].bottom - cells[0].top)
            canvas.text((box.left, middle), cut(label, self._label_room(box), LABEL), LABEL, INK, "lm")
        for column, cell in zip(self.columns, cells, strict=True):
            canvas.text((cell.left, cell.top - 8), cut(column.title, cell.right - cell.left, TICK), TICK, FAINT, "ls")
            _draw_column(canvas, cell, column)


def bar_place(cell: Box, column: Column, value: float) -> float:
    """Where along x a value of the column is."""
    low, high = column.range()
    numbers = max(text_width(_number(value), TICK) for value in column.values) + 10
    return cell.left + (value - low) / (high - low) * (cell.right - cell.left - numbers)


def _number(value: Number) -> str:
    return _UNKNOWN if known(value) is None else figure(value)


def _draw_column(canvas: Canvas, cell: Box, column: Column) -> None:
    zero, height = bar_place(cell, column, 0.0), cell.bottom - cell.top
    for row, value in enumerate(column.values):
        top, interval = cell.top + row * height, column.interval(row)
        ends = [zero]
        if known(value) is not None:
            ends += [bar_place(cell, column, value)]
            canvas.box(min(ends), top + 0.18 * height, max(ends), top + 0.82 * height, colour_of(row))
        if interval:
            whisker = [(bar_place(cell, column, end), top + height / 2) for end in interval]
            canvas.whisker(*whisker, INK)
            ends += [x for x, _ in whisker]
        canvas.text((max(ends) + 7, top + height / 2), _number(value), TICK, INK, "lm")
    canvas.box(zero - 0.5, cell.top, zero + 0.5, cell.top + len(column.values) * height, FAINT)
