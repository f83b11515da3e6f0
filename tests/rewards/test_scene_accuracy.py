"""Scene accuracy against pictures whose truth is known."""

import numpy as np
import pytest
import torch
from PIL import Image
from scenes import BACKGROUNDS, CHANGES, DEGRADATIONS, changed_renders, polygon, to_images, true_renders

from mixgrpo.backend.rewards import make_scorer
from mixgrpo.backend.rewards.scene import facts_found
from mixgrpo.backend.rewards.scene_reader import read_scenes
from mixgrpo.backend.starter import world

CAPTION = "a red square on a white background"
SCORER = make_scorer("scene_accuracy")
PARTIAL = make_scorer("scene_accuracy", partial=True)


def test_accepts_true_renders():
    images, captions = true_renders(2000, seed=11)
    scores = SCORER.score(images, captions)
    assert scores.dtype == torch.float32 and scores.shape == (2000,)
    assert scores.mean() >= 0.99


@pytest.mark.parametrize("change", CHANGES)
def test_rejects_renders_with_one_attribute_changed(change):
    images, captions = changed_renders(change, 300, seed=12)
    assert SCORER.score(images, captions).mean() <= 0.02
    partial = PARTIAL.score(images, captions)
    assert partial.max() < 0.8 and partial.min() > 0.2


@pytest.mark.parametrize("degradation", DEGRADATIONS)
def test_accepts_degraded_renders(degradation):
    images, captions = true_renders(300, seed=13)
    assert SCORER.score(DEGRADATIONS[degradation](images), captions).mean() >= 0.9


@pytest.mark.parametrize("degradation", DEGRADATIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_degrading_a_wrong_picture_does_not_make_it_right(degradation, change):
    images, captions = changed_renders(change, 100, seed=14)
    assert SCORER.score(DEGRADATIONS[degradation](images), captions).mean() <= 0.02


DEFORMED = {
    "wide rectangle": [(-1.15, -0.8), (1.15, -0.8), (1.15, 0.8), (-1.15, 0.8)],
    "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "triangle upside down": [(0, 1), (1.1, -1), (-1.1, -1)],
    "right-angled triangle": [(-1, -1), (1, 1), (-1, 1)],
    "trapezium": [(-0.5, -1), (0.5, -1), (1.1, 1), (-1.1, 1)],
    "horseshoe": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (0.4, 0.9), (0.4, -0.4), (-0.4, -0.4), (-0.4, 0.9), (-0.9, 0.9)],
    "star": [(r * np.sin(a * np.pi / 5), -r * np.cos(a * np.pi / 5)) for a, r in enumerate([1.2, 0.55] * 5)],
    "square with round sides": [
        (np.sign(np.cos(a)) * abs(np.cos(a)) ** 0.57, np.sign(np.sin(a)) * abs(np.sin(a)) ** 0.57)
        for a in np.linspace(0, 2 * np.pi, 80)
    ],
    "ellipse": [(1.2 * np.cos(a), 0.85 * np.sin(a)) for a in np.linspace(0, 2 * np.pi, 60)],
}


@pytest.mark.parametrize("name", DEFORMED)
@pytest.mark.parametrize("half", [8, 10, 14])
def test_rejects_deformed_shapes(name, half):
    image = to_images([polygon(DEFORMED[name], half=half)])
    for shape in world.SHAPES:
        assert SCORER.score(image, [f"a red {shape} on a white background"]).item() == 0


def picture_with(*rectangles, background=(238, 238, 238)) -> torch.Tensor:
    """A red 20x20 square with rectangles (x0, y0, x1, y1, colour) pasted over it."""
    picture = np.full((64, 64, 3), background, np.uint8)
    picture[22:42, 22:42] = world.COLOURS["red"]
    for x0, y0, x1, y1, colour in rectangles:
        picture[y0:y1, x0:x1] = colour
    return to_images([picture])


def test_details_that_decide():
    def score(image: torch.Tensor) -> float:
        return SCORER.score(image, [CAPTION]).item()

    assert score(picture_with()) == 1
    assert score(picture_with((2, 2, 4, 4, world.COLOURS["blue"]))) == 1, "four pixels are a speckle"
    assert score(picture_with((2, 2, 5, 5, world.COLOURS["blue"]))) == 0, "nine pixels are an object"
    assert score(picture_with((22, 22, 32, 42, world.COLOURS["yellow"]))) == 0, "a two-coloured square"
    assert score(picture_with((22, 22, 42, 42, (255, 80, 80)))) == 1, "a light red"
    assert score(picture_with((22, 22, 42, 42, (200, 40, 150)))) == 0, "pink, though no colour of the palette is closer than red"
    assert score(picture_with((28, 28, 36, 36, world.BACKGROUNDS["white"]))) == 0, "a frame"
    assert score(picture_with((28, 28, 36, 36, world.BACKGROUNDS["black"]))) == 0, "a square with a black middle"
    assert score(picture_with((0, 0, 64, 12, world.BACKGROUNDS["black"]))) == 0, "a background in two tones"
    assert score(picture_with((0, 0, 64, 12, (170, 170, 170)))) == 0, "a background in two greys"
    assert score(picture_with(background=(130, 130, 130))) == 0, "a grey background"
    assert score(picture_with(background=world.COLOURS["yellow"])) == 0, "a coloured background"
    tiny = np.full((64, 64, 3), world.BACKGROUNDS["white"], np.uint8)
    tiny[30:35, 30:35] = world.COLOURS["red"]
    assert score(to_images([tiny])) == 0, "too small to tell its shape"


def test_relation_needs_a_clear_direction():
    caption = "a red square left of a blue square on a white background"
    for dx, dy, right in [(24, 0, 1), (24, 12, 1), (18, 18, 0), (4, 24, 0), (-24, 0, 0)]:
        placed = [
            world.Placed(world.Thing("red", "square"), 32 - dx / 2, 32 - dy / 2, 8),
            world.Placed(world.Thing("blue", "square"), 32 + dx / 2, 32 + dy / 2, 8),
        ]
        assert SCORER.score(to_images([world.render(placed, "white")]), [caption]).item() == right, (dx, dy)


def test_all_ways_to_say_the_same():
    rng = np.random.default_rng(3)
    image = to_images([world.draw_caption("a red circle left of a blue square on a black background", rng)] * 3)
    captions = [
        "A red circle left of a blue square on a black background.",
        "a blue square  right of a red circle on a black background",
        "a blue square left of a red circle on a black background",
    ]
    assert SCORER.score(image, captions).tolist() == [1, 1, 0]


def test_reads_what_is_there():
    placed = [
        world.Placed(world.Thing("yellow", "triangle"), 18, 30, 9),
        world.Placed(world.Thing("green", "circle"), 46, 36, 10),
    ]
    picture = np.asarray(world.render(placed, "black"), np.float32)
    (scene,) = read_scenes(picture[None])
    assert scene.background == "black" and scene.count == 2
    circle, triangle = scene.objects
    assert (circle.colour, circle.shape, triangle.colour, triangle.shape) == ("green", "circle", "yellow", "triangle")
    assert abs(circle.x - 46) < 0.5 and abs(circle.y - 36) < 0.5
    assert abs(circle.area - np.pi * 100) < 12


def test_yellow_on_black_has_no_fringe_of_another_colour():
    for shape in world.SHAPES:
        scene = world.render([world.Placed(world.Thing("yellow", shape), 31.7, 32.3, 8.4)], "black")
        assert SCORER.score(to_images([scene]), [f"a yellow {shape} on a black background"]).item() == 1


def test_partial_credit_orders_pictures_by_what_they_got_right():
    caption = "a red circle left of a blue square on a white background"
    rng = np.random.default_rng(4)
    pictures = {
        "right": "a red circle left of a blue square on a white background",
        "colour": "a green circle left of a blue square on a white background",
        "two colours": "a green circle left of a yellow square on a white background",
        "colours and shapes": "a green triangle left of a yellow triangle on a white background",
        "and background": "a green triangle left of a yellow triangle on a black background",
        "and count": "a green triangle on a black background",
    }
    scores = PARTIAL.score(to_images(world.draw_caption(text, rng) for text in pictures.values()), [caption] * 6).tolist()
    assert scores[0] == 1 and scores[1] < 0.8
    assert (-np.diff(scores) > 0.03).all(), dict(zip(pictures, scores, strict=True))


def test_partial_credit_is_one_exactly_where_the_strict_score_is():
    images, captions = true_renders(200, seed=15)
    images = DEGRADATIONS["wobble 0.5"](images)
    strict, partial = SCORER.score(images, captions), PARTIAL.score(images, captions)
    assert torch.equal(strict == 1, partial == 1)
    assert (partial[strict == 0] < 0.8).all()


def test_partial_credit_survives_noise_pictures():
    images = torch.rand(20, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    captions = [f"a red circle above a blue square on a {name} background" for name in BACKGROUNDS] * 10
    scores = PARTIAL.score(images, captions)
    assert ((scores >= 0) & (scores < 0.4)).all()
    (scene,) = read_scenes(np.zeros((1, 64, 64, 3), np.float32))
    assert facts_found(scene, world.parse_caption(captions[0])) < 0.2


def test_other_sizes_are_resized():
    rng = np.random.default_rng(5)
    scene = world.draw_caption("a red circle above a blue square on a white background", rng)
    for size in (32, 96, 128, 256):
        image = to_images([scene.resize((size, size), Image.Resampling.BICUBIC)])
        assert SCORER.score(image, ["a red circle above a blue square on a white background"]).item() == 1, size
    large = image.repeat_interleave(2, 2).repeat_interleave(2, 3)
    noisy = (large + 0.4 * torch.randn(large.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    assert SCORER.score(noisy, ["a red circle above a blue square on a white background"]).item() == 1, "every pixel counts"


def test_value_does_not_depend_on_the_batch():
    images, captions = true_renders(70, seed=16)
    images[::2] = DEGRADATIONS["wobble 0.5"](images[::2])
    together = PARTIAL.score(images, captions)
    alone = torch.cat([PARTIAL.score(images[i : i + 1], captions[i : i + 1]) for i in range(70)])
    assert torch.equal(together, alone)


def test_caption_outside_the_grammar_is_refused():
    image = torch.zeros(1, 3, 64, 64)
    with pytest.raises(world.CaptionError, match="purple"):
        SCORER.score(image, ["a purple circle on a white background"])
    with pytest.raises(world.CaptionError):
        SCORER.check_prompts([CAPTION, ""])
    SCORER.check_prompts([CAPTION])
