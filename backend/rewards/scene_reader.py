"""Reading a starter-world picture by its pixels: which coloured shapes stand where, on which background.

Foreground is what lies closer to one of the shape colours than to the background; its connected components are the
objects. An object's colour is that of its inside (one pixel eroded, since the mix of two colours on an edge can look
like a third), its shape the ideal circle, square or upright triangle of the same area and centroid that overlaps it
best. Everything but the last few comparisons runs on the whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from ..starter.world import BACKGROUNDS, COLOURS, IMAGE_SIZE, SHAPES

MAX_COLOUR_ERROR = 72.0  # Euclidean, in 8-bit units: 40 in each channel, and just under half the closest colours' distance
MIN_PURITY = 0.92  # share of an object's inside, or of the background, that must have its colour
SPECKLE = 4  # components of at most this many pixels are dirt, not objects
MIN_AREA = 50  # below this a circle, a square and a triangle look alike
MIN_FIT = {"circle": 0.88, "square": 0.86, "triangle": 0.84}  # overlap (intersection over union) with the ideal shape
MIN_FIT_MARGIN = 0.04  # by which the best shape must beat the second
MAX_OBJECTS = 6  # objects looked at per picture, largest first; more than two are wrong anyway

_COLOUR_NAMES = tuple(COLOURS)
_BACKGROUND_NAMES = tuple(BACKGROUNDS)
_PALETTE = np.array([*COLOURS.values(), *BACKGROUNDS.values()], np.float32)
_IN_PLANE = np.zeros((3, 3, 3), bool)  # 4-connected inside a picture, never between the pictures of a batch
_IN_PLANE[1] = ndimage.generate_binary_structure(2, 1)
_CHUNK = 64  # objects or pictures per pass, so that the temporaries stay in the cache


@dataclass(frozen=True)
class FoundObject:
    """One object in a picture.

    Attributes:
        colour: name, or None when the inside has no single colour of the palette.
        shape: name, or None when it looks like none of the shapes, or like two of them.
        x, y: centroid in pixels of the 64x64 picture.
        area: pixels.
        colour_shares: for every colour the share of the inside that is closest to it, in [0, 1].
        fits: for every shape the overlap with its ideal form, in [0, 1].
    """

    colour: str | None
    shape: str | None
    x: float
    y: float
    area: int
    colour_shares: dict[str, float]
    fits: dict[str, float]


@dataclass(frozen=True)
class FoundScene:
    """What a picture shows.

    Attributes:
        background: name, or None when the rest of the picture has no single background colour.
        background_shares: for every background the share of the rest of the picture that has its colour, in [0, 1].
        objects: the largest :data:`MAX_OBJECTS` objects, largest first.
        count: number of all objects.
    """

    background: str | None
    background_shares: dict[str, float]
    objects: tuple[FoundObject, ...]
    count: int


def read_scenes(pictures: np.ndarray) -> list[FoundScene]:
    """Read pictures, float32 (N, 64, 64, 3) in [0, 255], finite."""
    scenes: list[FoundScene] = []
    for start in range(0, len(pictures), _CHUNK):
        scenes += _read_chunk(pictures[start : start + _CHUNK])
    return scenes


def _read_chunk(pictures: np.ndarray) -> list[FoundScene]:
    distances = _palette_distances(pictures)
    nearest = distances.argmin(-1)
    foreground = _foreground(distances, nearest)
    backgrounds, background_shares = _read_backgrounds(distances, foreground)
    labels, _ = ndimage.label(foreground, _IN_PLANE)
    kept, owners, counts = _select_objects(labels)
    objects: list[list[FoundObject]] = [[] for _ in pictures]
    if len(kept):
        masks = labels[owners] == kept[:, None, None]
        for owner, found in zip(owners, _read_objects(pictures[owners], masks, nearest[owners]), strict=True):
            objects[owner].append(found)
    return [
        FoundScene(background, dict(zip(_BACKGROUND_NAMES, map(float, shares), strict=True)), tuple(found), int(count))
        for background, shares, found, count in zip(backgrounds, background_shares, objects, counts, strict=True)
    ]


def _palette_distances(pictures: np.ndarray) -> np.ndarray:
    """Squared distance of every pixel to every palette colour, float32 (N, 64, 64, 6)."""
    squares = np.einsum("nhwc,nhwc->nhw", pictures, pictures)[..., None]
    return squares - 2 * (pictures @ _PALETTE.T) + (_PALETTE**2).sum(1)


def _foreground(distances: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """Bool (N, 64, 64): pixels closer to a shape colour than to the picture's more frequent background colour."""
    colours = len(_COLOUR_NAMES)
    votes = np.stack([(nearest == colours + index).sum((1, 2)) for index in range(len(_BACKGROUND_NAMES))], 1)
    chosen = colours + votes.argmax(1)
    to_background = np.take_along_axis(distances, chosen[:, None, None, None], 3)[..., 0]
    return to_background > distances[..., :colours].min(-1)


def _read_backgrounds(distances: np.ndarray, foreground: np.ndarray) -> tuple[list[str | None], np.ndarray]:
    """The background of every picture and the share (N, 2) of the rest that has each background's colour."""
    rest = ~_grow(foreground)
    close = distances[..., len(_COLOUR_NAMES) :] < MAX_COLOUR_ERROR**2
    shares = (close & rest[..., None]).sum((1, 2)) / np.maximum(rest.sum((1, 2)), 1)[:, None]
    best = shares.argmax(1)
    names = [_BACKGROUND_NAMES[index] if share[index] >= MIN_PURITY else None for index, share in zip(best, shares, strict=True)]
    return names, shares


def _select_objects(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels of the objects to look at, the picture of each, and the number (N,) of all objects in each picture."""
    values, first_pixels, sizes = np.unique(labels, return_index=True, return_counts=True)
    real = (values > 0) & (sizes > SPECKLE)
    values, sizes, owners = values[real], sizes[real], first_pixels[real] // (IMAGE_SIZE * IMAGE_SIZE)
    counts = np.bincount(owners, minlength=len(labels))
    order = np.lexsort((-sizes, owners))
    values, owners = values[order], owners[order]
    rank = np.arange(len(owners)) - np.concatenate([[0], np.cumsum(counts)])[owners]
    return values[rank < MAX_OBJECTS], owners[rank < MAX_OBJECTS], counts


def _read_objects(pictures: np.ndarray, masks: np.ndarray, nearest: np.ndarray) -> list[FoundObject]:
    """Objects from their pictures (M, 64, 64, 3), masks (M, 64, 64) and nearest palette entries (M, 64, 64)."""
    found: list[FoundObject] = []
    for start in range(0, len(masks), _CHUNK):
        part = slice(start, start + _CHUNK)
        colours, shares = _colours(pictures[part], masks[part], nearest[part])
        areas, xs, ys = _moments(masks[part])
        shapes, fits = _shapes(masks[part], areas, xs, ys)
        for colour, share, shape, fit, x, y, area in zip(colours, shares, shapes, fits, xs, ys, areas, strict=True):
            share, fit = share.tolist(), fit.tolist()
            found.append(
                FoundObject(
                    colour, shape, float(x), float(y), int(area),
                    dict(zip(_COLOUR_NAMES, share, strict=True)), dict(zip(SHAPES, fit, strict=True)),
                )
            )
    return found


def _colours(pictures: np.ndarray, masks: np.ndarray, nearest: np.ndarray) -> tuple[list[str | None], np.ndarray]:
    """The colour of every object and the share (M, 4) of its inside that is closest to each colour."""
    inside = _shrink(masks)
    pixels = np.maximum(inside.sum((1, 2)), 1)
    shares = np.stack([(inside & (nearest == index)).sum((1, 2)) / pixels for index in range(len(_COLOUR_NAMES))], 1)
    mean = np.einsum("mhwc,mhw->mc", pictures, inside.astype(np.float32)) / pixels[:, None]
    best = shares.argmax(1)
    error = np.linalg.norm(mean - _PALETTE[best], axis=1)
    sure = (shares[np.arange(len(best)), best] >= MIN_PURITY) & (error <= MAX_COLOUR_ERROR)
    return [_COLOUR_NAMES[index] if good else None for index, good in zip(best, sure, strict=True)], shares


def _moments(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Area and centroid (x, y) of every mask, each (M,)."""
    columns, rows = masks.sum(1, dtype=np.float32), masks.sum(2, dtype=np.float32)
    position = np.arange(IMAGE_SIZE, dtype=np.float32) + 0.5
    areas = rows.sum(1)
    return areas, columns @ position / areas, rows @ position / areas


def _shapes(masks: np.ndarray, areas: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> tuple[list[str | None], np.ndarray]:
    """The shape of every object and its overlap (M, 3) with the ideal forms of the same area and centroid."""
    position = np.arange(IMAGE_SIZE, dtype=np.float32) + 0.5
    dx = np.abs(position - xs[:, None])[:, None, :]
    dy = (position - ys[:, None])[:, :, None]
    area = areas[:, None, None]
    half = np.sqrt(area / 2.2)  # of the world's triangle: 2.2 half extents wide, 2 high
    forms = (
        dx**2 + dy**2 <= area / np.pi,
        np.maximum(dx, np.abs(dy)) <= np.sqrt(area) / 2,
        (dy <= 2 / 3 * half) & (dx <= 0.55 * (dy + 4 / 3 * half)),
    )
    fits = np.stack([_overlap(masks, form, areas) for form in forms], 1)
    best, ordered = fits.argmax(1), np.sort(fits, 1)
    close = ordered[:, -1] >= np.array([MIN_FIT[shape] for shape in SHAPES])[best]
    sure = close & (areas >= MIN_AREA) & (ordered[:, -1] - ordered[:, -2] >= MIN_FIT_MARGIN)
    return [SHAPES[index] if good else None for index, good in zip(best, sure, strict=True)], fits


def _overlap(masks: np.ndarray, form: np.ndarray, areas: np.ndarray) -> np.ndarray:
    """Intersection over union (M,)."""
    both = (masks & form).sum((1, 2))
    return both / (areas + form.sum((1, 2)) - both)


def _grow(masks: np.ndarray) -> np.ndarray:
    """Masks with their four neighbours."""
    grown = masks.copy()
    grown[:, 1:] |= masks[:, :-1]
    grown[:, :-1] |= masks[:, 1:]
    grown[:, :, 1:] |= masks[:, :, :-1]
    grown[:, :, :-1] |= masks[:, :, 1:]
    return grown


def _shrink(masks: np.ndarray) -> np.ndarray:
    """Masks without the pixels that touch the outside; the picture's edge counts as inside."""
    return ~_grow(~masks)
