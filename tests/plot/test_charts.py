"""Bars, panels side by side, and the charts that are made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixgrpo.backend.plot import Bars, Box, Column, Line, Plot, compare_chart, draw_panels, panel_boxes, training_chart
from mixgrpo.backend.plot.bars import bar_place
from mixgrpo.backend.plot.canvas import PALETTE, PAPER, Canvas

BLUE, RED = PALETTE[:2]
BOX = Box(10, 10, 590, 200)
INK = (40, 40, 40)


def drawn(bars: Bars) -> np.ndarray:
    canvas = Canvas(600, 210)
    bars.draw(canvas, BOX)
    return np.array(canvas.finish())


def has(pixels, colour: tuple[int, int, int]) -> bool:
    return bool((np.array(pixels) == colour).all(-1).any())


def sampler(label: str, nfe: float | None, **more) -> dict:
    return {"label": label, "nfe": nfe, "rows": 100, "seconds": 2.5, "rmse": 0.1, "diversity": 0.3} | more


def rewarded(label: str, nfe: float, mean: float | None, half: float | None = 0.1) -> dict:
    low, high = (None, None) if mean is None or half is None else (mean - half, mean + half)
    return sampler(label, nfe, reward_mean=mean, reward_low=low, reward_high=high)


def test_bars_begin_at_zero_and_end_at_their_value():
    one = Column("one", [4.0, -2.0, None])
    other = Column("other", [1.0, 2.0, 3.0], [0.5, None, math.nan], [2.0, 3.0, 4.0])
    bars = Bars("bars", ["first", "second", "third"], [one, other])
    pixels, cells = drawn(bars), bars.cells(BOX)
    height = cells[0].bottom - cells[0].top

    def row(column: int, line: int, start: float, end: float) -> np.ndarray:
        level = int(cells[column].top + (line + 0.3) * height)
        places = [bar_place(cells[column], bars.columns[column], value) for value in (start, end)]
        return pixels[level, math.ceil(places[0]) + 1 : math.floor(places[1]) - 1]

    assert (row(0, 0, 0, 4) == BLUE).all() and (row(0, 0, -2, 0) == PAPER).all()
    assert (row(0, 1, -2, 0) == RED).all() and not (row(0, 1, 0, 4) == RED).all(-1).any()
    assert not has(row(0, 2, -2, 4), PALETTE[2]), "an unknown value has no bar"
    assert (row(1, 0, 0, 1) == BLUE).all() and not has(row(1, 0, 1, 4), BLUE)
    whisker = pixels[int(cells[1].top + 0.5 * height)]
    edges = [int(bar_place(cells[1], other, value)) for value in (0.5, 2.0)]
    inked = [column for column in range(int(cells[1].left) + 2, edges[1] + 4) if (whisker[column] == INK).all()]
    assert inked[0] in range(edges[0] - 2, edges[0] + 2) and inked[-1] in range(edges[1] - 1, edges[1] + 2)
    beyond = pixels[int(cells[1].top) + 4 : int(cells[1].top + height) - 4, edges[1] + 2 : int(cells[1].right)]
    assert beyond[:, :5].min() == 255 and beyond.min() < 150, "the number stands beside the whisker"
    assert cells[1].right - cells[1].left > cells[0].right - cells[0].left, "intervals have more room"


def test_numbers_of_bars_stay_inside_their_column():
    bars = Bars("", ["a long label " * 20] * 2, [Column("long title " * 9, [1e5, 123456.0]), Column("", [0.0, 0.0])])
    pixels, (first, second) = drawn(bars), bars.cells(BOX)
    assert (pixels[int(first.top) :, int(first.right) + 1 : int(second.left) - 1] == 255).all()
    assert (pixels[:, int(BOX.right) + 1 :] == 255).all() and first.left < 200


def test_panels_fill_rows_and_scale():
    def panel(colour: int) -> Plot:
        return Plot("panel", lines=[Line([], [])] * colour + [Line([0, 1], [0, 1])])

    picture = draw_panels([panel(0), panel(1), panel(2)], columns=2, width=1560)
    assert picture.size == (1560, 1050)
    boxes = panel_boxes(3, 2)
    assert len(boxes) == 3 and boxes[2].left == boxes[0].left and boxes[2].top > boxes[0].bottom
    for index, box in enumerate(boxes):
        inside = np.array(picture.crop(tuple(round(1.5 * edge) for edge in (box.left, box.top, box.right, box.bottom))))
        assert [has(inside, colour) for colour in PALETTE[:3]] == [index == other for other in range(3)]
    assert draw_panels([panel(0)], columns=3).size == (520, 350)


def test_a_training_shows_its_reward_and_its_scores():
    curve = {"iteration": [1, 2, 3, 4], "reward": [0.1, None, 0.3, 0.4], "scores": {"one": [1, 2, 3, 4], "two": [4, 3, 2, None]}}
    assert training_chart(curve).size == (1040, 350)
    assert training_chart(curve | {"reward": curve["scores"]["one"]}).size == (520, 350), "the reward is drawn once"
    assert training_chart(curve | {"scores": {}}).size == (520, 350)
    more = {"norm": {"before clipping": [1, 1, 1, 1]}, "share": {"clip": [0, 0, 0, 0]}}
    assert training_chart(curve, more).size == (1560, 700)
    picture = training_chart(curve)
    assert has(picture.crop((0, 0, 520, 350)), BLUE) and not has(picture.crop((0, 0, 520, 350)), RED)
    assert has(picture.crop((520, 0, 1040, 350)), RED)
    assert training_chart({"iteration": [], "reward": [], "scores": {}}).size == (520, 350)


def scatter(picture) -> np.ndarray:
    return np.array(picture)[:360, :460]


def centre(pixels: np.ndarray, colour: tuple[int, int, int]) -> tuple[float, float]:
    rows, columns = np.nonzero((pixels == colour).all(-1))
    return columns.mean(), rows.mean()


def test_samplers_are_placed_by_cost_and_reward():
    pixels = scatter(compare_chart([rewarded("a", 10, 0.2), rewarded("b", 30, 0.8), rewarded("c", 20, 0.5)]))
    (a_x, a_y), (b_x, b_y), (c_x, c_y) = (centre(pixels, colour) for colour in PALETTE[:3])
    assert a_x < c_x < b_x and b_y < c_y < a_y
    assert (a_x + b_x) / 2 == pytest.approx(c_x, abs=0.5) and (a_y + b_y) / 2 == pytest.approx(c_y, abs=0.5)


def test_without_a_reward_the_rmse_is_shown():
    rows = [sampler("a", 10, rmse=0.4), sampler("b", 20, rmse=0.1, reward_mean=math.nan)]
    pixels = scatter(compare_chart(rows))
    (a_x, a_y), (b_x, b_y) = (centre(pixels, colour) for colour in PALETTE[:2])
    assert a_x < b_x and a_y < b_y, "less is lower"
    one_reward = scatter(compare_chart([rows[0], rewarded("b", 20, 0.1, None)]))
    assert not has(one_reward, BLUE) and has(one_reward, RED)


def test_whatever_is_missing_the_chart_is_drawn():
    for rows in ([], [{"label": "only a name"}], [sampler("x", None)], [rewarded("采样器", 5, None)]):
        assert compare_chart(rows).size[0] >= 900
    many = [rewarded(f"sampler {index}", 25, index / 40) for index in range(40)]
    picture = compare_chart(many)
    assert picture.height > 40 * 28 and has(np.array(picture)[-30:], INK)
    assert has(np.array(picture)[:, -40:], INK) and (np.array(picture)[:, -3:] == 255).all()
