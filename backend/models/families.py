"""The model families a job can name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ..specs import ModelSpec
from ..starter.load import TRANSFORMER_FILE, load_starter
from .sd3 import LORA_TARGETS, SD3

__all__ = ["LORA_TARGETS", "arithmetic", "base_model_hash", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def arithmetic(spec: ModelSpec) -> torch.dtype:
    """The dtype the transformer computes in."""
    return _DTYPES[spec.precision]


def load_model(spec: ModelSpec, device: torch.device) -> SD3:
    """Load a base model. bfloat16 is autocast over float32 weights, so that adapter and optimiser stay in float32."""
    dtype = arithmetic(spec)
    model = load_starter(device, torch.float32 if dtype == torch.bfloat16 else dtype)
    model.autocast = dtype if dtype == torch.bfloat16 else None
    return model


def base_model_hash(spec: ModelSpec) -> str:
    """SHA-256 of the transformer's file, so that a run and its LoRAs name the bytes they belong to."""
    file: Path = {"starter": TRANSFORMER_FILE}[spec.family]
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
