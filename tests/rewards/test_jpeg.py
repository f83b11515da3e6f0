"""JPEG size: more detail, more bits."""

import io

import pytest
import torch
from PIL import Image

from mixgrpo.backend.rewards import make_scorer

LESS = make_scorer("jpeg_compressibility")
MORE = make_scorer("jpeg_incompressibility")


def noisy(levels, size=64) -> torch.Tensor:
    noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    return torch.cat([(0.5 + level * noise).clamp(0, 1) for level in levels])


def test_rises_with_noise():
    images = noisy([0, 0.02, 0.05, 0.1, 0.2])
    bits = MORE.score(images, [""] * 5)
    assert (bits.diff() > 0.5).all()
    assert torch.equal(LESS.score(images, [""] * 5), -bits)


def test_is_the_size_of_the_file():
    image = noisy([0.1])
    buffer = io.BytesIO()
    Image.fromarray((image[0] * 255).round().byte().permute(1, 2, 0).numpy()).save(buffer, "JPEG", quality=95)
    assert MORE.score(image, [""]).item() == pytest.approx(8 * len(buffer.getvalue()) / 64**2)


def test_compares_across_sizes():
    small, large = MORE.score(noisy([0.1], 128), [""]), MORE.score(noisy([0.1], 256), [""])
    assert large.item() == pytest.approx(small.item(), rel=0.1)
