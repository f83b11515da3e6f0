"""Contact sheets: where pictures, titles and labels go, and what fits."""

from __future__ import annotations

import numpy as np
import torch

from mixgrpo.backend.pictures import GridColumn, SheetRow, comparison_grid, contact_sheet, sheet_of_rows

CELL, GAP, TITLE, LABEL = 64, 6, 20, 15
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(*colours: tuple[int, int, int], height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.stack([torch.tensor(colour).float().div(255)[:, None, None].expand(3, height, width) for colour in colours])


def colour_at(sheet, left: int, top: int) -> tuple[int, int, int]:
    return sheet.getpixel((left + CELL // 2, top + CELL // 2))


def test_a_long_row_goes_on_below_under_one_title():
    rows = [SheetRow(plain(RED, GREEN, BLUE), "three", ["a", "b", "c"]), SheetRow(plain(BLUE), "one")]
    sheet = sheet_of_rows(rows, 2, CELL)
    line = CELL + LABEL + GAP
    assert sheet.size == (320, 2 * TITLE + 3 * line + GAP)
    top = GAP + TITLE
    second = GAP + CELL + GAP
    assert colour_at(sheet, GAP, top) == RED and colour_at(sheet, second, top) == GREEN
    assert colour_at(sheet, GAP, top + line) == BLUE and colour_at(sheet, second, top + line) == (250, 250, 250)
    assert colour_at(sheet, GAP, top + 2 * line + TITLE) == BLUE


def test_a_picture_keeps_its_aspect_ratio():
    sheet = sheet_of_rows([SheetRow(plain(RED, height=32, width=128)), SheetRow(plain(BLUE, height=128, width=32))], 1, CELL)
    pixels = np.array(sheet)
    for colour, box in ((RED, (16, 64)), (BLUE, (64, 16))):
        rows, columns = np.nonzero((pixels == colour).all(-1))
        height, width = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
        assert (height, width) == box, colour
        assert columns.min() + columns.max() == 2 * GAP + CELL - 1, "not centred"


def test_a_title_that_does_not_fit_is_cut_and_stands_in_one_line():
    def title(text: str) -> np.ndarray:
        return np.array(sheet_of_rows([SheetRow(plain(RED), text)], 1, CELL))

    short, long = title("before and after"), title("before and after " + 60 * "and after that ")
    assert short.shape == long.shape == (GAP + TITLE + CELL + GAP, 320, 3)
    assert (long[: GAP + TITLE, -GAP:] == 250).all(), "written over the edge"
    assert (long[: GAP + TITLE, 200:300] < 250).any() and not (short[: GAP + TITLE, 200:300] < 250).any()
    assert (title("before\nand after") == short).all()


def test_signs_colour_labels_on_contact_sheets_only():
    def colourful(sheet) -> bool:
        below = np.array(sheet).astype(int)[GAP + CELL + 1 :]
        return (below.max(-1) - below.min(-1)).max() > 50

    grey = plain((128, 128, 128))
    assert colourful(contact_sheet(grey, 1, ["-0.50"], cell=CELL)) and not colourful(contact_sheet(grey, 1, ["0.50"], cell=CELL))
    assert not colourful(sheet_of_rows([SheetRow(grey, labels=["-0.50"])], 1, CELL))


def test_titles_of_a_contact_sheet_may_be_fewer_than_its_rows():
    sheet = contact_sheet(plain(RED, GREEN, BLUE), 1, titles=["only the first"], cell=CELL)
    assert sheet.size == (320, 3 * (TITLE + CELL + GAP) + GAP)
    assert colour_at(sheet, GAP, GAP + TITLE + 2 * (TITLE + CELL + GAP)) == BLUE


def test_a_comparison_has_its_columns_side_by_side_and_titles_between_rows():
    columns = [GridColumn(plain(RED, GREEN), "one", "NFE 8"), GridColumn(plain(BLUE, RED), "two")]
    sheet = comparison_grid(columns, ["seed 1", "seed 2"], ["first", "second"], CELL)
    untitled = comparison_grid(columns, ["seed 1", "seed 2"], cell=CELL)
    left = sheet.width - 2 * (CELL + GAP)
    top = GAP + 2 * LABEL
    assert sheet.height == top + 2 * (TITLE + CELL + GAP) and untitled.height == top + 2 * (CELL + GAP)
    for picture, title in ((sheet, TITLE), (untitled, 0)):
        step = title + CELL + GAP
        places = [(left, top + title), (left + CELL + GAP, top + title), (left, top + title + step)]
        assert [colour_at(picture, *place) for place in places] == [RED, BLUE, GREEN]


def test_a_long_label_goes_on_in_a_second_line_and_ends_there():
    def heights(label: str) -> np.ndarray:
        columns = [GridColumn(plain(RED), "short"), GridColumn(plain(RED), label)]
        return np.array(comparison_grid(columns, [""], cell=CELL))

    short, long = heights("short"), heights("a label that is much too long for its column " * 3)
    assert len(long) == len(short) + LABEL
    left = long.shape[1] - 2 * (CELL + GAP)
    edges = long[: GAP + 2 * LABEL, left + CELL : left + CELL + GAP], long[:, -GAP:]
    assert all((edge == 250).all() for edge in edges), "written over the edge"
