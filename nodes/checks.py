"""What a graph may hand to a sampler, and what of it a trainer could not see."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..backend.errors import MixGRPOError

Conditioning = list[list[Any]]  # ComfyUI's: [[text states (rows, tokens, width), {name: value}], …]

_IN_CONDITIONING = {
    "control": "a ControlNet",
    "hooks": "hooks in the conditioning",
    "gligen": "GLIGEN boxes",
    "area": "a conditioning area",
    "mask": "a conditioning mask",
    "start_percent": "a timestep range",
    "concat_latent_image": "a condition picture",
    "reference_latents": "reference pictures",
}


class GraphError(MixGRPOError):
    """Graph values that do not fit together, or a MODEL that MixGRPO cannot sample."""


def check_flow(model_sampling: Any) -> None:
    """Refuse a model that predicts something else than a velocity.

    The class is compared, not a name: the model's declared type does not notice a patched ``model_sampling``.

    Raises:
        GraphError: names the class found and what to use instead.
    """
    import comfy.model_sampling

    if isinstance(model_sampling, comfy.model_sampling.CONST):
        return
    parents = [base.__name__ for base in type(model_sampling).__mro__[1:] if base.__module__ == comfy.model_sampling.__name__]
    raise GraphError(
        f"MixGRPO samples flow-matching models, and this MODEL is none: its sampling is {' + '.join(parents) or 'unknown'}; use "
        "a model such as the MixGRPO Starter, SD3, Flux or Qwen-Image, and take away a ModelSampling node that changes its kind"
    )


def check_conditioning(name: str, conditioning: Conditioning, groups: int) -> None:
    """Refuse a conditioning that holds nothing, or neither one prompt nor one for every group.

    Raises:
        GraphError: names the conditioning and both numbers.
    """
    if not conditioning:
        raise GraphError(f"the {name} conditioning is empty; connect a CLIP Text Encode")
    for states, _ in conditioning:
        if states is not None and len(states) not in (1, groups):
            raise GraphError(
                f"the {name} conditioning holds {len(states)} prompts for {groups} latents; give one prompt, or one for each "
                "latent (every latent becomes a group)"
            )


def guides(model: Any, cfg: float) -> bool:
    """Whether ComfyUI evaluates the negative prompt too, which doubles the rows."""
    return not math.isclose(cfg, 1.0) or bool(model.model_options.get("disable_cfg1_optimization", False))


def check_rows(guider: Any, rows: int) -> None:
    """Refuse a guider whose conditioning has rows, but not one for each of the batch's, which ComfyUI would repeat or cut unseen.

    Raises:
        GraphError: names the conditioning and both numbers.
    """
    from comfy.conds import CONDConstant, CONDRegular

    for name, entries in _entries(guider):
        for value in entries.get("model_conds", {}).values():
            by_row = isinstance(value, CONDRegular) and not isinstance(value, CONDConstant) and isinstance(value.cond, Tensor)
            given = len(value.cond) if by_row else 1
            if given not in (1, rows):
                raise GraphError(
                    f"the {name} conditioning holds {given} prompts for a batch of {rows} latents; give one prompt, or one for "
                    "each latent, or use MixGRPO Sampler, which takes one for each group"
                )


def differs_by_row(guider: Any, denoise_mask: Tensor | None) -> str:
    """What the model is told row by row, so that one row cannot stand for its whole group; "" when there is no such thing.

    A mask, a ControlNet, or a conditioning with rows of its own belongs to rows of the full batch; so may whatever a guider
    without ComfyUI's ``conds`` does.
    """
    if denoise_mask is not None:
        return "mask"
    if getattr(guider, "conds", None) is None:
        return "guider"
    for _, entry in _entries(guider):
        if "control" in entry:
            return "control"
        values = [getattr(value, "cond", None) for value in entry.get("model_conds", {}).values()]
        if any(_has_rows(value) for value in (entry.get("mask"), *values)):
            return "batched conditioning"
    return ""


def _entries(guider: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name of the conditioning, entry) of a guider that is sampling."""
    conds = getattr(guider, "conds", None) or {}
    return [(name, entry) for name, entries in conds.items() for entry in entries or ()]


def _has_rows(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_rows(part) for part in value)
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) > 1


def spread(conditioning: Conditioning, groups: int, group_size: int) -> Conditioning:
    """The conditioning with a row for every sample, group-major; one prompt for all stays one row."""
    if groups == 1 or group_size == 1:
        return conditioning

    def rows(value: Any) -> Any:
        batched = getattr(value, "ndim", 0) > 0 and len(value) == groups
        return value.repeat_interleave(group_size, 0) if batched else value

    return [[rows(states), {key: rows(value) for key, value in extra.items()}] for states, extra in conditioning]


def unseen_by_trainer(model: Any, *conditionings: Conditioning) -> list[str]:
    """What changes the pictures of this graph although a trainer that loads the base model knows nothing of it."""
    found = []
    if model.patches or model.hook_patches:
        found.append(f"{len(model.patches) or 'hooked'} patched weights (a LoRA, for example)")
    for name, part in model.object_patches.items():
        shift = getattr(part, "shift", None)
        found.append(f"a changed {name}" + ("" if shift is None else f" (shift {shift:g})"))
    options = {key: value for key, value in model.model_options.items() if key != "transformer_options"}
    options |= model.model_options.get("transformer_options", {})
    attached = {"wrappers": model.wrappers, "injections": model.injections, "additional models": model.additional_models}
    found += [f"{key.replace('_', ' ')} on the model" for key, value in (options | attached).items() if _holds_something(value)]
    entries = [extra for conditioning in conditionings for _, extra in conditioning]
    found += [words for key, words in _IN_CONDITIONING.items() if any(entry.get(key) is not None for entry in entries)]
    if any(len(conditioning) > 1 for conditioning in conditionings):
        found.append("combined prompts")
    return found


def _holds_something(value: Any) -> bool:
    """False for None, False and for mappings or lists with nothing but empty ones in them."""
    if isinstance(value, dict):
        return any(_holds_something(inner) for inner in value.values())
    return bool(value) if isinstance(value, (list, tuple, bool)) else value is not None
