"""How many bytes tensors hold, and when: counted from the operations that make them, so on every device and exactly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Within the block, every storage that an operation returns counts until the last tensor on it is gone.

    Attributes:
        now: bytes held.
        peak: by phase, the most that was held within it.
    """

    def __init__(self, already: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.now, self.peak = 0, dict[str, int]()
        self._seen = weakref.WeakSet[Any]()
        self._phase = "other"
        for tensor in already:
            self._add(tensor)

    @contextmanager
    def phase(self, name: str):
        """Count peaks under ``name`` within the block."""
        previous, self._phase = self._phase, name
        self.peak[name] = max(self.peak.get(name, 0), self.now)
        try:
            yield
        finally:
            self._phase = previous

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak[self._phase] = max(self.peak.get(self._phase, 0), self.now)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.now -= size


def tensors_of(trainer: Any) -> list[torch.Tensor]:
    """What a trainer holds before its first iteration."""
    model = trainer.model
    modules = [model.transformer, model.vae]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [*held, *trainer.conditions.values(), *trainer.negative.values(), trainer.sigmas]


def measured(trainer: Any, monkeypatch: Any, iterations: int = 2) -> dict[str, int]:
    """The peak of every phase over some iterations; the second has the optimiser's state."""
    phase = type(trainer)._phase
    held = HeldBytes(tensors_of(trainer))

    @contextmanager
    def counted(self, name):
        with held.phase(name), phase(self, name):
            yield

    monkeypatch.setattr(type(trainer), "_phase", counted)
    with held:
        for _ in range(iterations):
            trainer.train_iteration()
    monkeypatch.setattr(type(trainer), "_phase", phase)
    return held.peak
