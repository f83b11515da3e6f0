"""The starter as a graph holds it, and MixGRPO Sampler run on it in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

CAPTION = "a blue square left of a yellow triangle on a black background"
OTHER = "a red circle on a white background"
TOLERANCE = 1e-5


def load_graph(folder: Path) -> SimpleNamespace:
    """MODEL and encoded prompts, as the starter node and CLIP Text Encode give them."""
    from mixgrpo.nodes.starter import load_starter_objects

    model, clip, vae = load_starter_objects(folder)
    encode = {text: clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (CAPTION, OTHER, "")}
    return SimpleNamespace(model=model, clip=clip, vae=vae, encode=encode, folder=folder)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||ours||."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / ours.norm()).item()


def empty(rows: int, **more) -> dict:
    return {"samples": torch.zeros(rows, 16, 8, 8), **more}


def draw(graph: SimpleNamespace, latent=None, positive=None, negative=None, model=None, **widgets):
    """Run MixGRPO Sampler; returns (latents, trajectory, summary)."""
    from mixgrpo.nodes.sampler import FlowSampler

    defaults = {"seed": 7, "steps": 8, "schedule": "shift", "shift": 3.0, "cfg": 1.0, "group_size": 1, "shared_noise": True,
                "eta": 0.7, "window_start": 0, "window_size": 3}  # fmt: skip
    output = FlowSampler.execute(
        model or graph.model, positive or graph.encode[CAPTION], graph.encode[""] if negative is None else negative,
        latent or empty(1), **defaults | widgets,
    )  # fmt: skip
    latents, trajectory = output.result
    return latents, trajectory, output.ui["mixgrpo_sampler"][0]
