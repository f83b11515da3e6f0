"""What ComfyUI binds: for each model family, the linear layers a LoRA can reach and the name ComfyUI knows them by.

The tables are our own, built from a model's configuration, so nothing of ComfyUI is imported here; the tests compare
them with the key map of a live ComfyUI. A key that ComfyUI does not bind is only a line in its log, and the picture
stays as it was: hence the check before a LoRA is written and again when one is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diffusers import SD3Transformer2DModel
from torch import nn

from ..errors import MixGRPOError

_SD3_HEAD_SIZE = 64
_SD3_OUTSIDE_BLOCKS = (
    "context_embedder",
    "norm_out.linear",
    "proj_out",
    "time_text_embed.text_embedder.linear_1",
    "time_text_embed.text_embedder.linear_2",
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
)
_SD3_BLOCK = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "norm1.linear",
    "norm1_context.linear",
    "ff.net.0.proj",
    "ff.net.2",
)
_SD3_TEXT_OUTPUT = ("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
_SD3_DUAL_ATTENTION = ("attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0")


class LoraKeyError(MixGRPOError):
    """A LoRA names layers that ComfyUI does not bind for this model; the message lists them."""


class LoraFamilyError(MixGRPOError):
    """A model family without a key table, a shape that ComfyUI cannot hold, or a LoRA made for another model."""


def comfyui_key(module_path: str) -> str:
    """ComfyUI's name of an SD3 layer: ``proj_out`` is ``transformer.proj_out``."""
    return f"transformer.{module_path}"


def sd3_keys(config: Mapping[str, Any]) -> dict[str, str]:
    """Layer path in diffusers' ``SD3Transformer2DModel`` to ComfyUI's LoRA key, for every linear layer of the model.

    The last block hands no text on, so it has no ``to_add_out`` and no ``ff_context``; ``attn2`` exists in the blocks
    of ``dual_attention_layers`` only (SD3.5 medium). ComfyUI's own map also lists those missing layers, and a LoRA for
    them counts as loaded there without doing anything.

    Raises:
        LoraFamilyError: ComfyUI would read the model wrongly. It derives depth and heads from the width, in units of 64.
    """
    layers, heads, head_size = config["num_layers"], config["num_attention_heads"], config["attention_head_dim"]
    if head_size != _SD3_HEAD_SIZE or heads != layers:
        raise LoraFamilyError(
            f"ComfyUI reads an SD3 transformer as N layers of N heads of size {_SD3_HEAD_SIZE}, but this one has {layers} layers "
            f"of {heads} heads of size {head_size} and would compute wrong numbers there; train a model with that form"
        )
    paths = list(_SD3_OUTSIDE_BLOCKS)
    for block in range(layers):
        names = _SD3_BLOCK
        if block < layers - 1:
            names += _SD3_TEXT_OUTPUT
        if block in config["dual_attention_layers"]:
            names += _SD3_DUAL_ATTENTION
        paths += [f"transformer_blocks.{block}.{name}" for name in names]
    return {path: comfyui_key(path) for path in paths}


def key_table(transformer: nn.Module) -> dict[str, str]:
    """The key table of a diffusers transformer: layer path to the name ComfyUI binds.

    Raises:
        LoraFamilyError: there is no table for its family, or ComfyUI cannot hold its shape.
    """
    if isinstance(transformer, SD3Transformer2DModel):
        return sd3_keys(transformer.config)
    raise LoraFamilyError(f"no LoRA key table for {type(transformer).__name__}; there is one for SD3Transformer2DModel")


def check_lora_keys(module_paths: Iterable[str], table: Mapping[str, str], origin: str = "this LoRA") -> None:
    """Refuse layers that are not in ``table`` (see :func:`key_table`); ``origin`` begins the message.

    Raises:
        LoraKeyError: some are unknown; the message names them.
        LoraFamilyError: all are unknown (the LoRA was made for another model), or there are none.
    """
    paths = sorted(set(module_paths))
    unknown = [path for path in paths if path not in table]
    if not paths:
        raise LoraFamilyError(f"{origin} adapts no layer at all; name at least one target module, for example attn.to_q")
    if len(unknown) == len(paths):
        raise LoraFamilyError(
            f"{origin} is a LoRA of another family or file format: none of its {len(paths)} layers is known for this model "
            f"({_some(unknown)}); use the base model that it was trained on"
        )
    if unknown:
        raise LoraKeyError(
            f"{origin} names {len(unknown)} of {len(paths)} layers that are no linear layers ComfyUI binds for this model: "
            f"{_some(unknown)}; leave them out of the target modules"
        )


def _some(names: list[str], count: int = 8) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
