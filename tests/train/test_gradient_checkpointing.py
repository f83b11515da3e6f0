"""Gradient checkpointing: the same gradient and the same rows from a fraction of what the backward pass keeps."""

from __future__ import annotations

import torch
from training_jobs import trainer


def one_update(checkpointing: bool) -> tuple[torch.Tensor, dict[str, int], int]:
    one = trainer(gradient_checkpointing=checkpointing, sampling={"guidance": 2.0})
    with torch.no_grad():
        for _, parameter in sorted(one.parameters.items()):
            parameter += 1e-2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batch, kept = one.collect(), {}
    one.counter.take()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        one.accumulate(batch, one.members(batch, 0))
    gradient = torch.cat([parameter.grad.flatten() for parameter in one.parameters.values()])
    return gradient, one.counter.take(), sum(kept.values())


def test_the_gradient_is_the_same_and_less_is_kept():
    (plain, rows, kept), (checkpointed, rows_too, kept_too) = one_update(False), one_update(True)
    assert torch.equal(plain, checkpointed) and plain.abs().max() > 0
    assert rows == rows_too
    assert kept_too < 0.5 * kept
