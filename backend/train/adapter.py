"""The LoRA adapter in the transformer, its optimiser, and both as plain named tensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from peft.helpers import rescale_adapter_scale
from torch import nn

from ..errors import MixGRPOError
from ..flow.noise import derive_seed
from ..models.families import LORA_TARGETS
from ..models.lora_export import LoraAdapter, load_lora
from ..specs import LoraSpec, OptimizerSpec
from .ranks import full, like

_ADAPTER = "default"


class AdapterError(MixGRPOError):
    """Tensors, or a LoRA file, that are not those of the adapter they are to fill."""


def lora_config(spec: LoraSpec) -> LoraConfig:
    """peft's configuration of an adapter."""
    return LoraConfig(r=spec.rank, lora_alpha=spec.alpha, use_rslora=spec.rslora, target_modules=LORA_TARGETS[spec.targets])


def add_adapter(transformer: nn.Module, spec: LoraSpec, seed: int) -> None:
    """Put a fresh adapter into the transformer, its A matrices drawn from ``seed``, its B matrices zero."""
    state = torch.get_rng_state()
    torch.manual_seed(derive_seed(seed, "adapter"))
    transformer.add_adapter(lora_config(spec), adapter_name=_ADAPTER)
    torch.set_rng_state(state)


def read_start(path: Path, transformer: nn.Module, spec: LoraSpec) -> dict[str, torch.Tensor]:
    """The tensors of the LoRA file that an adapter of this spec starts from; call it before :func:`add_adapter`.

    Raises:
        AdapterError: its rank, alpha or layers are not the spec's; the message says both and what to set.
        MixGRPOError: it is no LoRA of this model (see :func:`~..models.lora_export.load_lora`).
    """
    lora, said = load_lora(path, transformer), "the LoRA to start from"
    if lora.rank != spec.rank:
        raise AdapterError(f"{said} has rank {lora.rank}, but lora.rank is {spec.rank}; set lora.rank to {lora.rank}")
    factor = math.sqrt(spec.rank) if spec.rslora else 1.0  # what the file's alpha was multiplied by, if it was made like this
    if not math.isclose(lora.alpha, spec.alpha * factor, rel_tol=1e-6):  # the file holds it as a float32
        raise AdapterError(
            f"{said} is scaled by an alpha of {lora.alpha:.9g}, but lora.alpha {spec.alpha:g} "
            f"{'with' if spec.rslora else 'without'} rslora means {spec.alpha * factor:.9g}; set lora.alpha to "
            f"{lora.alpha / factor:.9g}"
        )
    layers, wanted = set(lora.layers), _layers(transformer, spec.targets)
    if layers != wanted:
        fitting = [targets for targets in LORA_TARGETS if _layers(transformer, targets) == layers]
        way_out = f"set lora.targets to {fitting[0]}" if fitting else "start from a LoRA that adapts exactly these layers"
        raise AdapterError(
            f"{said} adapts {len(layers)} layers, but lora.targets {spec.targets} means {len(wanted)} "
            f"({sorted(layers ^ wanted)[0]} is in one of them only); {way_out}"
        )
    return lora.tensors


def _layers(transformer: nn.Module, targets: str) -> set[str]:
    """The layers that peft adapts for one of the targets."""
    return {
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(LORA_TARGETS[targets], name)
    }


def put_lora(transformer: nn.Module, lora: LoraAdapter) -> None:
    """Put a LoRA that was read from a file into the transformer, in the transformer's dtype."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.layers)
    transformer.add_adapter(config, adapter_name=_ADAPTER)
    load_adapter(transformer, lora.tensors)


@contextmanager
def switched_off(transformer: nn.Module) -> Iterator[None]:
    """Within the block the transformer is the base model, bit for bit: the adapter's part is scaled by 0.

    Not by peft's ``disable_adapters``, which also stops the gradient of parameters that a sharded module has taken over.
    """
    with rescale_adapter_scale(transformer, 0.0):
        yield


def adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by peft's names without the adapter's, in a fixed order."""
    return {
        name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }


def adapter_tensors(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """The whole adapter on the CPU (a collective call when sharded)."""
    return {name: full(value.detach()).cpu().clone() for name, value in adapter_parameters(transformer).items()}


@torch.no_grad()
def load_adapter(transformer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Fill the adapter with whole tensors; call it before sharding.

    Raises:
        AdapterError: names or shapes are not exactly the adapter's.
    """
    parameters = {name: value for name, value in transformer.named_parameters() if ".lora_" in name}
    parameters = {name.replace(f".{_ADAPTER}.", "."): value for name, value in parameters.items()}
    wanted, given = ({(name, *value.shape) for name, value in them.items()} for them in (parameters, tensors))
    if wanted != given:
        different = ", ".join(sorted({name for name, *_ in wanted ^ given})[:4])
        raise AdapterError(
            f"these tensors do not match the adapted layers: {different}; use the base model and the versions of peft and "
            "diffusers that they were trained with"
        )
    for name, value in tensors.items():
        parameters[name].copy_(value)


def adapter_hash(tensors: dict[str, torch.Tensor]) -> str:
    """A short hash of the exact bits of an adapter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def make_optimizer(parameters: dict[str, nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the adapter's parameters."""
    return torch.optim.AdamW(
        parameters.values(), lr=spec.learning_rate, weight_decay=spec.weight_decay, betas=(0.9, 0.999), eps=1e-8
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The optimiser's state as whole tensors named ``{field}.{parameter}`` (a collective call when sharded)."""
    return {
        f"{field}.{name}": full(value).cpu().clone()
        for name, parameter in parameters.items()
        for field, value in optimizer.state[parameter].items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]
) -> None:
    """Put back what :func:`optimizer_tensors` returned, laid out as the parameters are now."""
    for name, value in tensors.items():
        field, parameter_name = name.split(".", 1)
        parameter = parameters[parameter_name]
        optimizer.state[parameter][field] = like(value, parameter)
