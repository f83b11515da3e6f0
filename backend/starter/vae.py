"""Training of the starter's VAE, a TAESD-shaped autoencoder, towards the fixed latent code.

The decoder learns to invert the code with sharp edges from slightly noisy latents (what a sampler hands it is never
exact); the encoder learns the code itself. Both see 32x32 crops, which cost a quarter of a picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderTiny
from torch import nn

from . import latents
from .stages import Stage

SCALE, SHIFT = 1.5305, 0.0609  # SD3's latent format: a VAE latent z is (z - SHIFT) * SCALE for transformer and decoder
_CROP = 4  # latent blocks
_LATENT_NOISE = 0.15


def build_vae() -> AutoencoderTiny:
    """A 16-channel TAESD (2.5 M parameters)."""
    return AutoencoderTiny(latent_channels=latents.CHANNELS)


def to_taesd(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Diffusers' AutoencoderTiny keys to the single-file form of ComfyUI's stock VAE loader.

    The decoder's indices move by one: TAESD counts the soft clamp as its layer 0.
    """
    renamed = {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}
    for name, value in state.items():
        part, _, index, rest = name.split(".", 3)
        number = int(index) + (part == "decoder")
        renamed[f"taesd_{part}.{number}.{rest}"] = value
    return renamed


def from_taesd(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of :func:`to_taesd`."""
    renamed = {}
    for name, value in state.items():
        if name in ("vae_scale", "vae_shift"):
            continue
        part, index, rest = name.removeprefix("taesd_").split(".", 2)
        renamed[f"{part}.layers.{int(index) - (part == 'decoder')}.{rest}"] = value
    return renamed


class _Crops:
    """Random 32x32 crops of random scenes with their latents, a function of (seed, step)."""

    def __init__(self, folder: Path, scenes: int, seed: int):
        _, pictures = latents.random_scenes(scenes, np.random.default_rng(seed))
        self.pixels = latents.to_pixels(pictures)
        self.code = latents.LatentCode.load(folder / "latent_code.safetensors")
        self.seed = seed

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([self.seed, step])
        side = _CROP * latents.BLOCK
        crops = []
        for row, top, left in zip(
            rng.integers(len(self.pixels), size=size), *rng.integers(0, 5, (2, size)) * latents.BLOCK, strict=True
        ):
            crops.append(self.pixels[row, :, top : top + side, left : left + side])
        pixels = torch.stack(crops)
        return pixels, self.code.encode(pixels)


def train(
    folder: Path, until: int, seed: int, batch: int = 16, peak: float = 5e-4, decay: int = 1500, scenes: int = 8_000
) -> None:
    """Train to step ``until``, continuing from ``folder/vae_training`` when there is a checkpoint."""
    torch.manual_seed(seed)
    model = build_vae().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.0)
    crops = _Crops(folder, scenes, seed)
    stage = Stage(folder / "vae_training", model, optimizer, until)
    while stage.step < until:
        stage.set_learning_rate(peak, decay)
        pixels, code = crops.batch(stage.step, batch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + stage.step)
        noisy = code + _LATENT_NOISE * torch.rand(batch, 1, 1, 1, generator=generator) * torch.randn(
            code.shape, generator=generator
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stage.step < until - decay):
            loss = nn.functional.l1_loss(model.decoder(noisy).float(), pixels)
            if stage.step % 3 == 0:
                loss = loss + 0.1 * nn.functional.mse_loss(model.encoder(pixels).float(), code)
        stage.update(loss)
