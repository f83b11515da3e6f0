"""Noise that depends on what it is for, and on nothing else: not on batch split, device, rank or window."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MixGRPOError


class NoiseError(MixGRPOError):
    """Noise asked for with arguments that do not fit together."""


def initial_noise(seed: int, shape: Sequence[int], batch_index: Sequence[int] | None = None) -> Tensor:
    """ComfyUI's ``prepare_noise``, bit for bit: float32 on the CPU, one stream for the whole batch.

    Args:
        seed: 0 <= seed < 2^64.
        shape: (rows, …).
        batch_index: row i is the row number ``batch_index[i]`` of a stream drawn row by row, as in ComfyUI.

    Returns:
        float32, ``shape``. The global random state is left alone.

    Raises:
        NoiseError: the seed is out of range, or ``batch_index`` does not have one index of at least 0 for every row.
    """
    if not 0 <= seed < 2**64:
        raise NoiseError(f"a seed lies between 0 and 2^64 - 1, got {seed}")
    generator = torch.Generator("cpu").manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    if len(batch_index) != shape[0] or min(batch_index, default=-1) < 0:
        raise NoiseError(f"batch_index needs one index of at least 0 for each of {shape[0]} rows, got {list(batch_index)}")
    rows = [torch.randn((1, *shape[1:]), generator=generator, dtype=torch.float32) for _ in range(max(batch_index) + 1)]
    return torch.cat([rows[i] for i in batch_index])


def step_noise(seed: int, sample_ids: Sequence[int | str], step: int, shape_of_one: Sequence[int]) -> Tensor:
    """Standard normal noise of one SDE step, a function of (seed, sample id, absolute step) alone.

    The stream is SHAKE-256 of the three, taken as 32-bit uniforms through the inverse normal distribution function. Not torch's
    generator: on the CPU that uses 32 bits of its seed, so two of a long run's streams would meet, or meet an initial noise.

    Returns:
        float32 on the CPU, (len(sample_ids), *shape_of_one).
    """
    size = math.prod(shape_of_one)
    stream = bytearray().join(hashlib.shake_256(_encode("step noise", seed, one, step)).digest(4 * size) for one in sample_ids)
    uniform = (torch.frombuffer(stream, dtype=torch.int32).double() + 0.5) / 2**32 + 0.5
    return torch.special.ndtri(uniform).float().reshape(len(sample_ids), *shape_of_one)


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that is a function of ``parts`` (SHA-256); 1 and "1" are different parts."""
    return int.from_bytes(hashlib.sha256(_encode("seed", *parts)).digest()[:8], "big") >> 1


def _encode(*parts: int | str) -> bytes:
    """An encoding in which different parts are different bytes."""
    return json.dumps(parts, separators=(",", ":")).encode()
