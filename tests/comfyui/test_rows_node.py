"""Labelled Pictures: rows chain, their titles and captions say what the scores are, and what cannot be a row is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

CAPTION = "a red circle on a white background"


def pictures(count: int, height: int = 64, width: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, height, width, channels, generator=torch.Generator().manual_seed(count))


@pytest.fixture
def rows(comfy):
    from mixgrpo.nodes import rows

    return rows


@pytest.fixture
def scene_accuracy(comfy):
    from mixgrpo.nodes.rewards import SceneAccuracy

    return SceneAccuracy.execute(1.0, False).result[0]


def test_rows_chain_and_tell_their_means(rows, scene_accuracy):
    from mixgrpo.backend.starter import world

    drawn = world.draw_caption(CAPTION, np.random.default_rng(0))
    right = torch.from_numpy(np.array(drawn)).float().div(255)
    wrong = torch.ones(64, 64, 3)
    before, first_grid = rows.LabelledPictures.execute(pictures(2), "before").result
    assert before[0].title == "before · 2 pictures" and before[0].captions == []
    images = torch.stack([right, wrong, wrong, right * math.nan])
    output = rows.LabelledPictures.execute(images, " after ", before, scene_accuracy, CAPTION)
    after, grid = output.result
    assert after[0] is before[0] and len(before) == 1, "the rows that were given are the next one's first, and stay as they are"
    assert after[1].title == "after · mean 0.33 · 4 pictures" and after[1].captions == ["1.00", "0.00", "0.00", "no score"]
    assert grid.dtype == torch.float32 and grid.shape[0] == 1 and grid.shape[3] == 3 and 0 <= grid.min() and grid.max() <= 1
    assert grid.shape[1] > first_grid.shape[1] and grid.shape[2] > first_grid.shape[2]
    assert output.ui["mixgrpo_rows"] == [
        {"label": "before", "pictures": 2, "mean": None},
        {"label": " after ", "pictures": 4, "mean": pytest.approx(1 / 3)},
    ]
    json.dumps(output.ui, allow_nan=False)


def test_a_row_without_a_single_score_has_no_mean(rows, scene_accuracy):
    output = rows.LabelledPictures.execute(pictures(1) * math.nan, "", None, scene_accuracy, CAPTION)
    assert output.result[0][0].title == "1 picture" and output.ui["mixgrpo_rows"][0]["mean"] is None
    json.dumps(output.ui, allow_nan=False)


def test_the_scores_are_those_of_score_images(rows):
    from mixgrpo.nodes.rewards import JpegCompressibility, JpegIncompressibility
    from mixgrpo.nodes.score import ScoreImages

    rewards = JpegIncompressibility.execute(3.0, JpegCompressibility.execute(0.5).result[0]).result[0]
    images = torch.cat([pictures(2), pictures(2) * 0.1])
    (row,) = rows.LabelledPictures.execute(images, "noise", None, rewards, "one\ntwo").result[0]
    scored = ScoreImages.execute(images, rewards, "one\ntwo").ui["mixgrpo_scores"]
    assert row.scores.tolist() == [entry["score"] for entry in sorted(scored, key=lambda entry: entry["image"])]


@pytest.mark.parametrize(("side", "cell"), [(64, 128), (200, 200), (1024, 256)])
def test_cells_grow_with_the_pictures_and_rows_wrap_at_eight(rows, side, cell):
    small, _ = rows.LabelledPictures.execute(pictures(9), "small").result
    _, grid = rows.LabelledPictures.execute(pictures(1, height=side // 2, width=side), "wide", small).result
    assert grid.shape == (1, 2 * 20 + 3 * (cell + 6) + 6, 8 * (cell + 6) + 6, 3)


def test_transparency_is_ignored(rows):
    opaque = pictures(2)
    transparent = torch.cat([opaque, torch.zeros(2, 64, 64, 1)], dim=-1)
    grids = [rows.LabelledPictures.execute(images, "row").result[1] for images in (opaque, transparent)]
    assert torch.equal(*grids)


@pytest.mark.parametrize("images", [torch.rand(0, 64, 64, 3), torch.rand(2, 64, 64, 1), torch.rand(64, 64, 3)])
def test_what_is_no_row_is_refused(rows, images):
    with pytest.raises(rows.RowsError, match=r"the row 'x' was given \(.*; connect an IMAGE"):
        rows.LabelledPictures.execute(images, "x")


def test_rewards_without_prompts_are_refused(rows, scene_accuracy):
    from mixgrpo.nodes.score import ScoreError

    with pytest.raises(ScoreError, match="there is no prompt"):
        rows.LabelledPictures.execute(pictures(2), "x", None, scene_accuracy)
