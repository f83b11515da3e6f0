"""The processes that train together: joining them, sharding over them, agreeing on numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import MixGRPOError


class RankError(MixGRPOError):
    """The processes disagree, or the work cannot be divided over them."""


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together, equally many on every machine. One process needs no launcher and no group."""

    rank: int
    count: int
    device: torch.device
    machines: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Join the group that PyTorch's launcher started, or be the only process where there is none."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda and local >= torch.cuda.device_count():
            raise RankError(
                f"process {local + 1} of this machine has no GPU of its own, there are {torch.cuda.device_count()}; start one "
                "process per GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        if cuda:
            torch.cuda.set_device(device)
        if count > 1 and not dist.is_initialized():
            # gloo besides, for what is offloaded
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        return cls(int(os.environ.get("RANK", "0")), count, device, machines)

    @staticmethod
    def leave() -> None:
        """Leave the process group, if this process has joined one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, total: int, what: str) -> slice:
        """This rank's equal share of ``total`` items; raises :class:`RankError` when they cannot be divided."""
        if total % self.count:
            raise RankError(f"{total} {what} cannot be shared equally by {self.count} ranks; choose a multiple of {self.count}")
        each = total // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    @property
    def mesh(self) -> DeviceMesh:
        """One axis to shard over; with several machines of several processes, two: replicas, and shards within a machine."""
        each = self.count // self.machines
        if self.machines == 1 or each == 1:
            return init_device_mesh(self.device.type, (self.count,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (self.machines, each), mesh_dim_names=("replicate", "shard"))

    def shard(self, transformer: nn.Module, compute: torch.dtype | None = None, offload: bool = False) -> None:
        """FSDP2: shard every transformer block, then the rest. One rank stays unsharded.

        Args:
            compute: what the shards, which keep their dtype, are gathered in; None: as they are. Gradients are summed in float32.
            offload: keep the shards, their gradients and the optimiser's state in the computer's memory.
        """
        if self.count == 1:
            return
        reduced = torch.float32 if compute else None
        # the inputs are autocast's business, as they are without ranks
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced, cast_forward_inputs=False)
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if offload else OffloadPolicy()
        mesh = self.mesh
        for part in (*transformer.transformer_blocks, transformer):
            fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=policy)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean of every number over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM, self.count)

    def largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest of every number over the ranks; NaN counts as infinite."""
        finite = {name: float("inf") if value != value else value for name, value in values.items()}
        return self._reduce(finite, dist.ReduceOp.MAX, 1)

    def _reduce(self, values: Mapping[str, float], operation: dist.ReduceOp, divisor: int) -> dict[str, float]:
        if self.count == 1:
            return dict(values)
        packed = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, operation)
        return dict(zip(sorted(values), (packed / divisor).tolist(), strict=True))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, in rank order, on every rank; the ranks' tensors have one shape."""
        if self.count == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.count)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def require_equal(self, text: str, what: str) -> None:
        """Raise :class:`RankError` on every rank when the ranks hold different texts (hashes, say)."""
        if self.count == 1:
            return
        texts: list[str] = [""] * self.count
        dist.all_gather_object(texts, text)
        if len(set(texts)) > 1:
            raise RankError(f"the ranks no longer agree on {what}: {', '.join(texts)}; continue from the last checkpoint")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded (a collective call then: every rank must make it)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor laid out as ``parameter`` is: this rank's shard of it, or the tensor itself."""
    if isinstance(parameter, DTensor) and whole.shape == parameter.shape:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to(parameter.device)
    return whole.clone()


def gradient_norm(parameters: Iterable[torch.Tensor], largest: float) -> float:
    """Clip the gradients to the norm ``largest`` and return the norm they had."""
    return full(nn.utils.clip_grad_norm_(list(parameters), largest)).item()
