"""The starter's files, loaded by ComfyUI's own loaders, compute what diffusers and transformers compute from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import SD3Transformer2DModel
from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window
from mixgrpo.backend.starter import text, vae
from starter_clip import load_clip
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerFast

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
def ours(starter: Path) -> SimpleNamespace:
    """The starter in diffusers and transformers, in float32."""
    autoencoder = vae.build_vae().eval()
    stored = load_tensors(starter / "vae" / "starter_vae.safetensors")
    autoencoder.load_state_dict({name: tensor.float() for name, tensor in vae.from_taesd(stored).items()})
    return SimpleNamespace(
        transformer=SD3Transformer2DModel.from_pretrained(starter / "transformer", torch_dtype=torch.float32).eval(),
        encoder=CLIPTextModelWithProjection.from_pretrained(starter / "text_encoder", dtype=torch.float32).eval(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(starter / "tokenizer"),
        vae=autoencoder,
    )


@pytest.fixture(scope="module")
def theirs(comfy, starter: Path) -> SimpleNamespace:
    """The same files in ComfyUI: what UNETLoader and VAELoader return, and a CLIP."""
    autoencoder = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(starter / "vae" / "starter_vae.safetensors")))
    autoencoder.throw_exception_if_invalid()
    return SimpleNamespace(
        model=comfy.sd.load_diffusion_model(str(starter / "transformer" / "diffusion_pytorch_model.safetensors")),
        clip=load_clip(comfy, starter),
        vae=autoencoder,
    )


@torch.no_grad()
def test_velocity(ours, theirs):
    generator = torch.Generator().manual_seed(1)
    x, sigma = torch.randn(5, 16, 8, 8, generator=generator), torch.tensor([1.0, 0.9, 0.5, 0.1, 0.01])
    states, pooled = text.embed(ours.encoder, ours.tokenizer, [*CAPTIONS, CAPTIONS[1]])
    velocity = ours.transformer(x, states, pooled, sigma * 1000).sample
    inside = theirs.model.model.diffusion_model(x, sigma * 1000, context=states, y=pooled)
    assert relative(velocity, inside) < TOLERANCE
    denoised = theirs.model.model.apply_model(x, sigma, c_crossattn=states, y=pooled)
    assert relative(velocity, (x - denoised) / sigma.view(-1, 1, 1, 1)) < TOLERANCE


@torch.no_grad()
def test_decoded_picture(ours, theirs):
    latent = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    in_graph = theirs.model.get_model_object("latent_format").process_out(latent)  # what a LATENT socket carries
    picture = (ours.vae.decode(latent).sample + 1) / 2
    unclamped = (theirs.vae.first_stage_model.decode(in_graph) + 1) / 2
    assert relative(picture, unclamped) < TOLERANCE
    assert relative(picture.clamp(0, 1), theirs.vae.decode(in_graph).movedim(-1, 1)) < TOLERANCE


@torch.no_grad()
def test_encoded_picture(ours, theirs):
    picture = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    latent = ours.vae.encode(picture * 2 - 1).latents
    in_graph = theirs.vae.encode(picture.movedim(1, -1))
    assert relative(latent, theirs.model.get_model_object("latent_format").process_in(in_graph)) < TOLERANCE


@pytest.mark.parametrize("caption", CAPTIONS)
def test_text_embedding(ours, theirs, caption):
    tokens = theirs.clip.tokenize(caption)
    states, pooled = text.embed(ours.encoder, ours.tokenizer, [caption])
    assert [[token for token, _ in chunk] for chunk in tokens["l"]] == text.token_ids(ours.tokenizer, [caption]).tolist()
    their_states, their_pooled = theirs.clip.encode_from_tokens(tokens, return_pooled=True)
    assert relative(states, their_states) < TOLERANCE
    assert relative(pooled, their_pooled) < TOLERANCE


@torch.no_grad()
def test_the_whole_graph_draws_what_the_trainer_samples(comfy, ours, theirs):
    """KSampler (euler, simple, guidance 3) and VAEDecode against a rollout with an empty window, from text to picture."""
    steps, guidance, seed, rows = 8, 3.0, 7, 2
    noise = initial_noise(seed, (rows, 16, 8, 8))
    states, pooled = text.embed(ours.encoder, ours.tokenizer, ["", CAPTIONS[2]])

    def velocity(x, sigma):
        blank, wanted = (
            ours.transformer(x, states[i].expand(rows, -1, -1), pooled[i].expand(rows, -1), (sigma * 1000).expand(rows)).sample
            for i in (0, 1)
        )
        return blank + guidance * (wanted - blank)

    ode = rollout(velocity, noise, shifted_sigmas(steps, 3.0), Window(0, 0), 0.0, None, rows, shared=False)
    positive, negative = (theirs.clip.encode_from_tokens_scheduled(theirs.clip.tokenize(prompt)) for prompt in (CAPTIONS[2], ""))
    samples = comfy.sample.sample(
        theirs.model, noise, steps, guidance, "euler", "simple", positive, negative, torch.zeros_like(noise),
        seed=seed, disable_pbar=True,
    )  # fmt: skip
    assert relative(ode.final, theirs.model.get_model_object("latent_format").process_in(samples)) < TOLERANCE
    picture = ((ours.vae.decode(ode.final).sample + 1) / 2).clamp(0, 1)
    assert relative(picture, theirs.vae.decode(samples).movedim(-1, 1)) < TOLERANCE
