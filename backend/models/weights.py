"""The files of the base models, without PyTorch: the server compares them with what a run was trained on."""

from __future__ import annotations

from pathlib import Path

from ..files import known_sha256
from ..specs import ModelSpec

STARTER = Path(__file__).resolve().parents[1] / "starter" / "weights"
TRANSFORMER_FILES = {"starter": STARTER / "transformer" / "diffusion_pytorch_model.safetensors"}
"""By model family, the file whose bytes a run and its LoRAs belong to."""


def base_model_hash(spec: ModelSpec) -> str:
    """SHA-256 of the transformer's file, so that a run and its LoRAs name the bytes they belong to.

    Raises:
        StorageError: the file cannot be read.
    """
    return known_sha256(TRANSFORMER_FILES[spec.family])
