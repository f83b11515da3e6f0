"""Published settings by name: what a job that names a preset begins with, and is free to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .base import SpecError


@dataclass(frozen=True)
class Preset:
    """A method's settings as fields of a job.

    The learning rate in ``fields`` is one for a LoRA, which is what a job trains; ``full_learning_rate`` is the published one for
    training all parameters, shown beside it so that nobody carries it over: a LoRA hardly moves at it.
    """

    says: str
    source: str
    full_learning_rate: float | None
    fields: dict[str, Any]


_OPTIMIZER = {"learning_rate": 3e-4, "weight_decay": 1e-4, "max_grad_norm": 1.0, "clip_range": 1e-4, "advantage_clip": 5.0}
_MIXGRPO = {
    "sampling": {
        "steps": 25,
        "shift": 3.0,
        "eta": 0.7,
        "window": {"policy": "progressive", "size": 4, "stride": 1, "every": 25, "end": "hold"},
        "mode": {"dynamics": "flow_sde"},
    },
    "group_size": 12,
    "prompts_per_iteration": 32,
    "lora": {"rank": 64, "alpha": 128},
    "optimizer": _OPTIMIZER | {"updates_per_rollout": 4},
    "iterations": 300,
}
_FLOW_GRPO = {
    "sampling": {
        "steps": 10,
        "shift": 3.0,
        "guidance": 4.5,
        "eta": 0.7,
        "shared_noise": False,
        "window": {"policy": "frozen", "size": 9},
        "mode": {"dynamics": "flow_sde"},
    },
    "group_size": 24,
    "prompts_per_iteration": 48,
    "lora": {"rank": 32, "alpha": 64},
    "optimizer": _OPTIMIZER | {"updates_per_rollout": 2},
    "advantage": {"std": "global"},
    "objective": {"kl": {"weight": 0.04, "space": "mean_rate"}},
    "ema": {"decay": 0.9, "every": 8},
}
_DANCE_GRPO = {
    "sampling": {
        "steps": 16,
        "shift": 3.0,
        "eta": 0.3,
        "window": {"policy": "frozen", "size": 15},
        "mode": {"dynamics": "dance_sde"},
    },
    "group_size": 12,
    "prompts_per_iteration": 16,
    "lora": {"rank": 128, "alpha": 256},
    "optimizer": _OPTIMIZER | {"updates_per_rollout": 3},
    "objective": {"trained_steps": 9},
    "iterations": 300,
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, mapping by mapping, ``above`` wins. A window with another policy keeps none of the settings of the one below."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if value.get("policy", old.get("policy")) != old.get("policy"):
                old = {"size": old["size"]}
            value = merged(old, value)
        result[name] = value
    return result


PRESETS: dict[str, Preset] = {
    "mixgrpo": Preset(
        "a window of 4 of 25 steps moves from noise to picture",
        "arXiv 2507.21802, FLUX.1 dev; rank and alpha are of DanceGRPO's kind, since the paper trains all parameters",
        1e-5,
        _MIXGRPO,
    ),
    "mixgrpo-flash": Preset(
        "as mixgrpo, with 0.4 of the steps after the window, by DPM-Solver++ of order 2",
        "arXiv 2507.21802, MixGRPO-Flash",
        1e-5,
        merged(_MIXGRPO, {"sampling": {"window": {"every": 20}, "mode": {"solver_after": "dpmpp_2m", "ratio": 0.4}}}),
    ),
    "mixgrpo-flash-star": Preset(
        "the window stays at the first steps, with 0.2 of the steps after it",
        "arXiv 2507.21802, MixGRPO-Flash*",
        1e-5,
        merged(
            _MIXGRPO,
            {"sampling": {"window": {"policy": "frozen"}, "mode": {"solver_after": "dpmpp_2m", "ratio": 0.2}}},
        ),
    ),
    "flow-grpo": Preset(
        "10 stochastic steps, all of them trained but the last, a KL to the base",
        "arXiv 2505.05470, SD3.5 medium",
        None,
        _FLOW_GRPO,
    ),
    "dance-grpo": Preset(
        "16 stochastic steps, 9 drawn anew for every iteration are trained",
        "arXiv 2505.07818, FLUX.1 dev with a LoRA",
        1e-5,
        _DANCE_GRPO,
    ),
    "full-sde": Preset(
        "25 stochastic steps, 14 of them trained: what the MixGRPO paper measures itself against",
        "arXiv 2507.21802, the first row of its tables, with mixgrpo's other settings",
        1e-5,
        merged(_MIXGRPO, {"sampling": {"window": {"policy": "frozen", "size": 24}}, "objective": {"trained_steps": 14}}),
    ),
}
"""By name. Sizes, guidance of models that take it as an input, rewards and prompts are the job's own."""


def with_preset(fields: Any) -> Any:
    """A job's fields with what its ``preset`` sets below them, and without that name: a job is what it sets.

    Raises:
        SpecError: there is no such preset.
    """
    if not isinstance(fields, dict) or "preset" not in fields:
        return fields
    own = {name: value for name, value in fields.items() if name != "preset"}
    return merged(find_preset(fields["preset"]).fields, own)


def find_preset(name: Any) -> Preset:
    """Raises :class:`SpecError` with the names that there are."""
    if not isinstance(name, str) or name not in PRESETS:
        raise SpecError(f"preset: there is no {str(name)[:80]!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def settings(fields: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting in nested fields, by its path with dots."""
    for name, value in fields.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from settings(value, where)
        else:
            yield where, value
