"""Charts for people, drawn with Pillow, which ComfyUI has."""

from .axes import SHADE, Axes, Line, Mark, Plot
from .bars import Bars, Column
from .canvas import Box
from .charts import compare_chart, draw_panels, panel_boxes, training_chart

__all__ = [
    "SHADE", "Axes", "Bars", "Box", "Column", "Line", "Mark", "Plot",
    "compare_chart", "draw_panels", "panel_boxes", "training_chart",
]  # fmt: skip
