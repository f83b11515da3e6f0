"""Pictures for the reward tests: true renders, renders with one attribute changed, and degraded ones."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from mixgrpo.backend.starter import world

COLOURS, BACKGROUNDS = list(world.COLOURS), list(world.BACKGROUNDS)


def to_images(pictures) -> torch.Tensor:
    """PIL pictures or uint8 arrays (H, W, 3) to float32 (N, 3, H, W) in [0, 1]."""
    stacked = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255


def random_captions(count: int, rng: np.random.Generator, kinds=("single", "pair", "pair")) -> list[str]:
    pools = {"single": world.single_captions(), "pair": world.pair_captions()}
    return [pool[rng.integers(len(pool))] for pool in (pools[kinds[rng.integers(len(kinds))]] for _ in range(count))]


def true_renders(count: int, seed: int, kinds=("single", "pair", "pair")) -> tuple[torch.Tensor, list[str]]:
    rng = np.random.default_rng(seed)
    captions = random_captions(count, rng, kinds)
    return to_images(world.draw_caption(caption, rng) for caption in captions), captions


def another(options, than, rng: np.random.Generator):
    rest = [option for option in options if option != than]
    return rest[rng.integers(len(rest))]


def _change_thing(layout: world.Layout, rng: np.random.Generator, attribute: str) -> world.Layout:
    which = "first" if layout.second is None or rng.random() < 0.5 else "second"
    thing = getattr(layout, which)
    value = another(COLOURS if attribute == "colour" else world.SHAPES, getattr(thing, attribute), rng)
    return replace(layout, **{which: replace(thing, **{attribute: value})})


def _change_side(layout: world.Layout, rng: np.random.Generator) -> world.Layout:
    if rng.random() < 0.5:
        return replace(layout, first=layout.second, second=layout.first)
    return replace(layout, axis="vertical" if layout.axis == "horizontal" else "horizontal")


def _with_extra(layout: world.Layout, rng: np.random.Generator) -> Image.Image:
    placed = world.place(layout, rng)
    while True:
        extra = world.Placed(
            world.Thing(COLOURS[rng.integers(4)], world.SHAPES[rng.integers(3)]), *rng.uniform(8, 56, 2), rng.uniform(3, 7)
        )
        if all(max(abs(extra.x - item.x), abs(extra.y - item.y)) > 1.1 * (extra.half + item.half) + 2 for item in placed):
            return world.render([*placed, extra], layout.background)


CHANGES = ("colour", "shape", "side", "background", "extra object", "missing object")


def changed_renders(change: str, count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Pictures that differ from their captions in one attribute."""
    rng = np.random.default_rng(seed)
    captions = random_captions(count, rng, ("pair",) if change in ("side", "missing object") else ("single", "pair", "pair"))
    pictures = []
    for caption in captions:
        layout = world.parse_caption(caption)
        if change == "extra object":
            pictures.append(_with_extra(layout, rng))
        elif change == "missing object":
            placed = world.place(layout, rng)
            pictures.append(world.render([placed[rng.integers(2)]], layout.background))
        else:
            if change == "side":
                shown = _change_side(layout, rng)
            elif change == "background":
                shown = replace(layout, background=another(BACKGROUNDS, layout.background, rng))
            else:
                shown = _change_thing(layout, rng, change)
            pictures.append(world.render(world.place(shown, rng), shown.background))
    return to_images(pictures), captions


def _filtered(images: torch.Tensor, change) -> torch.Tensor:
    pictures = images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return to_images(change(Image.fromarray(picture)) for picture in pictures)


def _jpeg(picture: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return Image.open(buffer).convert("RGB")


def _wobble(images: torch.Tensor, pixels: float) -> torch.Tensor:
    """Move every point by a smooth random field of this standard deviation, as a decoder's edges do."""
    generator = torch.Generator().manual_seed(5)
    field = torch.randn(len(images), 2, 17, 17, generator=generator)
    dx, dy = (pixels * torch.nn.functional.interpolate(field, (64, 64), mode="bicubic")).unbind(1)
    ys, xs = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    grid = torch.stack([(xs + 0.5 + dx) / 32 - 1, (ys + 0.5 + dy) / 32 - 1], -1)
    return torch.nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _tint(images: torch.Tensor, error: int) -> torch.Tensor:
    signs = torch.randint(0, 2, (len(images), 3, 1, 1), generator=torch.Generator().manual_seed(6)) * 2 - 1
    return (images + signs * error / 255).clamp(0, 1)


def _noise(images: torch.Tensor, deviation: int) -> torch.Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(7))
    return (images + noise * deviation / 255).clamp(0, 1)


def _speckle(images: torch.Tensor) -> torch.Tensor:
    images, rng = images.clone(), np.random.default_rng(8)
    for image in images:
        x, y = rng.integers(1, 62, 2)
        colour = world.COLOURS[COLOURS[rng.integers(4)]]
        image[:, y : y + 2, x : x + 2] = torch.tensor(colour).view(3, 1, 1) / 255
    return images


DEGRADATIONS = {
    "noise 20": lambda images: _noise(images, 20),
    "blur 1": lambda images: _filtered(images, lambda picture: picture.filter(ImageFilter.GaussianBlur(1))),
    "jpeg 80": lambda images: _filtered(images, _jpeg),
    "colour error 40": lambda images: _tint(images, 40),
    "wobble 0.5": lambda images: _wobble(images, 0.5),
    "speckle": _speckle,
}


def polygon(points, colour="red", background="white", half=10.0, centre=(32.0, 32.0)) -> Image.Image:
    """A polygon given in units of the half extent around its centre."""
    canvas = Image.new("RGB", (256, 256), world.BACKGROUNDS[background])
    corners = [(4 * (centre[0] + half * x), 4 * (centre[1] + half * y)) for x, y in points]
    ImageDraw.Draw(canvas).polygon(corners, fill=world.COLOURS[colour])
    return canvas.resize((64, 64), Image.Resampling.BOX)
