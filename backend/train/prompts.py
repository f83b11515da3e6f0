"""Which prompts an iteration trains on: a pure function of seed and iteration."""

from __future__ import annotations

import torch

from ..flow.noise import derive_seed


def prompt_rows(seed: int, iteration: int, prompts: int, per_iteration: int) -> list[int]:
    """Indices of the prompts of an iteration (0, 1, …): the next ones of an endless row of shuffled passes over all."""
    places = range(iteration * per_iteration, (iteration + 1) * per_iteration)
    orders = {place // prompts: None for place in places}
    for epoch in orders:
        generator = torch.Generator().manual_seed(derive_seed(seed, "prompts", epoch))
        orders[epoch] = torch.randperm(prompts, generator=generator).tolist()
    return [orders[place // prompts][place % prompts] for place in places]
