"""Load MixGRPO LoRA: what does not fit a MODEL is refused, where ComfyUI only logs it."""

from __future__ import annotations

import importlib

import pytest
import torch
from starter_files import SHIPPED


@pytest.fixture
def artifacts(comfy):
    return importlib.import_module("mixgrpo.nodes.artifacts")


@pytest.fixture
def model(comfy):
    return comfy.sd.load_diffusion_model(str(SHIPPED / "transformer" / "diffusion_pytorch_model.safetensors"))


def lora(layer: str, width_in: int, width_out: int) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.lora_A.weight": torch.ones(2, width_in),
        f"{layer}.lora_B.weight": torch.ones(width_out, 2),
        f"{layer}.alpha": torch.tensor(2.0),
    }


def test_a_lora_of_the_family_is_bound(artifacts, model):
    fits = lora("transformer.transformer_blocks.0.attn.to_q", 192, 192)
    patched = artifacts.apply_lora(model, fits, 1.0, "fits")
    assert len(patched.patches) == 1 and not model.patches


def test_a_lora_of_another_family_is_refused(artifacts, model):
    other = lora("diffusion_model.layers.0.attention.to_q", 192, 192)
    with pytest.raises(artifacts.LoraError, match=r"0 of the 1 layers of the LoRA z-image exist in this MODEL \(SD3\)"):
        artifacts.apply_lora(model, other, 1.0, "z-image")


def test_a_lora_that_fits_in_part_is_refused(artifacts, model):
    mixed = lora("transformer.transformer_blocks.0.attn.to_q", 192, 192) | lora(
        "transformer.transformer_blocks.9.attn.to_q", 192, 192
    )
    with pytest.raises(artifacts.LoraError, match="1 of the 2 layers of the LoRA deeper exist"):
        artifacts.apply_lora(model, mixed, 1.0, "deeper")
