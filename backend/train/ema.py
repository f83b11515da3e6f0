"""The exponential moving average of the adapter, and the learning rate's course; both depend on the count of updates alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ..specs import EmaSpec, OptimizerSpec
from .ranks import full, like


def learning_rate(spec: OptimizerSpec, update: int) -> float:
    """The learning rate of an update, counted from 0 over the whole run: linear warm-up, then half a cosine down to 0.

    With ``warmup`` w the first update has 1/w of the rate and update w the whole of it; with ``cosine`` T the rate at update
    u >= w is (1 + cos(pi (u - w) / (T - w))) / 2 of it, and 0 from T on. Without them it is constant.
    """
    rate = spec.learning_rate
    if update < spec.warmup:
        return rate * (update + 1) / spec.warmup
    if spec.cosine is None:
        return rate
    done = min(1.0, (update - spec.warmup) / (spec.cosine - spec.warmup))
    return rate * (1 + math.cos(math.pi * done)) / 2


def ema_decay(spec: EmaSpec, number: int) -> float:
    """The decay of averaging n, counted from 0: min(decay, (1 + n) / (10 + n)), so that the beginning is soon forgotten."""
    return min(spec.decay, (1 + number) / (10 + number))


class Ema:
    """theta_ema <- d theta_ema + (1 - d) theta every few updates, d from :func:`ema_decay`.

    Attributes:
        tensors: by parameter name, laid out (and sharded) like the parameters, in float32 or what they are.
    """

    def __init__(self, spec: EmaSpec, parameters: Mapping[str, torch.nn.Parameter], resume: Mapping[str, torch.Tensor] | None):
        """Begin at the present parameters, or at what :meth:`whole` returned.

        Args:
            resume: whole tensors by parameter name.
        """
        self._spec, self._parameters = spec, parameters
        if resume is None:
            self.tensors = {name: value.detach().clone() for name, value in parameters.items()}
        else:
            self.tensors = {name: like(resume[name], value) for name, value in parameters.items()}

    @torch.no_grad()
    def after(self, update: int) -> None:
        """Take the parameters in, if an averaging is due after this update, counted from 0 over the whole run."""
        number, rest = divmod(update + 1, self._spec.every)
        if rest:
            return
        decay = ema_decay(self._spec, number - 1)
        for name, parameter in self._parameters.items():
            self.tensors[name].mul_(decay).add_(parameter.detach(), alpha=1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model draws with the average; afterwards its parameters are what they were, bit for bit."""
        trained = {name: value.detach().clone() for name, value in self._parameters.items()}
        self._fill(self.tensors)
        try:
            yield
        finally:
            self._fill(trained)

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])

    def whole(self) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU (a collective call when sharded)."""
        return {name: full(value).cpu().clone() for name, value in self.tensors.items()}
