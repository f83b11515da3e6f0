"""Drawing pictures without training: plain ODE sampling, the same pictures for the same captions and seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import MixGRPOError
from ..flow.noise import initial_noise
from ..flow.rollout import rollout
from ..flow.window import Window
from ..models.base import GuidedVelocity
from ..models.sd3 import SD3
from ..specs import SamplingSpec
from .trainer import sigma_table


class EvaluationError(MixGRPOError):
    """Pictures that cannot be drawn as asked."""


@torch.no_grad()
def draw(
    model: SD3,
    prompts: Sequence[str],
    seeds: Sequence[int],
    sampling: SamplingSpec,
    negative_prompt: str = "",
    batch: int = 64,
    on_batch: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """One picture for every (prompt, seed) pair, by Euler steps over the whole sigma table.

    Args:
        seeds: every picture has a seed of its own, so it is the same in any company; as in ComfyUI with batch size 1.
        batch: pictures drawn at once.
        on_batch: called with (pictures done, pictures in all).

    Returns:
        float32 (N, 3, height, width) in [0, 1] on the CPU.

    Raises:
        EvaluationError: there are not as many seeds as prompts.
    """
    if len(prompts) != len(seeds):
        raise EvaluationError(f"{len(prompts)} prompts and {len(seeds)} seeds; give one seed for every prompt")
    unique = list(dict.fromkeys(prompts))
    velocity = GuidedVelocity(model, model.encode(unique), model.encode([negative_prompt]), sampling.guidance, 2 * batch)
    rows = torch.tensor([unique.index(prompt) for prompt in prompts])
    return draw_rows(model, velocity, rows, seeds, sampling, batch, on_batch)


@torch.no_grad()
def draw_rows(
    model: SD3,
    velocity: GuidedVelocity,
    rows: torch.Tensor,
    seeds: Sequence[int],
    sampling: SamplingSpec,
    batch: int,
    on_batch: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """:func:`draw` with prompts that are embedded already: int64 ``rows`` (N,) of the conditions in ``velocity``."""
    shape, sigmas = model.latent_shape(sampling.width, sampling.height), sigma_table(sampling)
    dtype = torch.float64 if model.transformer.dtype == torch.float64 else torch.float32
    pictures = []
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        noise = torch.cat([initial_noise(seed, (1, *shape)) for seed in seeds[part]]).to(model.device, dtype)
        final = rollout(velocity.for_prompts(rows[part]), noise, sigmas, Window(0, 0), 0.0, _no_noise, 1).final
        pictures.append(model.decode(final).cpu())
        if on_batch:
            on_batch(min(start + batch, len(rows)), len(rows))
    return torch.cat(pictures)


def _no_noise(step: int) -> torch.Tensor:
    raise AssertionError(f"an ODE step ({step}) draws no noise")
