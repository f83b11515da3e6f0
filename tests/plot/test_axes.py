"""Lines, bands, shades and marks are drawn where their numbers are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixgrpo.backend.plot import SHADE, Box, Line, Mark, Plot
from mixgrpo.backend.plot.axes import running_mean
from mixgrpo.backend.plot.canvas import PALETTE, PAPER, Canvas, drawable, paler

BLUE, RED = PALETTE[:2]
SIZE = (400, 300)
BOX = Box(10, 10, 390, 290)


def drawn(plot: Plot, box: Box = BOX) -> np.ndarray:
    canvas = Canvas(*SIZE)
    plot.draw(canvas, box)
    return np.array(canvas.finish())


def at(pixels: np.ndarray, plot: Plot, x: float, y: float, box: Box = BOX) -> tuple[int, ...]:
    """The colour at the point (x, y)."""
    column, row = plot.axes(box).place(x, y)
    return tuple(pixels[int(row), int(column)].tolist())


def test_a_point_is_drawn_where_it_is():
    plot = Plot("two lines", "x", [Line([0, 1, 2, 4], [1, 3, 2, 5], "one"), Line([0, 1, 2, 4], [4, 4.5, 4, 0], "other")])
    pixels = drawn(plot)
    for x, y in ((0, 1), (1, 3), (2, 2), (4, 5), (3, 3.5)):
        assert at(pixels, plot, x, y) == BLUE, (x, y)
    for x, y in ((0, 4), (1, 4.5), (2, 4), (4, 0)):
        assert at(pixels, plot, x, y) == RED, (x, y)
    assert at(pixels, plot, 0.6, 0.4) == PAPER
    axes = plot.axes(BOX)
    assert BOX.left < axes.left < axes.right < BOX.right and BOX.top + 40 < axes.top < axes.bottom < BOX.bottom - 30


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_a_gap_stays_open_and_a_lonely_value_is_a_dot(gap):
    plot = Plot("gap", lines=[Line(range(7), [1.1, 1.1, gap, 1.1, gap, 1.1, 2], low=[0.5] * 7, high=[gap] * 7)])
    pixels = drawn(plot)
    assert all(at(pixels, plot, x, 1.1) == BLUE for x in (0, 0.5, 1, 3, 5))
    assert all(at(pixels, plot, x, 1.1) == PAPER for x in (1.7, 2.4, 3.6, 4.4))
    assert plot.axes(BOX).y_range[1] < 3
    long = Plot("a line of many values has no dots", lines=[Line(range(31), [*[1.1] * 14, gap, 1.5, gap, *[1.1] * 14])])
    assert at(drawn(long), long, 15, 1.5) == BLUE


def test_a_thick_mean_lies_over_thin_values():
    values = [0.0] * 30 + [8.0, 0.0, 0.0, None]
    assert running_mean(values, 4)[-5:] == [0.0, 2.0, 2.0, 2.0, pytest.approx(8 / 3)]
    assert running_mean([None, math.nan, 3.0, 5.0], 2) == [None, None, 3.0, 4.0]
    plot = Plot("mean", lines=[Line(range(34), values, mean_over=4)])
    pixels = drawn(plot)
    assert at(pixels, plot, 31.5, 2) == BLUE and at(pixels, plot, 11, 0) == BLUE
    column, row = plot.axes(BOX).place(30, 5)
    raw = pixels[int(row), int(column) - 6 : int(column) + 6]
    assert (raw != PAPER).any() and not (raw == BLUE).all(-1).any()


def test_a_band_spans_its_interval():
    plot = Plot("band", lines=[Line(range(40), [2] * 40, low=[1] * 40, high=[5] * 40)])
    pixels = drawn(plot)
    band = paler(BLUE, 0.2)
    assert [at(pixels, plot, 20.3, y) for y in (0.9, 1.1, 2, 4.9, 5.1)] == [PAPER, band, BLUE, band, PAPER]


def test_a_shade_covers_its_range_and_ends_at_the_axes():
    plot = Plot("shade", lines=[Line(range(11), [0] * 10 + [9])], shaded=[(2, 4), (8, 30)], shaded_name="window")
    pixels = drawn(plot)
    inside = [at(pixels, plot, x, 5.7) == SHADE for x in (1.9, 2.1, 3.9, 4.1, 7.9, 8.1)]
    assert inside == [False, True, True, False, False, True]
    right = plot.axes(BOX).right
    assert not (pixels[:, int(right) + 1 :] == SHADE).all(-1).any()


def test_an_axis_from_zero_shows_how_large_a_change_is():
    values = [Line(range(3), [10, 10.1, 10.2])]
    assert Plot("", lines=values, from_zero=True).axes(BOX).y_range[0] == 0
    assert Plot("", lines=values).axes(BOX).y_range[0] > 9
    assert Plot("", lines=[Line(range(2), [-1, 1])], from_zero=True).axes(BOX).y_range[0] < -1


@pytest.mark.parametrize("values", [[], [None, math.nan], [math.inf]])
def test_nothing_to_draw_says_so(values):
    lines = [Line(range(len(values)), values, "name")]
    said = drawn(Plot("empty", "x", lines, note="no step is stochastic: eta is 0, and there is no more room in one line for it"))
    other = drawn(Plot("empty", "x", lines, note="no data"))
    assert (said != other).any() and (said[140:200].min(-1) < 180).any()


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-30, 2e-30], [1e30, -1e30], [3.0, 1e300], [1.0, 1.0 + 1e-15], [-7e-9]])
def test_any_range_can_be_drawn(values):
    plot = Plot("range", lines=[Line(range(len(values)), values)])
    pixels = drawn(plot)
    assert at(pixels, plot, 0, values[0]) == BLUE
    low, high = plot.axes(BOX).y_range
    assert low < values[0] < high and high - low < 1e31


def test_long_words_stay_inside():
    word = "a very long name " * 12
    plot = Plot(word, word, [Line(range(3), [1, 2, 3], f"{index} {word}") for index in range(3)])
    pixels = drawn(plot)
    assert (pixels[:, int(BOX.right) :] == 255).all() and (pixels[int(BOX.bottom) + 2 :] == 255).all()
    axes = plot.axes(BOX)
    assert axes.top > BOX.top + 26 + 3 * 20, "three names need three lines"
    assert axes.bottom - axes.top > 100


def test_marks_have_whiskers_and_stand_beside_one_another():
    marks = [Mark(11, 1.0, "", 0.5, 2.1, BLUE), Mark(30, 3.0, "one", colour=RED), Mark(30, 3.0, "two", colour=BLUE)]
    marks.append(Mark(21, 2.3, low=1.7))
    plot = Plot("marks", marks=marks)
    pixels = drawn(plot)
    assert at(pixels, plot, 11, 1.0) == BLUE and at(pixels, plot, 11, 1.7) == paler(BLUE, 0.7)
    assert at(pixels, plot, 11, 2.3) == PAPER
    column, row = (int(part) for part in plot.axes(BOX).place(30, 3.0))
    sides = [
        {tuple(colour) for colour in side.tolist()}
        for side in (pixels[row, column - 12 : column], pixels[row, column : column + 12])
    ]
    assert RED in sides[0] and BLUE not in sides[0] and BLUE in sides[1] and RED not in sides[1]
    assert at(pixels, plot, 21, 1.8) == PAPER, "half an interval is no whisker"


def test_labels_of_marks_do_not_cover_one_another():
    def ink(count: int) -> int:
        marks = [Mark(10, 1 + index / 200, "LABEL") for index in range(count)] + [Mark(30, 3.0)]
        return int((drawn(Plot("", marks=marks)).max(-1) < 60).sum())

    one = ink(1) - ink(0)
    assert one > 30 and ink(4) - ink(0) == pytest.approx(4 * one, rel=0.15)


def test_a_label_that_would_leave_the_axes_is_on_the_other_side():
    plot = Plot("", marks=[Mark(0, 0), Mark(10, 1, "a label at the right")])
    pixels, (column, row) = drawn(plot), plot.axes(BOX).place(10, 1)
    inked = np.nonzero((pixels[int(row) - 6 : int(row) + 6].max(-1) < 60).any(0))[0]
    assert inked.max() < column


def test_text_that_the_font_lacks():
    assert drawable("für 60 × Größe\n− σ ± 1 …") == "fur 60 x Grosse - sigma ± 1 …"
    assert drawable("采样 2") == "?? 2"


def test_scale_makes_the_same_picture_larger():
    plot = Plot("scale", "x", [Line(range(5), [1, 3, 2, 5, 4])])
    canvas = Canvas(*SIZE, scale=2.0)
    plot.draw(canvas, BOX)
    large = canvas.finish()
    assert large.size == (2 * SIZE[0], 2 * SIZE[1])
    small, plain = np.array(large.reduce(2)).astype(int), drawn(plot).astype(int)
    assert np.abs(small - plain).mean() < 2
    title = np.s_[10:30, 30:120]
    assert (255 - small[title]).sum() == pytest.approx((255 - plain[title]).sum(), rel=0.1), "letters grow too"
