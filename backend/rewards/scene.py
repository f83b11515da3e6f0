"""Scene accuracy: does the picture show exactly what its caption says? Verifiable, so nothing can flatter it.

A picture is right when it has the stated number of objects and no other, each with the stated colour and shape, standing
in the stated relation on the stated background. With ``partial`` a wrong picture earns credit fact by fact, so that a
learner gets a slope where right pictures are still rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch.nn.functional import interpolate

from ..starter.world import IMAGE_SIZE, Layout, Thing, parse_caption
from .base import BatchError, ScorerError, check_batch, register, with_failures
from .scene_reader import MIN_FIT, FoundObject, FoundScene, read_scenes

PARTIAL_CEILING = 0.75  # what a picture with every fact nearly right earns; only a right one gets 1
MIN_DOMINANCE = 1.2  # two objects stand beside each other when |dx| is at least so many times |dy|, and the other way round
_UNLIKE = 0.6  # overlap with an ideal shape that unlike shapes of the same area reach anyway


@register("scene_accuracy")
class SceneAccuracy:
    """1.0 for a picture that shows its caption, 0.0 for any other.

    Args:
        partial: give wrong pictures the share of stated facts found, scaled into [0, 0.75].
    """

    name = "scene_accuracy"
    held_out = False

    def __init__(self, partial: bool = False):
        if not isinstance(partial, bool):
            raise ScorerError(f"scene_accuracy: partial must be true or false, got {partial!r}")
        self.partial = partial

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise :class:`~mixgrpo.backend.starter.world.CaptionError` for the first prompt outside the grammar."""
        for prompt in prompts:
            parse_caption(prompt)

    def score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Score square pictures (N, 3, S, S) in [0, 1]; other sizes than 64 are resized.

        Returns:
            float32 (N,) in [0, 1]; NaN for a picture with NaN or infinite values.

        Raises:
            CaptionError: a prompt is outside the starter world's grammar.
            BatchError: pictures and prompts do not fit, or the pictures are not square.
        """
        finite = check_batch(images, prompts)
        layouts = [parse_caption(prompt) for prompt, scored in zip(prompts, finite.tolist(), strict=True) if scored]
        pictures = world_pictures(images[finite.to(images.device)]).permute(0, 2, 3, 1).contiguous() * 255
        scenes = read_scenes(pictures.numpy())
        values = [self._value(scene, layout) for scene, layout in zip(scenes, layouts, strict=True)]
        return with_failures(torch.tensor(values, dtype=torch.float32), finite)

    def _value(self, scene: FoundScene, layout: Layout) -> float:
        if is_right(scene, layout):
            return 1.0
        return PARTIAL_CEILING * facts_found(scene, layout) if self.partial else 0.0


def is_right(scene: FoundScene, layout: Layout) -> bool:
    """True when the scene is what the layout states and nothing else."""
    if scene.background != layout.background or scene.count != len(layout.things):
        return False
    return any(
        all(Thing(found.colour, found.shape) == thing for found, thing in zip(order, layout.things, strict=True))
        and stand_as(order, layout.axis)
        for order in permutations(scene.objects)
    )


def stand_as(objects: Sequence[FoundObject], axis: str) -> bool:
    """True when the first object stands left of ('horizontal') or above ('vertical') the second; always for one object."""
    if axis == "single":
        return True
    first, second = objects
    dx, dy = second.x - first.x, second.y - first.y
    along, across = (dx, dy) if axis == "horizontal" else (dy, dx)
    return along >= MIN_DOMINANCE * abs(across)


def facts_found(scene: FoundScene, layout: Layout) -> float:
    """Share of the stated facts that a picture shows, in [0, 1].

    Facts of equal weight: the number of objects, the background, every object's colour and shape, and the relation.
    Objects are assigned to the stated things in the way that earns most. A colour earns its share of the object's
    inside; a shape that is not recognised, or another one, earns up to half a fact, the more the closer it comes.
    """
    wanted = len(layout.things)
    general = [1 / (1 + abs(scene.count - wanted)), scene.background_shares[layout.background]]
    candidates: list[FoundObject | None] = [*scene.objects, *[None] * wanted]
    best = max(_object_facts(order, layout) for order in permutations(candidates, wanted))
    relations = 0 if layout.second is None else 1
    return (sum(general) + best) / (len(general) + 2 * wanted + relations)


def _object_facts(order: Sequence[FoundObject | None], layout: Layout) -> float:
    facts = sum(_thing_facts(found, thing) for found, thing in zip(order, layout.things, strict=True) if found is not None)
    if layout.second is None or None in order:
        return facts
    return facts + stand_as([found for found in order if found is not None], layout.axis)


def _thing_facts(found: FoundObject, thing: Thing) -> float:
    nearness = (found.fits[thing.shape] - _UNLIKE) / (MIN_FIT[thing.shape] - _UNLIKE)
    shape = 1.0 if found.shape == thing.shape else 0.5 * min(max(nearness, 0.0), 1.0)
    return found.colour_shares[thing.colour] + shape


def world_pictures(images: torch.Tensor) -> torch.Tensor:
    """Pictures (N, 3, S, S) as the starter world draws them: float32 (N, 3, 64, 64) in [0, 1] on the CPU.

    Raises:
        BatchError: the pictures are not square.
    """
    height, width = images.shape[2:]
    if height != width:
        raise BatchError(f"pictures of the starter world are square, got {width}x{height}; squeezing one would change its shapes")
    images = images.detach().to("cpu", torch.float32).clamp(0, 1)
    if height != IMAGE_SIZE and len(images):
        images = interpolate(images, (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
    return images
