"""Loading the bundled starter model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, SD3Transformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from ..files import load_json, load_tensors
from ..models.base import ModelError
from ..models.sd3 import SD3
from ..models.weights import STARTER, TRANSFORMER_FILES
from . import text, vae

WEIGHTS = STARTER
TRANSFORMER_FILE = TRANSFORMER_FILES["starter"]
VAE_FILE = WEIGHTS / "vae" / "starter_vae.safetensors"
IMAGE_SIZE = 64


def load_vae(path: Path = VAE_FILE) -> AutoencoderTiny:
    """The starter's VAE in float32, from the single file that ComfyUI's VAE loader reads."""
    model = vae.build_vae()
    model.load_state_dict(vae.from_taesd(load_tensors(path)))
    return model.float().eval().requires_grad_(False)


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' progress bar, which outlives the 40 milliseconds it measures."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_starter(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, folder: Path = WEIGHTS) -> SD3:
    """The starter as an :class:`~mixgrpo.backend.models.sd3.SD3`; the files hold float16, ``dtype`` is what it computes in.

    Raises:
        ModelError: the weights are not there.
    """
    if not (folder / "transformer").is_dir():
        raise ModelError(
            f"the starter's weights are missing from {folder}; fetch the project again, or make them with "
            "python -m mixgrpo.backend.starter.make"
        )
    transformer = SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype, local_files_only=True)
    with _no_bar():
        encoder = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder", dtype=torch.float32, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", local_files_only=True)
    decoder = load_vae(folder / "vae" / VAE_FILE.name)
    for module in (transformer, encoder, decoder):
        module.to(device).eval().requires_grad_(False)
    decoder.to(memory_format=torch.channels_last)  # half the time of a convolution on a CPU
    return SD3(transformer, encoder, tokenizer, decoder, text.MAX_TOKENS)


def outline_starter(dtype: torch.dtype = torch.float32) -> SD3:
    """The starter's modules on the meta device, from their configurations alone: sizes, and nothing to compute with."""
    configuration = load_json(WEIGHTS / "transformer" / "config.json")
    encoder = CLIPTextConfig(**load_json(WEIGHTS / "text_encoder" / "config.json"))
    with torch.device("meta"):
        transformer = nn.Module.to(SD3Transformer2DModel.from_config(configuration), dtype)  # diffusers' own would warn
        modules = transformer, CLIPTextModelWithProjection(encoder).float(), vae.build_vae().float()
    for module in modules:
        module.eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(WEIGHTS / "tokenizer", local_files_only=True)
    return SD3(modules[0], modules[1], tokenizer, modules[2], text.MAX_TOKENS)
