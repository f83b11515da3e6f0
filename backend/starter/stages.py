"""What the training stages of the starter share: resumable checkpoints, averaged weights, the learning-rate plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..files import load_json, load_tensors, save_json, save_tensors

_EMA_DECAY = 0.999
_WARM_UP = 200


class Stage:
    """One model in training: step count, weights, their exponential moving average and the optimiser, kept in a folder.

    A stage continues where its folder's newest complete checkpoint stands. The averaged weights of every checkpoint stay
    (they are what the starter ships, and earlier ones show how it learnt); raw weights and optimiser only of the newest.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, until: int, save_every: int = 500):
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.until, self.save_every, self.step = until, save_every, 0
        self.ema = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if (folder / "progress.json").exists():
            self.step = load_json(folder / "progress.json")["step"]
            model.load_state_dict(load_tensors(self.file("model")))
            self.ema = load_tensors(self.file("ema"))
            _restore_optimizer(optimizer, load_tensors(self.file("optimizer")))
        self._started, self._first = time.monotonic(), self.step
        self._losses: list[float] = []

    def file(self, kind: str, step: int | None = None) -> Path:
        """Path of the "model", "ema" or "optimizer" tensors at a step (default: the current one)."""
        return self.folder / f"{kind}_{self.step if step is None else step:07d}.safetensors"

    def set_learning_rate(self, peak: float, decay: int) -> None:
        """Short warm-up, constant, then a straight line to zero over the last ``decay`` steps before ``until``."""
        for group in self.optimizer.param_groups:
            group["lr"] = peak * min((self.step + 1) / _WARM_UP, 1.0, (self.until - self.step) / decay)

    def update(self, loss: torch.Tensor) -> None:
        """One optimiser step on ``loss``, the averaging, a line of progress now and then, a checkpoint when it is due."""
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        keep = min(_EMA_DECAY, self.step / (self.step + 10))
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                self.ema[name].lerp_(value, 1 - keep)
        self._losses.append(loss.item())
        if self.step % 100 == 0 or self.step == self.until:
            self._report()
        if self.step % self.save_every == 0 or self.step == self.until:
            self._save()

    def _report(self) -> None:
        pace = (time.monotonic() - self._started) / (self.step - self._first)
        loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        left = pace * (self.until - self.step) / 60
        print(f"{self.folder.name} {self.step}/{self.until}  loss {loss:.4f}  {pace:.3f} s/step  {left:.0f} min left", flush=True)

    def _save(self) -> None:
        marker = self.folder / "progress.json"
        previous = load_json(marker)["step"] if marker.exists() else self.step
        save_tensors(self.file("model"), self.model.state_dict())
        save_tensors(self.file("ema"), self.ema)
        save_tensors(self.file("optimizer"), _optimizer_tensors(self.optimizer))
        save_json(marker, {"step": self.step})
        if previous != self.step:
            for kind in ("model", "optimizer"):
                self.file(kind, previous).unlink(missing_ok=True)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as flat tensors named ``{parameter index}.{field}``."""
    return {
        f"{index}.{field}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for index, fields in optimizer.state_dict()["state"].items()
        for field, value in fields.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put back what :func:`_optimizer_tensors` returned; hyper-parameters stay those of ``optimizer``."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        index, field = name.split(".", 1)
        state.setdefault(int(index), {})[field] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
