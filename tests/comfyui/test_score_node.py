"""Score Images in this process: which prompt goes with which picture, and pictures that cannot be scored."""

from __future__ import annotations

import json
import math

import pytest
import torch


@pytest.mark.parametrize(
    ("text", "images", "expected"),
    [("one", 3, "one one one"), ("one\ntwo", 2, "one two"), ("one\n\n  two \n", 6, "one one one two two two")],
    ids=["for all", "one each", "one for each group"],
)
def test_prompts_follow_the_samplers_order(comfy, text, images, expected):
    from mixgrpo.nodes.score import prompts_for

    assert prompts_for(text, images) == expected.split()


def test_a_picture_that_cannot_be_scored_comes_last(comfy):
    from mixgrpo.nodes.rewards import JpegIncompressibility
    from mixgrpo.nodes.score import ScoreImages

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 32, 32, 3, generator=generator) * torch.tensor([0.1, 1.0, 1.0, 0.5])[:, None, None, None]
    images[1, 0, 0, 0] = math.nan
    (rewards,) = JpegIncompressibility.execute(2.0).result
    output = ScoreImages.execute(images, rewards, "anything")
    ranked, scores, best = output.result
    rows = output.ui["mixgrpo_scores"]
    assert [row["image"] for row in rows] == [2, 3, 0, 1]
    assert torch.equal(ranked[:3], images[[2, 3, 0]]) and torch.equal(best, images[2:3])
    assert scores[:3] == [row["score"] for row in rows[:3]] == sorted(scores[:3], reverse=True) and math.isnan(scores[3])
    assert rows[0]["score"] == pytest.approx(2 * rows[0]["jpeg_incompressibility"]) and rows[3]["score"] is None
    json.dumps(output.ui, allow_nan=False)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_a_weight_out_of_range_is_refused(comfy, weight):
    from mixgrpo.backend.specs import SpecError
    from mixgrpo.nodes.rewards import JpegCompressibility

    with pytest.raises(SpecError, match="weight: must be"):
        JpegCompressibility.execute(weight)
