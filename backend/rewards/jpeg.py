"""JPEG size as a reward: the classic test of a trainer, since any model can learn it and anyone can see it.

Compressibility is the negative number of bits per pixel of the picture saved at quality 95, so plain pictures score
high; incompressibility is the positive number, so busy pictures do. Bits per pixel, not bytes, so that values of
different picture sizes compare.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from .base import check_batch, register, with_failures

QUALITY = 95


def bits_per_pixel(picture: np.ndarray) -> float:
    """Bits per pixel of an 8-bit picture (H, W, 3) as a JPEG of quality 95; the file's header counts too."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=QUALITY)
    height, width, _ = picture.shape
    return 8 * buffer.tell() / (height * width)


class _JpegSize:
    held_out = False

    def __init__(self, name: str, sign: float):
        self.name = name
        self._sign = sign

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Every prompt will do: the size of the file does not depend on it."""

    def score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Signed bits per pixel, float32 (N,); NaN for a picture with NaN or infinite values."""
        finite = check_batch(images, prompts)
        pixels = images.detach()[finite.to(images.device)].float().clamp(0, 1).mul(255).round().byte()
        pictures = pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        sizes = [bits_per_pixel(picture) for picture in pictures]
        return with_failures(self._sign * torch.tensor(sizes, dtype=torch.float32), finite)


@register("jpeg_compressibility")
def jpeg_compressibility() -> _JpegSize:
    """Rewards pictures that make small JPEG files."""
    return _JpegSize("jpeg_compressibility", -1.0)


@register("jpeg_incompressibility")
def jpeg_incompressibility() -> _JpegSize:
    """Rewards pictures that make large JPEG files."""
    return _JpegSize("jpeg_incompressibility", 1.0)
