"""The starter world: procedurally drawn 64x64 scenes with plain-English captions.

One or two coloured shapes stand on a plain background; two shapes stand left/right of or above/below each other.
Captions follow one short grammar, so a caption can be parsed back into the facts it states:

    a {colour} {shape} on a {background} background
    a {colour} {shape} {left of|right of|above|below} a {colour} {shape} on a {background} background
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from ..errors import MixGRPOError

IMAGE_SIZE = 64
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 80, 220),
    "yellow": (245, 200, 40),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {"white": (238, 238, 238), "black": (22, 22, 22)}
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
AXES = ("single", "horizontal", "vertical")

_OBJECT = rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_GRAMMAR = re.compile(rf"{_OBJECT}(?: ({'|'.join(RELATIONS)}) {_OBJECT})? on an? ({'|'.join(BACKGROUNDS)}) background\.?")
_SUPERSAMPLE = 4


class CaptionError(MixGRPOError):
    """The text does not follow the grammar of the starter world."""


@dataclass(frozen=True)
class Thing:
    """One coloured shape, as a caption states it."""

    colour: str
    shape: str


@dataclass(frozen=True)
class Layout:
    """What a caption states, in canonical order.

    ``first`` is the only, the left or the upper shape; ``second`` the right or the lower one, or None.
    """

    axis: str
    first: Thing
    second: Thing | None
    background: str

    @property
    def things(self) -> tuple[Thing, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


@dataclass(frozen=True)
class Placed:
    """A thing with its geometry: centre (x, y) and half extent, in pixels of the 64x64 picture."""

    thing: Thing
    x: float
    y: float
    half: float


def parse_caption(caption: str) -> Layout:
    """Read a caption into a :class:`Layout`; raises :class:`CaptionError` for anything outside the grammar."""
    match = _GRAMMAR.fullmatch(" ".join(caption.lower().split()))
    if match is None:
        raise CaptionError(
            f"{caption!r} is not a caption of the starter world; write for example "
            "'a red circle left of a blue square on a white background'"
        )
    colour, shape, relation, other_colour, other_shape, background = match.groups()
    subject = Thing(colour, shape)
    if relation is None:
        return Layout("single", subject, None, background)
    other = Thing(other_colour, other_shape)
    axis = "horizontal" if relation in ("left of", "right of") else "vertical"
    first, second = (subject, other) if relation in ("left of", "above") else (other, subject)
    return Layout(axis, first, second, background)


_NONE = "none"
CLASSES: dict[str, tuple[str, ...]] = {
    "axis": AXES,
    "background": tuple(BACKGROUNDS),
    "first_colour": tuple(COLOURS),
    "first_shape": SHAPES,
    "second_colour": (*COLOURS, _NONE),
    "second_shape": (*SHAPES, _NONE),
}
"""What a caption states, attribute by attribute, as classes to be told apart."""


def stated_classes(layout: Layout) -> dict[str, int]:
    """For every attribute the index of the class that a caption states; without a second shape its classes are "none"."""
    second = layout.second or Thing(_NONE, _NONE)
    stated = {
        "axis": layout.axis,
        "background": layout.background,
        "first_colour": layout.first.colour,
        "first_shape": layout.first.shape,
        "second_colour": second.colour,
        "second_shape": second.shape,
    }
    return {name: CLASSES[name].index(value) for name, value in stated.items()}


def single_captions() -> list[str]:
    """All 24 captions with one shape."""
    return [
        f"a {colour} {shape} on a {background} background"
        for colour, shape, background in itertools.product(COLOURS, SHAPES, BACKGROUNDS)
    ]


def pair_captions() -> list[str]:
    """All 1,056 captions with two different shapes."""
    things = list(itertools.product(COLOURS, SHAPES))
    return [
        f"a {' '.join(subject)} {relation} a {' '.join(other)} on a {background} background"
        for subject, other in itertools.permutations(things, 2)
        for relation, background in itertools.product(RELATIONS, BACKGROUNDS)
    ]


def is_held_out(caption: str) -> bool:
    """True for the fifth of captions that no reinforcement learning of the starter may train on (split by hash)."""
    return int(hashlib.sha256(caption.encode()).hexdigest(), 16) % 5 == 0


def place(layout: Layout, rng: np.random.Generator) -> list[Placed]:
    """Draw the geometry that a caption leaves open: sizes and positions, never overlapping, never cut off."""
    middle = IMAGE_SIZE / 2
    if layout.second is None:
        x, y = middle + rng.uniform(-3, 3, 2)
        return [Placed(layout.first, x, y, rng.uniform(11.5, 13.5))]
    placed = []
    for thing, centre in zip(layout.things, (18.0, 46.0), strict=True):
        along = centre + rng.uniform(-2, 2)
        across = middle + rng.uniform(-9, 9)
        x, y = (along, across) if layout.axis == "horizontal" else (across, along)
        placed.append(Placed(thing, x, y, rng.uniform(8, 10.5)))
    return placed


def outline(shape: str, x: float, y: float, half: float) -> list[tuple[float, float]]:
    """Corner points of a polygon shape, or the two bounding-box corners of a circle, in pixels."""
    if shape == "circle":
        return [(x - half, y - half), (x + half, y + half)]
    if shape == "square":
        side = 0.9 * half
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    return [(x, y - half), (x + 1.1 * half, y + half), (x - 1.1 * half, y + half)]


def render(placed: list[Placed], background: str) -> Image.Image:
    """Draw a scene as a 64x64 RGB picture (drawn at four times the size, box filtered)."""
    scale = _SUPERSAMPLE
    canvas = Image.new("RGB", (IMAGE_SIZE * scale, IMAGE_SIZE * scale), BACKGROUNDS[background])
    draw = ImageDraw.Draw(canvas)
    for item in placed:
        points = [(px * scale, py * scale) for px, py in outline(item.thing.shape, item.x, item.y, item.half)]
        shape = draw.ellipse if item.thing.shape == "circle" else draw.polygon
        shape(points, fill=COLOURS[item.thing.colour])
    return canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX)


def draw_caption(caption: str, rng: np.random.Generator) -> Image.Image:
    """A random true picture of a caption."""
    layout = parse_caption(caption)
    return render(place(layout, rng), layout.background)
