"""``mixgrpo compare``: a comparison on a model of the backend, without ComfyUI."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..console import console, progress_bar
from ..flow.noise import initial_noise, step_noise
from ..flow.rollout import Velocity, rollout
from ..flow.window import Window
from ..models.base import FlowModel, GuidedVelocity, RowCounter
from .compare import OnStep, compare
from .entries import Case, Entry
from .results import Comparison, conclude
from .scores import check_rewards
from .spec import CompareSpec

_BATCH = 64


def run_comparison(spec: CompareSpec, out: Path) -> Comparison:
    """Compare, write the results into ``out``, print the table."""
    from ..models.families import arithmetic, load_model  # diffusers takes seconds, and a wrong scorer is told before

    check_rewards(spec.rewards, spec.prompts)
    model = load_model(spec.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float64 if arithmetic(spec.model) == torch.float64 else torch.float32
    cases, entries = spec.cases(), spec.built_entries()
    host = ModelHost(model, spec, entries, dtype)
    try:
        with progress_bar("comparing", 100) as update:
            results = compare(
                entries, cases, host, reference_steps=spec.reference_steps, equal_nfe=spec.equal_nfe,
                on_step=lambda done, total: update(100 * done // total),
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

    def __init__(self, model: FlowModel, spec: CompareSpec, entries: Sequence[Entry], dtype: torch.dtype = torch.float32):
        self.device: torch.device = model.device
        self._spec, self._entries, self._dtype = spec, entries, dtype
        self._shape = model.latent_shape(spec.width, spec.height)
        self._prompts = list(dict.fromkeys(spec.prompts))
        self._guided = GuidedVelocity(
            model, model.encode(self._prompts), model.encode([spec.negative_prompt]), spec.guidance,
            2 * max(_BATCH, spec.group_size),
        )  # fmt: skip
        self._calls = 0
        self._rows = RowCounter(model.transformer)

    def draw(self, entry: int, case: Case, on_step: OnStep) -> Tensor:
        """One group, from one initial noise."""
        sigmas, settings, members = self._entries[entry].sigmas, self._spec.entries[entry], range(self._spec.group_size)
        noise = partial(self._step_noise, case.seed, members)
        return rollout(
            self._velocity_for([case]), self._initial([case]), sigmas, settings.flow_window, settings.eta, noise, len(members),
            on_step=lambda done, _: on_step(done), mode=settings.flow_mode,
        ).final  # fmt: skip

    def reference(self, sigmas: Tensor, cases: Sequence[Case], on_step: OnStep) -> Tensor:
        """Euler, all cases at once."""
        noise = partial(self._step_noise, 0, range(len(cases)))
        return rollout(
            self._velocity_for(cases), self._initial(cases), sigmas, Window(0, 0), 0.0, noise, 1,
            on_step=lambda done, _: on_step(done),
        ).final  # fmt: skip

    def counted(self) -> tuple[int, int]:
        """Model calls and rows since the last time."""
        calls, self._calls = self._calls, 0
        return calls, sum(self._rows.take().values())

    def close(self) -> None:
        """Stop counting."""
        self._rows.close()

    def _velocity_for(self, cases: Sequence[Case]) -> Velocity:
        """The velocity of rows that are whole groups of the cases."""
        prompts = torch.tensor([self._prompts.index(case.prompt) for case in cases])

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            self._calls += 1
            return self._guided(x, sigma, prompts.repeat_interleave(len(x) // len(cases)))

        return velocity

    def _initial(self, cases: Sequence[Case]) -> Tensor:
        noise = torch.cat([initial_noise(case.seed, (1, *self._shape)) for case in cases])
        return noise.to(self.device, self._dtype)

    def _step_noise(self, seed: int, members: Sequence[int], step: int) -> Tensor:
        return step_noise(seed, members, step, self._shape)


def _decoded(model: FlowModel, latents: Tensor) -> Tensor:
    """Pictures (cases, G, 3, H, W) of latents (cases, G, …)."""
    parts = [model.decode(part.to(model.device)).cpu() for part in latents.flatten(0, 1).split(_BATCH)]
    return torch.cat(parts).unflatten(0, latents.shape[:2])


def _tell(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    columns = ["sampler", "NFE", "rows", "ms", "RMSE", "diversity"]
    scored = comparison.rows[0]["reward_mean"] is not None
    columns += ["reward", "to first"] if scored else []
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    for row in comparison.rows:
        cells = [row["label"], f"{row['nfe']:g}", f"{row['rows']:g}", f"{1000 * row['seconds']:.0f}"]
        cells += [_number(row["rmse"]), _number(row["diversity"])]
        if scored:
            cells += [_interval(row, "reward"), _interval(row, "difference", "+")]
        table.add_row(*cells)
    console.print(table)


def _interval(row: dict[str, Any], name: str, sign: str = "") -> str:
    """Mean and half width."""
    mean, high = row[f"{name}_mean"], row[f"{name}_high"]
    return _number(mean, sign) + ("" if high is None else f" ± {high - mean:.3f}")


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
