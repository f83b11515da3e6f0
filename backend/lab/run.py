"""``mixgrpo compare``: a comparison on a model of the backend, without ComfyUI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from ..console import console, progress_bar
from ..flow.noise import initial_noise, step_noise
from ..flow.rollout import Trajectory, rollout
from ..flow.window import Window
from ..models.base import FlowModel, GuidedVelocity, RowCounter
from .compare import OnStep, compare
from .entries import Case
from .results import Comparison, conclude
from .scores import check_rewards
from .spec import CompareSpec

_BATCH = 64
_NO_NOISE = Window(0, 0)


def run_comparison(spec: CompareSpec, out: Path) -> Comparison:
    """Compare, write the results into ``out``, print the table."""
    from ..models.families import arithmetic, load_model  # diffusers takes seconds, and a wrong scorer is told before

    check_rewards(spec.rewards, spec.prompts)
    model = load_model(spec.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float64 if arithmetic(spec.model) == torch.float64 else torch.float32
    cases, entries = spec.cases(), spec.built_entries()
    host = ModelHost(model, spec, dtype)
    try:
        with progress_bar("comparing", 1) as update:
            results = compare(
                entries, cases, host, reference_steps=spec.reference_steps, equal_nfe=spec.equal_nfe,
                on_step=lambda done, total: update(done / total),
            )  # fmt: skip
    finally:
        host.close()
    pictures = [_decoded(model, result.latents) for result in results]
    comparison = conclude(spec.model_dump(mode="json"), results, pictures, cases, spec.rewards)
    comparison.save(out)
    _tell(comparison)
    return comparison


class ModelHost:
    """A :class:`~.compare.Host` around a model of the backend; its draws are those of MixGRPO Sampler in a graph."""

    reference_batch = _BATCH

    def __init__(self, model: FlowModel, spec: CompareSpec, dtype: torch.dtype = torch.float32):
        self.device: torch.device = model.device
        self._model, self._spec, self._dtype = model, spec, dtype
        self._shape = model.latent_shape(spec.width, spec.height)
        self._prompts = list(dict.fromkeys(spec.prompts))
        self._velocity = GuidedVelocity(
            model, model.encode(self._prompts), model.encode([spec.negative_prompt]), spec.guidance,
            2 * max(_BATCH, spec.group_size),
        )  # fmt: skip
        self._calls = 0
        self._rows = RowCounter(model.transformer)

    def draw(self, entry: int, case: Case, on_step: OnStep) -> Tensor:
        """One group, from one initial noise."""
        members, settings = list(range(self._spec.group_size)), self._spec.entries[entry]
        sigmas = self._spec.built_entries()[entry].sigmas
        return self._rollout(
            [case], sigmas, settings.flow_window, settings.eta, len(members), on_step,
            noise=lambda step: step_noise(case.seed, members, step, self._shape), mode=settings.mode,
        ).final  # fmt: skip

    def reference(self, sigmas: Tensor, cases: Sequence[Case], on_step: OnStep) -> Tensor:
        """Euler, all cases at once."""
        return self._rollout(cases, sigmas, _NO_NOISE, 0.0, 1, on_step).final

    def counted(self) -> tuple[int, int]:
        """Model calls and rows since the last time."""
        calls, self._calls = self._calls, 0
        return calls, sum(self._rows.take().values())

    def close(self) -> None:
        """Stop counting."""
        self._rows.close()

    def _rollout(self, cases: Sequence[Case], sigmas: Tensor, window: Window, eta: float, group_size: int, on_step: OnStep,
                 **more) -> Trajectory:  # fmt: skip
        noise = torch.cat([initial_noise(case.seed, (1, *self._shape)) for case in cases]).to(self.device, self._dtype)
        prompts = torch.tensor([self._prompts.index(case.prompt) for case in cases])

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            self._calls += 1
            return self._velocity(x, sigma, prompts.repeat_interleave(len(x) // len(prompts)))

        return rollout(velocity, noise, sigmas, window, eta, more.pop("noise", None), group_size,
                       on_step=lambda done, _: on_step(done), **more)  # fmt: skip


def _decoded(model: FlowModel, latents: Tensor) -> Tensor:
    """Pictures (cases, G, 3, H, W) of latents (cases, G, …)."""
    parts = [model.decode(part.to(model.device)).cpu() for part in latents.flatten(0, 1).split(_BATCH)]
    return torch.cat(parts).unflatten(0, latents.shape[:2])


def _tell(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    columns = ["sampler", "NFE", "rows", "ms", "RMSE", "diversity"]
    scored = comparison.rows[0]["reward"] is not None
    columns += ["reward", "95 %", "to first"] if scored else []
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    for row in comparison.rows:
        cells = [row["label"], f"{row['nfe']:g}", f"{row['rows']:g}", f"{1000 * row['seconds']:.0f}"]
        cells += [_number(row["rmse"]), _number(row["group_diversity"])]
        if scored:
            cells += [_number(row["reward"]), f"{_number(row['reward_low'])} to {_number(row['reward_high'])}"]
            cells += [_number(row["difference"], "+")]
        table.add_row(*cells)
    console.print(table)


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
