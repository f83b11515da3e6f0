"""The starter's folder layout: where it is shipped, and the same four parts with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mixgrpo.backend import starter
from mixgrpo.backend.files import save_tensors
from mixgrpo.backend.starter import denoiser, text, vae

SHIPPED = Path(starter.__file__).parent / "weights"
_PARTS = ("text_encoder", "tokenizer", "transformer", "vae")
STARTERS = ["random", "shipped"] if all((SHIPPED / part).is_dir() for part in _PARTS) else ["random"]


def write_random_starter(folder: Path) -> Path:
    """Write the four parts as the training script does, in float16, without a single zero that could hide a wrong key."""
    generator = torch.Generator().manual_seed(0)
    transformer, encoder, autoencoder = denoiser.build_transformer(), text.build_encoder(), vae.build_vae()
    for model in (transformer, encoder, autoencoder):
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            centre = 1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0  # the weight of a norm
            nn.init.normal_(parameter, centre, spread, generator=generator)
        model.half()
    transformer.save_pretrained(folder / "transformer")
    encoder.save_pretrained(folder / "text_encoder")
    text.build_tokenizer().save_pretrained(folder / "tokenizer")
    save_tensors(folder / "vae" / "starter_vae.safetensors", vae.to_taesd(autoencoder.state_dict()))
    return folder
