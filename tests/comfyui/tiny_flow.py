"""A small flow model inside ComfyUI's own classes: any number of axes, one or several kinds of latent, a LoRA's target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHANNELS = 16
LORA_KEY = "diffusion_model.mix.weight"


class TinyVelocity(nn.Module):
    """v = tanh(W (x + its neighbour / 2) + sigma + text) - 0.3 x; every row on its own."""

    def __init__(self, device: Any = None, operations: Any = None):
        super().__init__()
        self.dtype = torch.float32
        self.mix = operations.Linear(CHANNELS, CHANNELS, bias=False, device=device)
        with torch.no_grad():
            self.mix.weight.copy_(0.3 * torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor | list[Tensor], timestep: Tensor, context: Tensor, control: Any = None, **more: Any) -> Any:
        if isinstance(x, list):
            return [self.forward(part, timestep, context, control) for part in x]
        one = (-1,) + (1,) * (x.ndim - 1)
        mixed = self.mix((x + 0.5 * x.roll(1, -1)).movedim(1, -1)).movedim(-1, 1)
        told = timestep.view(one) / 1000 + context.flatten(1).mean(1).view(one)
        if control is not None:
            told = told + control["output"][0].view(one)
        return torch.tanh(mixed + told) - 0.3 * x


def tiny_model(comfy: Any, dimensions: int = 2) -> Any:
    """MODEL: a ModelPatcher around :class:`TinyVelocity`, with SD3's latents, or Wan's for 3 dimensions."""
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models

    class Config(comfy.supported_models.SD3):
        unet_config: dict = {}
        latent_format = comfy.latent_formats.SD3 if dimensions == 2 else comfy.latent_formats.Wan21

    class Tiny(comfy.model_base.BaseModel):
        def extra_conds(self, **given: Any) -> dict[str, Any]:
            shapes = given.get("latent_shapes") or []
            several = {"latent_shapes": comfy.conds.CONDConstant(shapes)} if len(shapes) > 1 else {}
            return super().extra_conds(**given) | several

    model = Tiny(Config({}), comfy.model_base.ModelType.FLOW, unet_model=TinyVelocity)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def prompt(*values: float, **extra: Any) -> list:
    """CONDITIONING with one row for every value."""
    return [[torch.tensor(values).view(-1, 1, 1).expand(-1, 2, 4).contiguous(), extra]]


def tiny_lora(scale: float = 0.5) -> dict[str, Tensor]:
    """What a LoRA file for :class:`TinyVelocity` holds."""
    generator = torch.Generator().manual_seed(2)
    up, down = (scale * torch.randn(shape, generator=generator) for shape in ((CHANNELS, 2), (2, CHANNELS)))
    name = LORA_KEY.removesuffix(".weight")
    return {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down, f"{name}.alpha": torch.tensor(2.0)}


def with_lora(comfy: Any, model: Any, scale: float = 0.5) -> Any:
    """The MODEL as the stock LoRA loader returns it."""
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, tiny_lora(scale), 1.0, 0.0)[0]


def model_rows(model: Any) -> tuple[list[int], Any]:
    """The rows of every call of the diffusion model, and the hook that counts them."""
    rows: list[int] = []

    def count(module: nn.Module, args: tuple) -> None:
        rows.append(len(args[0][0] if isinstance(args[0], list) else args[0]))

    return rows, model.model.diffusion_model.register_forward_pre_hook(count)


def sample(comfy: Any, model: Any, noise: Any, sigmas: Tensor, positive: list, latent: Any = None, **more: Any) -> tuple:
    """A CFGGuider's run with MixGRPO's sampler; returns (samples, run).

    ``more``: fields of :class:`GroupSettings`, and ``cfg``, ``negative``, ``mask``, ``callback``, ``seed``, ``sample_ids``.
    """
    import comfy.samplers

    from mixgrpo.backend.flow.window import Window
    from mixgrpo.nodes.sampling import GroupSettings, sample_groups

    named = {"cfg": 1.0, "negative": prompt(-0.5), "mask": None, "callback": None, "seed": 3, "sample_ids": None}
    given = {name: more.pop(name, default) for name, default in named.items()}
    settings = GroupSettings(**{"group_size": 1, "shared_noise": False, "eta": 0.7, "window": Window(1, 2)} | more)
    guider, runs = comfy.samplers.CFGGuider(model), []
    guider.set_conds(positive, given["negative"])
    guider.set_cfg(given["cfg"])
    options = {"settings": settings, "record": runs.append, "sample_ids": given["sample_ids"]}
    samples = guider.sample(
        noise, torch.zeros_like(noise) if latent is None else latent, comfy.samplers.KSAMPLER(sample_groups, options), sigmas,
        denoise_mask=given["mask"], callback=given["callback"], disable_pbar=True, seed=given["seed"],
    )  # fmt: skip
    return samples, runs[0] if runs else None


def stock(comfy: Any, model: Any, noise: Any, sigmas: Tensor, positive: list, name: str, latent: Any = None, **more: Any) -> Any:
    """The same with ComfyUI's own sampler ``name``; ``more``: its options, and ``cfg``, ``negative`` and ``mask``."""
    import comfy.samplers

    cfg, negative, mask = more.pop("cfg", 1.0), more.pop("negative", prompt(-0.5)), more.pop("mask", None)
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(positive, negative)
    guider.set_cfg(cfg)
    sampler = comfy.samplers.ksampler(name, more)
    latent = torch.zeros_like(noise) if latent is None else latent
    return guider.sample(noise, latent, sampler, sigmas, denoise_mask=mask, disable_pbar=True, seed=3)
