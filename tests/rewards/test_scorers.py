"""What every scorer promises, and the table of scorers."""

import pytest
import torch

from mixgrpo.backend.rewards import HELD_OUT, SCORERS, BatchError, Scorer, ScorerError, make_scorer
from mixgrpo.backend.rewards.base import register

CAPTION = "a red square on a white background"
TRAINABLE = sorted(set(SCORERS) - HELD_OUT)


@pytest.fixture(params=TRAINABLE)
def scorer(request):
    return make_scorer(request.param)


def test_scorers_keep_the_protocol(scorer):
    assert isinstance(scorer, Scorer)
    assert SCORERS[scorer.name] is not None and scorer.held_out is False
    scores = scorer.score(torch.rand(3, 3, 64, 64), [CAPTION] * 3)
    assert scores.shape == (3,) and scores.dtype == torch.float32 and scores.device.type == "cpu"
    assert torch.isfinite(scores).all()


def test_empty_batch(scorer):
    assert scorer.score(torch.zeros(0, 3, 64, 64), []).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_picture_is_nan_and_the_others_are_scored(scorer, bad):
    images = torch.rand(3, 3, 64, 64)
    alone = scorer.score(images[::2], [CAPTION] * 2)
    images[1, 2, 5, 7] = bad
    scores = scorer.score(images, [CAPTION] * 3)
    assert scores.isnan().tolist() == [False, True, False]
    assert torch.equal(scores[::2], alone)
    assert scorer.score(images[1:2], [CAPTION]).isnan().all()


def test_half_precision_and_gradients_are_accepted(scorer):
    images = torch.rand(2, 3, 64, 64, requires_grad=True)
    scores = scorer.score(images.to(torch.bfloat16), [CAPTION] * 2)
    assert scores.dtype == torch.float32 and not scores.requires_grad


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (torch.zeros(2, 3, 64, 64), [CAPTION], "2 pictures for 1 prompts"),
        (torch.zeros(1, 3, 64, 64), CAPTION, "one string"),
        (torch.zeros(1, 64, 64, 3), [CAPTION], "shape"),
        (torch.zeros(3, 64, 64), [CAPTION] * 3, "shape"),
        (torch.zeros(1, 3, 0, 64), [CAPTION], "shape"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), [CAPTION], "floating point"),
        (torch.full((1, 3, 64, 64), -1.0), [CAPTION], r"\[0, 1\], got values from -1 to -1"),
        (torch.full((1, 3, 64, 64), 255.0), [CAPTION], r"\[0, 1\], got values from 255"),
    ],
)
def test_batches_that_do_not_fit_are_refused(scorer, images, prompts, message):
    with pytest.raises(BatchError, match=message):
        scorer.score(images, prompts)


def test_scene_accuracy_refuses_oblong_pictures():
    with pytest.raises(BatchError, match="square, got 96x64"):
        make_scorer("scene_accuracy").score(torch.zeros(1, 3, 64, 96), [CAPTION])


def test_jpeg_scores_oblong_pictures():
    assert torch.isfinite(make_scorer("jpeg_compressibility").score(torch.zeros(1, 3, 40, 96), [""])).all()


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ScorerError, match="no scorer called 'beauty'; there are: .*scene_accuracy"):
        make_scorer("beauty")
    with pytest.raises(ScorerError, match="no option 'partail'; its options are: partial"):
        make_scorer("scene_accuracy", partail=True)
    with pytest.raises(ScorerError, match="it has no options"):
        make_scorer("jpeg_compressibility", quality=80)
    with pytest.raises(ScorerError, match="partial must be true or false, got 'yes'"):
        make_scorer("scene_accuracy", partial="yes")


def test_a_name_is_given_once():
    with pytest.raises(ScorerError, match="exists already"):
        register("scene_accuracy")(lambda: None)
    assert make_scorer("scene_accuracy").name == "scene_accuracy"
