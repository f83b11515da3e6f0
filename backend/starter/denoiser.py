"""Training of the starter's SD3 transformer by flow matching on the fixed latent code and the frozen text embeddings.

Every step draws its batch, times and noise from (seed, step), so a stopped run continues with the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from torch import nn
from transformers import CLIPTextModelWithProjection

from . import latents, text, world
from .stages import Stage

LAYERS = 3
HEAD_SIZE = 64  # ComfyUI derives heads and depth of an SD3 from its width, in units of 64


def build_transformer() -> SD3Transformer2DModel:
    """A 3 x 192 SD3 transformer (3.8 M parameters) whose modulations and output start at zero."""
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=latents.CHANNELS,
        out_channels=latents.CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=LAYERS,
        caption_projection_dim=LAYERS * HEAD_SIZE,
        joint_attention_dim=text.WIDTH,
        pooled_projection_dim=text.WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(
            ("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class SceneLatents:
    """Latents of pre-drawn scenes with the embeddings of their captions; batches are a function of (seed, step)."""

    def __init__(self, folder: Path, count: int, seed: int, dropout: float = 0.1):
        tokenizer = text.build_tokenizer()
        encoder = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
        texts = ["", *world.single_captions(), *world.pair_captions()]
        self.states, self.pooled = text.embed(encoder, tokenizer, texts)
        captions, pictures = latents.random_scenes(count, np.random.default_rng(seed))
        index = {caption: row for row, caption in enumerate(texts)}
        self.text_rows = torch.tensor([index[caption] for caption in captions])
        code = latents.LatentCode.load(folder / "latent_code.safetensors")
        self.latents = torch.cat([code.encode(latents.to_pixels(part)) for part in np.array_split(pictures, 64)])
        self.seed, self.dropout = seed, dropout

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, ...]:
        """(x0, noise, sigma, hidden states, pooled) of one step; a tenth of the captions is dropped for guidance."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows = torch.randint(len(self.latents), (size,), generator=generator)
        texts = torch.where(torch.rand(size, generator=generator) < self.dropout, 0, self.text_rows[rows])
        noise = torch.randn(size, *self.latents.shape[1:], generator=generator)
        sigma = torch.sigmoid(0.5 + torch.randn(size, generator=generator))
        sigma = torch.where(torch.rand(size, generator=generator) < 0.2, torch.rand(size, generator=generator), sigma)
        return self.latents[rows], noise, sigma, self.states[texts], self.pooled[texts]


def train(
    folder: Path, until: int, seed: int, batch: int = 128, peak: float = 1e-3, decay: int = 2000, scenes: int = 40_000
) -> None:
    """Train to step ``until``, continuing from ``folder/denoiser`` when there is a checkpoint."""
    torch.manual_seed(seed)
    model = build_transformer().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    data = SceneLatents(folder, scenes, seed)
    stage = Stage(folder / "denoiser", model, optimizer, until)
    while stage.step < until:
        stage.set_learning_rate(peak, decay)
        x0, noise, sigma, states, pooled = data.batch(stage.step, batch)
        level = sigma.view(-1, 1, 1, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            velocity = model((1 - level) * x0 + level * noise, states, pooled, sigma * 1000, return_dict=False)[0]
        stage.update(nn.functional.mse_loss(velocity.float(), noise - x0))
