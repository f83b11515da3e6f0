"""LoRA files: written so that ComfyUI binds every key at full strength, and read back to sample with or to train on.

ComfyUI applies ``strength * alpha / rank * B @ A`` and takes alpha from a ``.alpha`` tensor beside A and B; without one
it assumes ``alpha = rank``. It reads no metadata. An rsLoRA adapter scales with ``alpha / sqrt(rank)``, so its file says
``alpha * sqrt(rank)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import MixGRPOError
from ..files import StorageError, load_tensors, save_tensors
from .lora_keys import check_lora_keys, key_table

_A, _B, _ALPHA = ".lora_A.weight", ".lora_B.weight", ".alpha"


class LoraFormatError(MixGRPOError):
    """The tensors do not form one LoRA adapter; the message names the layer, what is wrong and the way out."""


@dataclass(frozen=True)
class LoraAdapter:
    """One adapter in peft's naming.

    ``tensors`` maps ``{layer}.lora_A.weight`` (rank, in) and ``{layer}.lora_B.weight`` (out, rank); the layers' outputs
    grow by ``alpha / rank * B @ A @ x``, which is peft's ``LoraConfig(r=rank, lora_alpha=alpha)`` without rsLoRA.
    """

    tensors: dict[str, torch.Tensor]
    rank: int
    alpha: float

    @property
    def layers(self) -> list[str]:
        """The paths of the adapted layers, sorted."""
        return sorted(name.removesuffix(_A) for name in self.tensors if name.endswith(_A))


def export_lora(
    transformer: nn.Module,
    adapter_tensors: Mapping[str, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    path: Path,
    metadata: Mapping[str, str],
) -> Path:
    """Write an adapter as a LoRA file for ComfyUI and return its path.

    Args:
        transformer: the diffusers model the adapter belongs to (its configuration and layer sizes are used).
        adapter_tensors: as ``peft.get_peft_model_state_dict`` names them, for example ``proj_out.lora_A.weight``.
        rank, alpha, rslora: as in the ``peft.LoraConfig`` the adapter was trained with.
        path: a name not used before: ComfyUI caches LoRA files by name and would go on using the old one.
        metadata: facts for people (base model, spec hash, iteration, rewards); ComfyUI ignores them.

    Raises:
        LoraKeyError, LoraFamilyError: a layer that ComfyUI does not bind for this model.
        LoraFormatError: a tensor missing, superfluous or of another rank or size.
        StorageError: ``path`` exists, or cannot be written.
    """
    path = Path(path)
    if path.exists():
        raise StorageError(
            f"{path} exists and is not overwritten, because ComfyUI would keep using what it has loaded under that name; "
            "write each checkpoint to a new name"
        )
    table = key_table(transformer)
    check_lora_keys((_split(name)[0] for name in adapter_tensors), table, "the adapter")
    adapter = _checked(transformer, adapter_tensors, {}, "the adapter")
    if adapter.rank != rank:
        raise LoraFormatError(f"the adapter has rank {adapter.rank}, not the given {rank}; pass the rank it was trained with")
    scale = torch.tensor(alpha * math.sqrt(rank) if rslora else alpha, dtype=torch.float32)
    tensors = {}
    for layer in adapter.layers:
        key = table[layer]
        tensors |= {key + _A: adapter.tensors[layer + _A], key + _B: adapter.tensors[layer + _B], key + _ALPHA: scale.clone()}
    return save_tensors(path, tensors, metadata)


def load_lora(path: Path, transformer: nn.Module) -> LoraAdapter:
    """Read a LoRA file that :func:`export_lora` wrote, for sampling or as the start of a training.

    Raises:
        StorageError: the file is missing, truncated, a pickle, or not safetensors for another reason.
        LoraFamilyError, LoraKeyError: it was made for another model, or names layers this model lacks.
        LoraFormatError: tensors without a partner, without alpha, or of mixed ranks, alphas or sizes.
    """
    path = Path(path)
    stored = load_tensors(path)
    layer_of = {key: layer for layer, key in key_table(transformer).items()}
    check_lora_keys((_split(name)[0] for name in stored), layer_of, str(path))
    tensors, alphas = {}, {}
    for name, tensor in stored.items():
        key, suffix = _split(name)
        if suffix == _ALPHA:
            alphas[layer_of[key]] = tensor
        else:
            tensors[layer_of[key] + suffix] = tensor
    return _checked(transformer, tensors, alphas, str(path), needs_alpha=True)


def _split(name: str) -> tuple[str, str]:
    """Layer and suffix of a tensor name; a name of another convention is all layer."""
    for suffix in (_A, _B, _ALPHA):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _checked(
    transformer: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    alphas: Mapping[str, torch.Tensor],
    origin: str,
    needs_alpha: bool = False,
) -> LoraAdapter:
    """The adapter that ``tensors`` of known layers form, if they do; without alphas its alpha is its rank (a scale of 1)."""
    layers = sorted({_split(name)[0] for name in tensors} | set(alphas))
    for layer in layers:
        missing = [suffix for suffix in (_A, _B) if layer + suffix not in tensors]
        if needs_alpha and layer not in alphas:
            missing.append(_ALPHA)
        if missing:
            raise LoraFormatError(
                f"{origin} has no {' and no '.join(layer + suffix for suffix in missing)}, so what it does is unknown; "
                "use a file that this project exported"
            )
        _check_shapes(transformer, layer, tensors[layer + _A], tensors[layer + _B], origin)
    rank = _one_value({layer: tensors[layer + _A].shape[0] for layer in layers}, "ranks", origin)
    values = {}
    for layer, tensor in alphas.items():
        if tensor.numel() != 1:
            raise LoraFormatError(f"{origin}: {layer}{_ALPHA} holds {tensor.numel()} values instead of one; export it again")
        values[layer] = tensor.item()
    return LoraAdapter(dict(tensors), rank, _one_value(values, "alphas", origin) if values else float(rank))


def _one_value(values: Mapping[str, float], what: str, origin: str) -> float:
    different = sorted(set(values.values()))
    if len(different) > 1:
        example = {value: layer for layer, value in values.items()}
        examples = ", ".join(f"{value:g} at {example[value]}" for value in different[:4])
        raise LoraFormatError(f"{origin} mixes {what} ({examples}); only adapters with one rank and one alpha are supported")
    return different[0]


def _check_shapes(transformer: nn.Module, layer: str, lora_a: torch.Tensor, lora_b: torch.Tensor, origin: str) -> None:
    linear = transformer.get_submodule(layer)
    rank = lora_a.shape[0] if lora_a.ndim else 0
    expected = [(rank, linear.in_features), (linear.out_features, rank)]
    given = [tuple(lora_a.shape), tuple(lora_b.shape)]
    if given != expected:
        raise LoraFormatError(
            f"{origin} has A and B of shapes {given[0]} and {given[1]} for {layer}, but this model needs {expected[0]} and "
            f"{expected[1]}; use the base model that it was trained on"
        )
