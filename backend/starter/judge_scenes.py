"""What the held-out judge learns from: true scenes as a small model would draw them, and pictures that are no scenes.

True pictures are moved, bent a little, tinted, blurred, rebuilt from disturbed 8x8 blocks of the latent code and covered
with noise, since the judge will see decoded samples and not renders. Pictures that are no scenes hold a shape too many, a
shape without a name, one in two colours, shapes that overlap, nothing at all, or are bent beyond recognition.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn.functional import avg_pool2d, grid_sample, interpolate, pad

from . import latents, world

_TRUE_SHARE = 0.7  # of a batch; the rest is no scenes
_BENT_SHARE = 0.12  # true pictures bent beyond recognition
_SCALE = 4


class JudgeScenes:
    """Batches of pictures for the judge; what a batch holds is a function of (seed, step).

    Attributes:
        captions: of the true pictures.
    """

    def __init__(self, code: Path, count: int, seed: int):
        rng = np.random.default_rng(seed)
        self._code, self._seed = latents.LatentCode.load(code), seed
        self.captions, true = latents.random_scenes(count, rng)
        no_scenes = np.stack([np.asarray(draw_no_scene(rng)) for _ in range(count // 3)])
        self._true, self._no_scenes = _planes(true), _planes(no_scenes)

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pictures (size, 3, 64, 64) in [0, 1], the captions they were drawn from (int64 rows), and which show them (bool).

        Rows of pictures that are no scenes mean nothing.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        right, bent = round(_TRUE_SHARE * size), round(_BENT_SHARE * size)
        rows = torch.randint(len(self._true), (size,), generator=generator)
        others = torch.randint(len(self._no_scenes), (size - right - bent,), generator=generator)
        pictures = torch.cat([self._true[rows[: right + bent]], self._no_scenes[others]]).float() / 255
        bends = torch.rand(size, generator=generator) * 0.6
        bends[right : right + bent] += 2.0
        pictures = _bend(pictures, bends, generator)
        return _wear(pictures, self._code, generator), rows, torch.arange(size) < right

    @staticmethod
    def true_pictures(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
        """Undisturbed pictures, float32 (count, 3, 64, 64) in [0, 1], and their captions."""
        captions, pictures = latents.random_scenes(count, np.random.default_rng(seed))
        return _planes(pictures).float() / 255, captions


def _planes(pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def _bend(pictures: torch.Tensor, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift by up to 3 pixels and bend by a smooth random field of the given deviations (B,), in pixels."""
    count = len(pictures)
    knots = torch.randn(count, 2, 17, 17, generator=generator) * pixels.view(-1, 1, 1, 1)
    shift = torch.rand(count, 2, 1, 1, generator=generator) * 6 - 3
    field = (interpolate(knots, (64, 64), mode="bicubic") + shift).permute(0, 2, 3, 1)
    centres = torch.arange(world.IMAGE_SIZE) + 0.5
    here = torch.stack(torch.meshgrid(centres, centres, indexing="xy"), -1)
    return grid_sample(pictures, (here + field) / 32 - 1, padding_mode="border", align_corners=False)


def _wear(pictures: torch.Tensor, code: latents.LatentCode, generator: torch.Generator) -> torch.Tensor:
    """Blur, rebuild from disturbed latents (every second picture), tint and add noise, each of random strength."""

    def strength(most: float, *shape: int) -> torch.Tensor:
        return most * torch.rand(len(pictures), *(shape or (1, 1, 1)), generator=generator)

    blurred = avg_pool2d(pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1)
    pictures = torch.lerp(pictures, blurred, strength(1.0))
    encoded = code.encode(2 * pictures[::2] - 1)
    encoded = encoded + strength(0.15)[::2] * torch.randn(encoded.shape, generator=generator)
    pictures[::2] = (_rebuild(encoded, code) + 1) / 2
    pictures = pictures + strength(0.3, 3, 1, 1) - 0.15
    pictures = pictures + strength(0.1) * torch.randn(pictures.shape, generator=generator)
    return pictures.clamp(0, 1)


def _rebuild(encoded: torch.Tensor, code: latents.LatentCode) -> torch.Tensor:
    """Pixels (B, 3, 64, 64) in about [-1, 1] from latents (B, 16, 8, 8) by the code's linear inverse."""
    blocks = encoded.permute(0, 2, 3, 1) @ torch.linalg.pinv(code.basis) + code.mean
    grid = blocks.unflatten(3, (latents.BLOCK, latents.BLOCK, 3)).permute(0, 5, 1, 3, 2, 4)
    return grid.reshape(len(encoded), 3, world.IMAGE_SIZE, world.IMAGE_SIZE)


def draw_no_scene(rng: np.random.Generator) -> Image.Image:
    """A 64x64 RGB picture that no caption describes."""
    captions = world.pair_captions() if rng.random() < 0.75 else world.single_captions()
    layout = world.parse_caption(captions[rng.integers(len(captions))])
    placed = world.place(layout, rng)
    kind = rng.choice(["extra", "nameless", "two colours", "overlap", "empty"], p=[0.3, 0.35, 0.2, 0.1, 0.05])
    if kind == "extra":
        return world.render([*placed, _free_place(placed, rng)], layout.background)
    if kind == "empty":
        return world.render([], layout.background)
    if kind == "overlap":
        item = placed[rng.integers(len(placed))]
        angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 1.2) * item.half
        other = world.Placed(_random_thing(rng), item.x + distance * np.cos(angle), item.y + distance * np.sin(angle), item.half)
        return world.render([*placed, other], layout.background)
    victim = placed[rng.integers(len(placed))]
    picture = world.render([item for item in placed if item is not victim], layout.background)
    large = picture.resize((world.IMAGE_SIZE * _SCALE,) * 2, Image.Resampling.NEAREST)
    (_draw_nameless if kind == "nameless" else _draw_two_coloured)(ImageDraw.Draw(large), victim, rng)
    return large.resize(picture.size, Image.Resampling.BOX)


def _random_thing(rng: np.random.Generator) -> world.Thing:
    return world.Thing(str(rng.choice(list(world.COLOURS))), str(rng.choice(world.SHAPES)))


def _free_place(placed: list[world.Placed], rng: np.random.Generator) -> world.Placed:
    """A random shape that touches none of the others."""
    while True:
        x, y, half = *rng.uniform(7, 57, 2), rng.uniform(3.5, 9)
        if all(max(abs(x - item.x), abs(y - item.y)) > 1.1 * (half + item.half) + 1 for item in placed):
            return world.Placed(_random_thing(rng), x, y, half)


def _draw_nameless(draw: ImageDraw.ImageDraw, item: world.Placed, rng: np.random.Generator) -> None:
    """A random star-shaped polygon, a turned triangle or square, an ellipse, or a bar, in the item's colour."""
    kind = rng.integers(4)
    if kind == 0:
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(4, 10)))
        points = rng.uniform(0.35, 1.3, (len(angles), 1)) * np.stack([np.cos(angles), np.sin(angles)], 1)
    elif kind == 1:
        corners = int(rng.integers(3, 5))
        turn = rng.uniform(20, 70) if corners == 4 else rng.uniform(25, 95)  # from the upright: a quarter or a third is none
        angles = np.deg2rad(turn - 90 if corners == 3 else turn + 45) + np.arange(corners) * 2 * np.pi / corners
        points = 1.2 * np.stack([np.cos(angles), np.sin(angles)], 1)
    else:
        stretch = rng.uniform(1.3, 1.7) ** rng.choice([-0.5, 0.5])
        angles = np.linspace(0, 2 * np.pi, 40, endpoint=False) if kind == 2 else np.pi / 4 + np.arange(4) * np.pi / 2
        points = np.stack([np.cos(angles), np.sin(angles)], 1) * [stretch, 1 / stretch] * (1 if kind == 2 else 1.27)
    corners_at = _SCALE * (np.array([item.x, item.y]) + item.half * points)
    draw.polygon([tuple(corner) for corner in corners_at], fill=world.COLOURS[item.thing.colour])


def _draw_two_coloured(draw: ImageDraw.ImageDraw, item: world.Placed, rng: np.random.Generator) -> None:
    """The item's own outline with a bar or a spot of another colour across it."""
    points = [(_SCALE * x, _SCALE * y) for x, y in world.outline(item.thing.shape, item.x, item.y, item.half)]
    (draw.ellipse if item.thing.shape == "circle" else draw.polygon)(points, fill=world.COLOURS[item.thing.colour])
    rest = [colour for name, colour in {**world.COLOURS, **world.BACKGROUNDS}.items() if name != item.thing.colour]
    x, y = item.x + rng.uniform(-0.3, 0.3) * item.half, item.y + rng.uniform(0, 0.5) * item.half
    width, height = rng.permutation([rng.uniform(0.3, 0.5), rng.uniform(0.4, 0.8)]) * item.half
    box = [_SCALE * (x - width), _SCALE * (y - height), _SCALE * (x + width), _SCALE * (y + height)]
    (draw.rectangle if rng.random() < 0.5 else draw.ellipse)(box, fill=rest[rng.integers(len(rest))])
