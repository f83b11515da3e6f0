"""Whole pictures: panels side by side, the course of a training, samplers compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from .axes import Line, Mark, Plot
from .bars import Bars, Column
from .canvas import Box, Canvas, Number, colour_of, known

_MARGIN = 14
_PANEL_WIDTH, _PANEL_HEIGHT = 520, 350
_SCATTER_WIDTH, _SCATTER_HEIGHT, _COLUMN_WIDTH, _LABELS_WIDTH = 460, 360, 132, 200
_COLUMNS = (("NFE", "nfe"), ("model rows", "rows"), ("seconds", "seconds"), ("RMSE", "rmse"), ("diversity", "diversity"))


def panel_boxes(count: int, columns: int) -> list[Box]:
    """Where :func:`draw_panels` puts its panels, in units of which a panel is 520 wide."""
    places = (divmod(index, columns) for index in range(count))
    return [
        Box(
            column * _PANEL_WIDTH + _MARGIN, row * _PANEL_HEIGHT + _MARGIN,
            (column + 1) * _PANEL_WIDTH - _MARGIN, (row + 1) * _PANEL_HEIGHT - _MARGIN,
        )
        for row, column in places
    ]  # fmt: skip


def draw_panels(panels: Sequence[Plot], columns: int, width: int | None = None) -> Image.Image:
    """Panels of one size in rows of ``columns``; in a picture of ``width`` pixels, if it is given, text and all is scaled."""
    columns = max(1, min(columns, len(panels)))
    whole = columns * _PANEL_WIDTH
    canvas = Canvas(whole, -(-len(panels) // columns) * _PANEL_HEIGHT, (width or whole) / whole)
    for panel, box in zip(panels, panel_boxes(len(panels), columns), strict=True):
        panel.draw(canvas, box)
    return canvas.finish()


def curve_panel(title: str, iterations: Sequence[float], series: Mapping[str, Sequence[Number]]) -> Plot:
    """One line for every series, thin, and its running mean, thick; the mean is over an eighth of the iterations, at least 3."""
    span = max(3, math.ceil(len(iterations) / 8))
    lines = [Line(iterations, values, name.replace("_", " "), mean_over=span) for name, values in series.items()]
    return Plot(title, "iteration", lines, whole_x=True, note="no iteration yet")


def training_chart(curve: Mapping[str, Any], more: Mapping[str, Mapping[str, Sequence[Number]]] | None = None) -> Image.Image:
    """The course of a training by iteration.

    Args:
        curve: ``{"iteration": [...], "reward": [...], "scores": {name: [...]}}``, lists of one length; None is a gap. The reward
            has a panel of its own unless it is one of the scores.
        more: further panels: title -> name -> values, of the same length.
    """
    iterations, reward, scores = curve["iteration"], curve["reward"], curve["scores"]
    panels = {} if list(reward) in [list(values) for values in scores.values()] else {"reward": {"reward": reward}}
    panels |= ({"scores": scores} if scores else {}) | dict(more or {})
    return draw_panels([curve_panel(title, iterations, series) for title, series in panels.items()], columns=3)


def compare_chart(rows: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Samplers compared: quality against the number of function evaluations, and bars of everything that was measured.

    Args:
        rows: one per sampler: ``label``, ``nfe``, ``rows`` (of the model), ``seconds``, ``rmse`` (to a reference),
            ``diversity``, ``reward_mean``, ``reward_low``, ``reward_high`` (its 95 % interval). Any number may be None, NaN or
            missing; quality is the RMSE where there is no reward at all.
    """
    bars = Bars("what was measured", [str(row["label"]) for row in rows], _columns(rows), note="nothing was measured")
    width = _SCATTER_WIDTH + _LABELS_WIDTH + _COLUMN_WIDTH * max(2, len(bars.columns))
    height = max(_SCATTER_HEIGHT, bars.height + 2 * _MARGIN)
    canvas = Canvas(width, height)
    _scatter(rows).draw(canvas, Box(_MARGIN, _MARGIN, _SCATTER_WIDTH - _MARGIN, _SCATTER_HEIGHT - _MARGIN))
    bars.draw(canvas, Box(_SCATTER_WIDTH + _MARGIN, _MARGIN, width - _MARGIN, height - _MARGIN))
    return canvas.finish()


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Number]:
    return [known(row.get(name)) for row in rows]


def _rewarded(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(value is not None for value in _values(rows, "reward_mean"))


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Reward, if there is one, and everything else that is known of any sampler."""
    reward = Column("reward, 95 % interval", *(_values(rows, f"reward_{name}") for name in ("mean", "low", "high")))
    others = [Column(title, _values(rows, name)) for title, name in _COLUMNS]
    return [column for column in (reward, *others) if any(value is not None for value in column.values)]


def _scatter(rows: Sequence[Mapping[str, Any]]) -> Plot:
    rewarded = _rewarded(rows)
    quality = "reward_mean" if rewarded else "rmse"
    marks = [
        Mark(
            row["nfe"], row[quality], str(row["label"]), row.get("reward_low") if rewarded else None,
            row.get("reward_high") if rewarded else None, colour_of(index),
        )
        for index, row in enumerate(rows)
        if known(row.get("nfe")) is not None and known(row.get(quality)) is not None
    ]  # fmt: skip
    title = "reward, higher is better" if rewarded else "RMSE to the reference, lower is better"
    return Plot(title, "function evaluations (NFE)", marks=marks, whole_x=True, note="neither a reward nor an RMSE is known")
