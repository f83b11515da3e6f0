"""Graphs with the train node, small enough for tests."""

from __future__ import annotations

from typing import Any

SHORT = {"iterations": 2, "group_size": 4, "prompts_per_iteration": 2}
"""Widgets of a training that is to be short, instead of a template's own."""
CAPTION = "a red circle left of a blue square on a white background"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def train_graph(
    *, sampling: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """Starter, reward, settings and the train node ("train") with its LoRA applied ("patched"); ``train`` changes widgets."""
    drawn = {"steps": 4, "schedule": "shift", "shift": 3.0, "cfg": 1.0, "width": 64, "height": 64, "shared_noise": True,
             "eta": 0.7, "window_start": 0, "window_size": 1, "window_stride": 0, "window_every": 25,
             "window_policy": "progressive", "window_end": "hold"}  # fmt: skip
    learnt = {"learning_rate": 1e-3, "weight_decay": 1e-4, "max_grad_norm": 1.0, "clip_range": 1e-3, "advantage_clip": 5.0,
              "updates_per_rollout": 1}  # fmt: skip
    widgets = {"prompts": CAPTION, "negative_prompt": "", "name": "graph", "iterations": 2, "group_size": 2,
               "prompts_per_iteration": 1, "seed": 0, "start_from": "base model", "checkpoint_every": 1,
               "wait": True, "unload_models": True, "backend": "local"}  # fmt: skip
    return {
        "starter": node("MixGRPO_StarterModel"),
        "reward": node("MixGRPO_JpegCompressibility", weight=1.0),
        "sampling": node("MixGRPO_SamplingSettings", **drawn | (sampling or {})),
        "lora_settings": node("MixGRPO_LoraSettings", rank=2, alpha=4.0, targets="attention", rslora=False),
        "optimizer": node("MixGRPO_OptimizerSettings", **learnt | (optimizer or {})),
        "train": node(
            "MixGRPO_TrainStep", model_ref=["starter", 3], rewards=["reward", 0], sampling=["sampling", 0],
            lora_settings=["lora_settings", 0], optimizer=["optimizer", 0], **widgets | train,
        ),
        "patched": node("LoraModelLoader", model=["starter", 0], lora=["train", 0], strength_model=1.0),
    }  # fmt: skip


def drawing(model: list[Any], name: str = "picture") -> dict[str, Any]:
    """Nodes that draw CAPTION with a MODEL and save the latent as ``{name}_saved``."""
    return {
        "positive": node("CLIPTextEncode", clip=["starter", 1], text=CAPTION),
        "negative": node("CLIPTextEncode", clip=["starter", 1], text=""),
        "empty": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        name: node(
            "KSampler", model=model, positive=["positive", 0], negative=["negative", 0], latent_image=["empty", 0],
            seed=3, steps=4, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        f"{name}_saved": node("SaveLatent", samples=[name, 0], filename_prefix=f"latents/{name}"),
    }  # fmt: skip
