"""The starter's latent space: 16 numbers for each 8x8 block of pixels, fixed before anything is trained.

A principal component analysis of the blocks keeps 99 % of their variance in 16 components. Fixing the code first keeps
colours exact (a code that an autoencoder finds for itself swaps colours that lie close together) and lets the VAE and
the denoiser train at the same time. Components are scaled by their deviation to the power -0.6: detail is audible, yet
nothing leaves the range that the decoder's soft clamp ``3 tanh(z / 3)`` passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..files import load_tensors, save_tensors
from . import world

CHANNELS = 16
BLOCK = 8
_SCALE_POWER = 0.6
_LATENT_STD = 0.8


@dataclass(frozen=True)
class LatentCode:
    """``latent = (block - mean) @ basis``; ``basis`` has shape (192, 16), blocks hold pixels in [-1, 1]."""

    mean: torch.Tensor
    basis: torch.Tensor

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels (B, 3, 64, 64) in [-1, 1] to latents (B, 16, 8, 8)."""
        batch, _, height, width = pixels.shape
        grid = pixels.reshape(batch, 3, height // BLOCK, BLOCK, width // BLOCK, BLOCK).permute(0, 2, 4, 3, 5, 1)
        return ((grid.flatten(3) - self.mean) @ self.basis).permute(0, 3, 1, 2)

    def save(self, path: Path) -> None:
        save_tensors(path, {"mean": self.mean, "basis": self.basis})

    @classmethod
    def load(cls, path: Path) -> LatentCode:
        tensors = load_tensors(path)
        return cls(tensors["mean"], tensors["basis"])


def random_scenes(count: int, rng: np.random.Generator, pair_share: float = 0.3) -> tuple[list[str], np.ndarray]:
    """Captions and their pictures, uint8 of shape (count, 64, 64, 3)."""
    singles, pairs = world.single_captions(), world.pair_captions()
    pools = [pairs if rng.random() < pair_share else singles for _ in range(count)]
    captions = [pool[rng.integers(len(pool))] for pool in pools]
    return captions, np.stack([np.asarray(world.draw_caption(caption, rng)) for caption in captions])


def to_pixels(pictures: np.ndarray) -> torch.Tensor:
    """uint8 pictures (B, H, W, 3) to float32 pixels (B, 3, H, W) in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def fit_code(scenes: int, seed: int) -> LatentCode:
    """Principal components of the 8x8x3 blocks of random scenes (deterministic up to the sign, which is fixed)."""
    _, pictures = random_scenes(scenes, np.random.default_rng(seed))
    blocks = pictures.reshape(-1, 8, BLOCK, 8, BLOCK, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 3 * BLOCK * BLOCK)
    blocks = blocks.astype(np.float64) / 127.5 - 1
    mean = blocks.mean(0)
    variance, vectors = np.linalg.eigh(np.cov((blocks - mean).T))
    order = np.argsort(variance)[::-1][:CHANNELS]
    vectors = vectors[:, order] * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])][order])
    basis = vectors / variance[order] ** (0.5 * _SCALE_POWER)
    basis *= _LATENT_STD / ((blocks - mean) @ basis).std()
    return LatentCode(torch.from_numpy(mean).float(), torch.from_numpy(basis).float())
