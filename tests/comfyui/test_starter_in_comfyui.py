"""The starter's files, loaded by ComfyUI's own loaders, compute what diffusers and transformers compute from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window
from mixgrpo.backend.models.base import GuidedVelocity
from mixgrpo.backend.models.sd3 import SD3
from mixgrpo.backend.starter import text
from mixgrpo.backend.starter.load import load_starter

CAPTIONS = [
    "",
    "a red circle on a white background",
    "A blue square left of a yellow triangle, on a black background.",
    "a green triangle above an unheard-of circle on a white background",
]
TOLERANCE = 1e-5


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """||ours - theirs|| / ||ours||."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).norm() / ours.norm()).item()


@pytest.fixture(scope="module")
def ours(starter: Path) -> SD3:
    """The starter as the trainer loads it: diffusers and transformers, in float32."""
    return load_starter(folder=starter)


@pytest.fixture(scope="module")
def theirs(comfy, starter: Path) -> SimpleNamespace:
    """The same files in ComfyUI: what UNETLoader and VAELoader return, and the starter node's CLIP."""
    from mixgrpo.nodes.starter_clip import load_clip

    autoencoder = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(starter / "vae" / "starter_vae.safetensors")))
    autoencoder.throw_exception_if_invalid()
    return SimpleNamespace(
        model=comfy.sd.load_diffusion_model(str(starter / "transformer" / "diffusion_pytorch_model.safetensors")),
        clip=load_clip(starter),
        vae=autoencoder,
    )


def to_graph(theirs: SimpleNamespace, latent: torch.Tensor) -> torch.Tensor:
    """From the transformer's latent to what a LATENT socket carries."""
    return theirs.model.get_model_object("latent_format").process_out(latent)


def from_graph(theirs: SimpleNamespace, latent: torch.Tensor) -> torch.Tensor:
    return theirs.model.get_model_object("latent_format").process_in(latent)


@pytest.mark.parametrize("sigma", [1.0, 0.9, 0.5, 0.01])
@torch.no_grad()
def test_velocity(ours, theirs, sigma):
    x = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    conditions, sigma = ours.encode(CAPTIONS), torch.tensor(sigma)
    velocity = ours.velocity(x, sigma, conditions)
    text_inputs = {"context": conditions["states"], "y": conditions["pooled"]}
    assert relative(velocity, theirs.model.model.diffusion_model(x, (sigma * 1000).expand(4), **text_inputs)) < TOLERANCE


@torch.no_grad()
def test_decoded_picture(ours, theirs):
    latent = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    assert relative(ours.decode(latent), theirs.vae.decode(to_graph(theirs, latent)).movedim(-1, 1)) < TOLERANCE
    unclamped = theirs.vae.first_stage_model.decode(to_graph(theirs, latent))
    assert relative(ours.vae.decode(latent).sample, unclamped) < TOLERANCE


@torch.no_grad()
def test_encoded_picture(ours, theirs):
    picture = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    latent = ours.vae.encode(picture * 2 - 1).latents
    assert relative(latent, from_graph(theirs, theirs.vae.encode(picture.movedim(1, -1)))) < TOLERANCE


@pytest.mark.parametrize("caption", CAPTIONS)
def test_text_embedding(ours, theirs, caption):
    tokens, conditions = theirs.clip.tokenize(caption), ours.encode([caption])
    assert [[token for token, _ in chunk] for chunk in tokens["l"]] == text.token_ids(ours.tokenizer, [caption]).tolist()
    states, pooled = theirs.clip.encode_from_tokens(tokens, return_pooled=True)
    assert relative(conditions["states"], states) < TOLERANCE
    assert relative(conditions["pooled"], pooled) < TOLERANCE


def test_the_whole_graph_draws_what_the_trainer_samples(comfy, ours, theirs):
    """KSampler (euler, simple, guidance 3) and VAEDecode against a rollout with an empty window, from text to picture."""
    steps, guidance, seed, rows = 8, 3.0, 7, 2
    noise = initial_noise(seed, (rows, 16, 8, 8))
    guided = GuidedVelocity(ours, ours.encode([CAPTIONS[2]]), ours.encode([""]), guidance, rows_per_call=64)
    velocity = guided.for_prompts(torch.zeros(rows, dtype=torch.long))
    ode = rollout(velocity, noise, shifted_sigmas(steps, 3.0), Window(0, 0), 0.0, None, rows, shared=False)

    positive, negative = (theirs.clip.encode_from_tokens_scheduled(theirs.clip.tokenize(prompt)) for prompt in (CAPTIONS[2], ""))
    samples = comfy.sample.sample(
        theirs.model, noise, steps, guidance, "euler", "simple", positive, negative, torch.zeros_like(noise),
        seed=seed, disable_pbar=True,
    )  # fmt: skip
    assert relative(ode.final, from_graph(theirs, samples)) < TOLERANCE
    assert relative(ours.decode(ode.final), theirs.vae.decode(samples).movedim(-1, 1)) < TOLERANCE
