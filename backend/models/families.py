"""The model families a job can name."""

from __future__ import annotations

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from ..specs import ModelSpec
from ..starter.load import load_starter, outline_starter
from .sd3 import LORA_TARGETS, SD3

__all__ = ["LORA_TARGETS", "arithmetic", "load_model", "outline_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def arithmetic(spec: ModelSpec) -> torch.dtype:
    """The dtype the transformer computes in."""
    return _DTYPES[spec.precision]


def load_model(spec: ModelSpec, device: torch.device) -> SD3:
    """Load a base model. bfloat16 is autocast over float32 weights, so that adapter and optimiser stay in float32."""
    dtype = arithmetic(spec)
    model = load_starter(device, torch.float32 if dtype == torch.bfloat16 else dtype)
    model.autocast = dtype if dtype == torch.bfloat16 else None
    if dtype == torch.float64:
        _exact_norms(model.transformer)
    return model


def outline_model(spec: ModelSpec) -> SD3:
    """The model that :func:`load_model` would load, on the meta device: every size, and no weights."""
    dtype = arithmetic(spec)
    model = outline_starter(torch.float32 if dtype == torch.bfloat16 else dtype)
    model.autocast = dtype if dtype == torch.bfloat16 else None
    return model


class _ExactRMSNorm(RMSNorm):
    """diffusers takes the mean square in float32 whatever the weights are, and then float64 is no better than 1e-8."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
        normed = normed if self.weight is None else normed * self.weight
        return normed if self.bias is None else normed + self.bias


def _exact_norms(module: nn.Module) -> None:
    for part in module.modules():
        if type(part) is RMSNorm:
            part.__class__ = _ExactRMSNorm
