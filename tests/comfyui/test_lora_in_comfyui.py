"""A LoRA that we export acts in ComfyUI as it does in peft, with every key bound."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model_state_dict
from starter_files import SHIPPED, STARTERS
from torch import nn

from mixgrpo.backend.files import load_tensors, save_tensors
from mixgrpo.backend.models.lora_export import export_lora
from mixgrpo.backend.models.lora_keys import key_table

RANK, ALPHA = 4, 6.0
INPUT_SEED = 5


def dual_attention_transformer(folder: Path) -> Path:
    """A random transformer in the form of SD3.5 medium: a second attention in the first blocks."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2,
        caption_projection_dim=128, joint_attention_dim=24, pooled_projection_dim=20, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )  # fmt: skip
    model.half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[*STARTERS, "dual attention"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer in diffusers' form."""
    if request.param == "dual attention":
        return dual_attention_transformer(tmp_path_factory.mktemp("dual"))
    return (SHIPPED if request.param == "shipped" else request.getfixturevalue("random_starter")) / "transformer"


def load_in_comfyui(comfy, folder: Path):
    return comfy.sd.load_diffusion_model(str(folder / "diffusion_pytorch_model.safetensors"))


def inputs(transformer: SD3Transformer2DModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent, text states, pooled text and sigma * 1000."""
    generator = torch.Generator().manual_seed(INPUT_SEED)
    config = transformer.config
    x = torch.randn(3, 16, 8, 8, generator=generator)
    states = torch.randn(3, 16, config.joint_attention_dim, generator=generator)
    pooled = torch.randn(3, config.pooled_projection_dim, generator=generator)
    return x, states, pooled, torch.tensor([980.0, 500.0, 30.0])


def trained_adapter(transformer: SD3Transformer2DModel, rslora: bool) -> dict[str, torch.Tensor]:
    """Adapt every linear layer with random A and B, strong enough to change the velocity a lot."""
    layers = list(key_table(transformer))
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, use_rslora=rslora, target_modules=layers))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * 0.4, generator=generator)
    return get_peft_model_state_dict(transformer)


@torch.no_grad()
def their_velocity(comfy, patcher, x, states, pooled, timestep) -> torch.Tensor:
    comfy.model_management.load_models_gpu([patcher])
    try:
        return patcher.model.diffusion_model(x, timestep, context=states, y=pooled)
    finally:
        patcher.detach()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / ours.norm()).item()


def test_our_key_table_is_part_of_comfyuis_map(comfy, folder):
    model = load_in_comfyui(comfy, folder).model
    their_map = comfy.lora.model_lora_keys_unet(model, {})
    table = key_table(SD3Transformer2DModel.from_pretrained(folder))
    assert set(table.values()) <= set(their_map)
    weights = set(model.state_dict())
    targets = [their_map[key] if isinstance(their_map[key], str) else their_map[key][0] for key in table.values()]
    assert set(targets) <= weights, "ComfyUI maps these keys to weights that the model lacks"


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_an_exported_lora_acts_in_comfyui_as_in_peft(comfy, folder, tmp_path, caplog, rslora):
    transformer = SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    given = inputs(transformer)
    with torch.no_grad():
        before = transformer(*given).sample
        adapter = trained_adapter(transformer, rslora)
        after = transformer(*given).sample
    assert relative(after, before) > 0.05
    path = export_lora(
        transformer, adapter, rank=RANK, alpha=ALPHA, rslora=rslora, path=tmp_path / "a.safetensors", metadata={"iteration": "1"}
    )

    plain = load_in_comfyui(comfy, folder)
    lora = comfy.utils.load_torch_file(str(path), safe_load=True)
    with caplog.at_level(logging.WARNING):
        patched, _ = comfy.sd.load_lora_for_models(plain, None, lora, 1.0, 0.0)
    assert not [record.message for record in caplog.records if "not loaded" in record.message.lower()]
    assert sum(map(len, patched.patches.values())) == len(key_table(transformer)) == len(lora) // 3
    assert relative(after, their_velocity(comfy, patched, *given)) < 1e-5
    assert relative(before, their_velocity(comfy, plain, *given)) < 1e-5, "the LoRA stayed in the weights"


def test_without_alpha_tensors_comfyui_takes_another_strength(comfy, folder, tmp_path):
    """Why export_lora writes them: peft's own layout loads without a word and acts at rank / alpha of its strength."""
    transformer = SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    adapter = trained_adapter(transformer, rslora=False)
    path = export_lora(transformer, adapter, rank=RANK, alpha=ALPHA, path=tmp_path / "a.safetensors", metadata={})
    bare = {name: tensor for name, tensor in load_tensors(path).items() if not name.endswith(".alpha")}
    bare_path = save_tensors(tmp_path / "bare.safetensors", bare)
    lora = comfy.utils.load_torch_file(str(bare_path), safe_load=True)
    patched, _ = comfy.sd.load_lora_for_models(load_in_comfyui(comfy, folder), None, lora, 1.0, 0.0)
    given = inputs(transformer)
    with torch.no_grad():
        assert relative(transformer(*given).sample, their_velocity(comfy, patched, *given)) > 0.01
