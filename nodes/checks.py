"""What a graph may hand to a sampler, and what of it a trainer could not see."""

from __future__ import annotations

from typing import Any

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
