"""Pictures for people: labelled contact sheets and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from .files import write_atomically

_GAP, _TITLE, _LABEL = 6, 20, 15
_INK, _PAPER, _GREEN, _RED = (40, 40, 40), (250, 250, 250), (30, 140, 60), (190, 40, 40)


def to_images(pictures: torch.Tensor) -> list[Image.Image]:
    """Pictures (N, 3, H, W) in [0, 1] as Pillow images."""
    pixels = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in pixels]


def contact_sheet(
    pictures: torch.Tensor, columns: int, labels: Sequence[str] = (), titles: Sequence[str] = (), cell: int = 96
) -> Image.Image:
    """Pictures (N, 3, H, W) in rows of ``columns``; a title above every row, a label below every picture.

    Every picture is scaled, in its own proportions, until its longer side is ``cell`` pixels. A label that begins with + is
    green, one that begins with - red.
    """
    rows = -(-len(pictures) // columns)
    label_height = _LABEL if labels else 0
    height, width = pictures.shape[-2:]
    cell_width, cell_height = (max(1, round(cell * side / max(height, width))) for side in (width, height))
    row_height = (_TITLE if titles else 0) + cell_height + label_height + _GAP
    sheet = Image.new("RGB", (columns * (cell_width + _GAP) + _GAP, rows * row_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for row, title in enumerate(titles[:rows]):
        draw.text((_GAP, _GAP + row * row_height + 2), title, fill=_INK, font=ImageFont.load_default(12))
    for index, picture in enumerate(pictures.split(1)):  # one at a time, since they may be large and on a GPU
        row, column = divmod(index, columns)
        left, top = _GAP + column * (cell_width + _GAP), _GAP + row * row_height + (_TITLE if titles else 0)
        (image,) = to_images(picture)
        sheet.paste(image.resize((cell_width, cell_height), Image.Resampling.LANCZOS), (left, top))
        if labels:
            colour = {"+": _GREEN, "-": _RED}.get(labels[index][:1], _INK)
            draw.text((left, top + cell_height + 1), labels[index], fill=colour, font=ImageFont.load_default(11))
    return sheet


def save_picture(path: Path, picture: Image.Image) -> Path:
    """Write a PNG atomically."""
    return write_atomically(path, lambda temporary: picture.save(temporary, format="PNG"))


def plot_curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[float | None]]], x_label: str = "iteration") -> Path:
    """One panel per entry, one line per series (None leaves a gap), against 1, 2, 3, …; a thick line is the running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, values in series.items():
            points = [(place, value) for place, value in enumerate(values, 1) if value is not None]
            if not points:
                continue
            places, heights = zip(*points, strict=True)
            (line,) = axes.plot(places, heights, alpha=0.3, linewidth=1)
            axes.plot(places, _running_mean(heights), color=line.get_color(), linewidth=2, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x_label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    return write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def _running_mean(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of the last ``width`` values at every place."""
    return [sum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]
