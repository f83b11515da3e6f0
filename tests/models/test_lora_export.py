"""LoRA files: the layout on disk, the way back, and a clear refusal of everything that is not one adapter of this model."""

import math

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from mixgrpo.backend.files import StorageError, load_metadata, load_tensors, save_tensors
from mixgrpo.backend.models.lora_export import LoraFormatError, export_lora, load_lora
from mixgrpo.backend.models.lora_keys import LoraFamilyError, LoraKeyError, key_table, sd3_keys

A, B, ALPHA = ".lora_A.weight", ".lora_B.weight", ".alpha"


def sd3(**changes) -> SD3Transformer2DModel:
    """The smallest SD3 transformer with a first, a last and (on request) a dual-attention block."""
    config = dict(
        sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2,
        caption_projection_dim=128, joint_attention_dim=24, pooled_projection_dim=20, pos_embed_max_size=8, qk_norm="rms_norm",
    )
    return SD3Transformer2DModel(**config | changes)


def add_random_adapter(transformer: SD3Transformer2DModel, layers: list[str], rank: int, alpha: float) -> dict[str, torch.Tensor]:
    """Put a peft adapter with random A and B on the layers and return it in peft's naming."""
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers))
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(transformer).items()}


@pytest.fixture(scope="module")
def transformer() -> SD3Transformer2DModel:
    torch.manual_seed(0)
    return sd3()


@pytest.fixture(scope="module")
def adapter() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return add_random_adapter(sd3(), ["attn.to_q", "attn.to_add_out", "norm_out.linear"], rank=4, alpha=8)


@pytest.mark.parametrize("dual", [(), (0,), (0, 1)])
def test_the_key_table_lists_every_linear_layer_of_the_model(dual):
    model = sd3(dual_attention_layers=dual)
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(key_table(model)) == linear
    assert set(key_table(model).values()) == {f"transformer.{path}" for path in linear}


@pytest.mark.parametrize("changes", [{"num_attention_heads": 3}, {"attention_head_dim": 32, "num_attention_heads": 4}])
def test_a_shape_that_comfyui_would_read_wrongly_is_refused(changes):
    with pytest.raises(LoraFamilyError, match="N heads of size 64"):
        sd3_keys(dict(sd3().config) | changes)


def test_a_family_without_a_table_is_refused():
    size = dict(num_layers=1, num_single_layers=1, num_attention_heads=1, attention_head_dim=16, axes_dims_rope=(4, 6, 6))
    flux = FluxTransformer2DModel(**size)
    with pytest.raises(LoraFamilyError, match="no LoRA key table for FluxTransformer2DModel"):
        key_table(flux)


@pytest.mark.parametrize("rslora", [False, True])
def test_export_and_load_return_the_same_adapter(transformer, adapter, tmp_path, rslora):
    metadata = {"base_model": "starter", "spec_hash": "abc", "iteration": "120", "rewards": '{"scene": 0.5}'}
    path = export_lora(transformer, adapter, rank=4, alpha=6, rslora=rslora, path=tmp_path / "a.safetensors", metadata=metadata)
    stored, back = load_tensors(path), load_lora(path, transformer)
    assert load_metadata(path) == metadata
    assert set(stored) == {f"transformer.{layer}{end}" for layer in back.layers for end in (A, B, ALPHA)}
    assert stored["transformer.transformer_blocks.0.attn.to_q.alpha"].dtype == torch.float32
    assert back.rank == 4 and back.alpha == pytest.approx(6 * math.sqrt(4) if rslora else 6)
    assert back.tensors.keys() == adapter.keys()
    assert all(torch.equal(back.tensors[name], adapter[name]) for name in adapter)


def test_a_loaded_adapter_acts_in_peft_as_the_trained_one(tmp_path):
    torch.manual_seed(2)
    trained = sd3()
    inputs = torch.randn(1, 16, 8, 8), torch.randn(1, 5, 24), torch.randn(1, 20), torch.tensor([500.0])
    fresh = sd3()
    fresh.load_state_dict(trained.state_dict())
    tensors = add_random_adapter(trained, list(key_table(trained)), rank=3, alpha=5)
    back = load_lora(export_lora(trained, tensors, rank=3, alpha=5, path=tmp_path / "a.safetensors", metadata={}), fresh)
    with torch.no_grad():
        base = fresh(*inputs).sample
        fresh.add_adapter(LoraConfig(r=back.rank, lora_alpha=back.alpha, target_modules=back.layers))
        set_peft_model_state_dict(fresh, back.tensors)
        assert torch.equal(fresh(*inputs).sample, trained(*inputs).sample)
        assert not torch.allclose(fresh(*inputs).sample, base, rtol=0.01)


def test_an_existing_file_is_never_overwritten(transformer, adapter, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(StorageError, match="is not overwritten.*new name"):
        export_lora(transformer, adapter, rank=4, alpha=4, path=path, metadata={})
    assert path.read_bytes() == b"precious"


def test_a_full_disk_leaves_no_file_behind(transformer, adapter, tmp_path, monkeypatch):
    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        export_lora(transformer, adapter, rank=4, alpha=4, path=tmp_path / "a.safetensors", metadata={})
    assert not list(tmp_path.iterdir())


NORM_A, NORM_B, NORM_ALPHA = (f"transformer.norm_out.linear{end}" for end in (A, B, ALPHA))


def without(tensors, ending):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        pytest.param(
            lambda adapter: adapter | {"pos_embed.proj" + A: torch.zeros(4, 16), "pos_embed.proj" + B: torch.zeros(128, 4)},
            LoraKeyError, "the adapter names 1 of 5 layers that are no linear layers.*: pos_embed.proj;", id="convolution",
        ),
        pytest.param(lambda adapter: renamed(adapter, "blocks.0", "blocks.9"), LoraKeyError, "blocks.9.attn.to_q", id="block"),
        pytest.param(
            lambda adapter: adapter | {"proj_out.lora_magnitude_vector": torch.zeros(64)},
            LoraKeyError, "proj_out.lora_magnitude_vector", id="DoRA",
        ),
        pytest.param(lambda adapter: {f"base_model.model.{name}": tensor for name, tensor in adapter.items()},
                     LoraFamilyError, "none of its 4 layers", id="prefix"),
        pytest.param(lambda adapter: {}, LoraFamilyError, "adapts no layer at all", id="empty"),
        pytest.param(lambda adapter: without(adapter, "0.attn.to_q" + B),
                     LoraFormatError, "has no .*0.attn.to_q.lora_B.weight", id="B"),
        pytest.param(lambda adapter: {name: t[:2] if name.endswith(A) else t[:, :2] for name, t in adapter.items()},
                     LoraFormatError, "has rank 2, not the given 4", id="rank"),
    ],
)  # fmt: skip
def test_an_adapter_that_comfyui_would_not_fully_bind_is_not_written(transformer, adapter, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        export_lora(transformer, change(adapter), rank=4, alpha=4, path=tmp_path / "a.safetensors", metadata={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        pytest.param(lambda file: without(file, ALPHA), LoraFormatError, r"has no norm_out.linear.alpha, so", id="no alpha"),
        pytest.param(lambda file: without(file, NORM_A), LoraFormatError, "has no norm_out.linear.lora_A.weight", id="no A"),
        pytest.param(lambda file: file | {NORM_ALPHA: torch.tensor(2.0)},
                     LoraFormatError, r"mixes alphas \(2 at norm_out.linear, 8 at", id="alphas"),
        pytest.param(lambda file: file | {NORM_ALPHA: torch.ones(4)}, LoraFormatError, "holds 4 values", id="alpha vector"),
        pytest.param(lambda file: file | {NORM_A: torch.zeros(2, 128), NORM_B: torch.zeros(256, 2)},
                     LoraFormatError, r"mixes ranks \(2 at norm_out.linear, 4 at", id="ranks"),
        pytest.param(lambda file: file | {NORM_A: torch.zeros(4, 64)},
                     LoraFormatError, r"\(4, 64\).*needs \(4, 128\)", id="width"),
        pytest.param(lambda file: file | {NORM_A: torch.zeros(())}, LoraFormatError, r"shapes \(\) and", id="scalar"),
        pytest.param(lambda file: renamed(file, "transformer.", "diffusion_model.double_"),
                     LoraFamilyError, "another family.*diffusion_model.double_norm_out", id="family"),
        pytest.param(lambda file: renamed(file, "transformer.norm_out", "norm_out"),
                     LoraKeyError, "1 of 4 layers that .*: norm_out.linear;", id="bare name"),
        pytest.param(lambda file: {"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": torch.zeros(4, 128)},
                     LoraFamilyError, "another family or file format", id="kohya"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_one_adapter_of_this_model_is_refused(transformer, adapter, tmp_path, change, error, message):
    good = export_lora(transformer, adapter, rank=4, alpha=8, path=tmp_path / "good.safetensors", metadata={})
    bad = save_tensors(tmp_path / "bad.safetensors", change(load_tensors(good)))
    with pytest.raises(error, match=message) as caught:
        load_lora(bad, transformer)
    assert str(bad) in str(caught.value)


def test_unreadable_files_are_refused(transformer, adapter, tmp_path):
    good = export_lora(transformer, adapter, rank=4, alpha=8, path=tmp_path / "good.safetensors", metadata={})
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(good.read_bytes()[:-100])
    pickle = tmp_path / "pickle.safetensors"
    torch.save(adapter, pickle)
    for path, message in [(truncated, "truncated"), (pickle, "pickle"), (tmp_path / "missing.safetensors", "does not exist")]:
        with pytest.raises(StorageError, match=message):
            load_lora(path, transformer)
