"""What a scorer is, and the table of scorers that a job can name.

A scorer turns pictures and their prompts into one number per picture; higher is always better. A picture that cannot be
scored gets NaN, which the advantages mask out, and never stops the batch; a caption or an option that can never work is
refused with a typed error instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch

from ..errors import MixGRPOError

_RANGE_SLACK = 0.05  # decoders overshoot [0, 1] a little; [-1, 1] or [0, 255] is a mistake of the caller


class ScorerError(MixGRPOError):
    """A scorer that does not exist, or an option that it does not have."""


class BatchError(MixGRPOError):
    """Pictures and prompts that do not go together, or pictures of another shape, type or range."""


@runtime_checkable
class Scorer(Protocol):
    """One reward.

    Attributes:
        name: the name under which a job asks for it and under which its values are shown.
        held_out: shown to the user, never trained on; the trainer refuses it as a reward.
    """

    name: str
    held_out: bool

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise a typed error for the first prompt that can never be scored; called before any model is loaded."""
        ...

    def score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Score pictures.

        Args:
            images: floating point, (N, 3, H, W), in [0, 1], on any device.
            prompts: N prompts, one per picture.

        Returns:
            float32 of shape (N,) on the CPU; NaN for a picture that could not be scored.

        Raises:
            BatchError: shape, type, range or number do not fit.
        """
        ...


ScorerFactory = Callable[..., Scorer]
_Factory = TypeVar("_Factory", bound=ScorerFactory)

SCORERS: dict[str, ScorerFactory] = {}
HELD_OUT: set[str] = set()


def register(name: str, held_out: bool = False) -> Callable[[_Factory], _Factory]:
    """Enter a class or function, whose keyword arguments are the scorer's options, into :data:`SCORERS`."""

    def enter(factory: _Factory) -> _Factory:
        if name in SCORERS:
            raise ScorerError(f"a scorer called {name!r} exists already; choose another name")
        SCORERS[name] = factory
        if held_out:
            HELD_OUT.add(name)
        return factory

    return enter


def make_scorer(name: str, **options: object) -> Scorer:
    """Build the scorer ``name``.

    Raises:
        ScorerError: no such scorer, no such option, or an option's value is not allowed.
    """
    if name not in SCORERS:
        raise ScorerError(f"there is no scorer called {name!r}; there are: {', '.join(sorted(SCORERS))}")
    known = list(inspect.signature(SCORERS[name]).parameters)
    for option in options:
        if option not in known:
            instead = f"its options are: {', '.join(known)}" if known else "it has no options"
            raise ScorerError(f"the scorer {name!r} has no option {option!r}; {instead}")
    return SCORERS[name](**options)


def check_batch(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Bool (N,): which pictures hold only finite values.

    Raises:
        BatchError: not (N, 3, H, W), not floating point, outside [0, 1], or not one prompt per picture.
    """
    if isinstance(prompts, str):
        raise BatchError("prompts must be a list with one prompt per picture, not one string")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise BatchError(f"pictures must have the shape (N, 3, height, width), got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise BatchError(f"pictures must be floating point in [0, 1], got {images.dtype}; divide 8-bit pictures by 255")
    if len(images) != len(prompts):
        raise BatchError(f"got {len(images)} pictures for {len(prompts)} prompts; give one prompt per picture")
    finite = torch.isfinite(images).flatten(1).all(1)
    if finite.any():
        low, high = (float(bound) for bound in torch.aminmax(images.detach()[finite]))
        if low < -_RANGE_SLACK or high > 1 + _RANGE_SLACK:
            raise BatchError(f"pictures must lie in [0, 1], got values from {low:.3g} to {high:.3g}; rescale or clamp them first")
    return finite.cpu()


def with_failures(values: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Spread the values of the pictures that were scored over the batch; the others are NaN.

    Args:
        values: (number of True in ``scored``,).
        scored: bool (N,).

    Returns:
        float32 (N,) on the CPU.
    """
    result = torch.full((len(scored),), float("nan"))
    result[scored] = values.detach().to("cpu", torch.float32)
    return result
