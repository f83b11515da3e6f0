"""How much memory each phase of a job will hold, from the model's sizes alone.

What a phase holds is counted (weights, adapter, optimiser, trajectory, pictures); what the model's layers need meanwhile is

    rows x tokens x hidden size x bytes per number x (blocks x kept + working)

with two constants that were measured on SD3 models of 3 to 6 blocks and 3 to 8 heads (README.md has the figures). ``kept``
is what a block keeps for the backward pass, ``working`` what one block needs besides. Scorers and PyTorch itself are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..models.families import outline_model
from ..models.sd3 import SD3
from ..specs import TrainSpec
from ..train import adapter
from ..train.retention import kept_loras
from ..train.sharing import first_share

PHASES = ("text", "rollout", "decode", "training")
_FLOAT = 4


@dataclass(frozen=True)
class _Layers:
    """Numbers per token and hidden unit that the transformer's layers hold."""

    kept: float  # by every block, with gradient
    working: float  # by one block besides
    forward: float  # by one block, without gradient


_EXACT = {"attention": _Layers(14, 6, 12), "attention+mlp": _Layers(19, 6, 15)}
_AUTOCAST = {"attention": _Layers(19.5, 7, 14), "attention+mlp": _Layers(24.5, 15, 21)}  # in bytes of the lower precision
_VAE_NUMBERS = 190  # per pixel that is being decoded; three maps of 64 channels
_VAE_PICTURES = 16  # decoded at once
_PICTURE_COPIES = 4  # of all pictures of an iteration, where they are put together
_LATENT_COPIES = 6  # of all latents of a rollout, where a step is taken


@dataclass(frozen=True)
class Sizes:
    """What the model's configuration tells, in parameters and bytes; one rank's share where parameters are sharded.

    Attributes:
        parameters: of transformer, text encoder, VAE and adapter, whole.
        transformer: bytes held by this rank, with what FSDP has gathered at a time.
        text_encoder, vae, adapter: bytes held by this rank.
        casts: bytes of the lower-precision copies of weights that a training pass keeps.
        hidden, blocks, image_tokens, text_tokens, text_width: of the transformer.
        latent: numbers in a latent.
        number: bytes of a number in the layers' arithmetic.
        whole_adapter: bytes of the adapter on all ranks together.
    """

    parameters: dict[str, int]
    transformer: int
    text_encoder: int
    vae: int
    adapter: int
    casts: int
    hidden: int
    blocks: int
    image_tokens: int
    text_tokens: int
    text_width: int
    latent: int
    number: int
    whole_adapter: int


def sizes(spec: TrainSpec, ranks: int = 1) -> Sizes:
    """Build the model on the meta device, put the adapter into it, and look.

    Raises:
        ModelError: the model does not draw pictures of the job's size.
    """
    model = outline_model(spec.model)
    latent = model.latent_shape(spec.sampling.width, spec.sampling.height)
    parts = {"transformer": model.transformer, "text_encoder": model.text_encoder, "vae": model.vae}
    parameters = {name: sum(value.numel() for value in part.parameters()) for name, part in parts.items()}
    held = {name: _bytes([*part.parameters(), *part.buffers()]) for name, part in parts.items()}
    blocks, linear = model.transformer.transformer_blocks, _linear_parameters(model.transformer)
    largest = max(_bytes(block.parameters()) for block in blocks)
    adapter.add_adapter(model.transformer, spec.lora, spec.seed)
    trained = list(adapter.adapter_parameters(model.transformer).values())
    whole = _bytes(trained)
    config = model.transformer.config
    return Sizes(
        parameters=parameters | {"lora": sum(value.numel() for value in trained)},
        transformer=held["transformer"] if ranks == 1 else _sharded(held["transformer"], largest, len(blocks), ranks),
        text_encoder=held["text_encoder"],
        vae=held["vae"],
        adapter=-(-whole // ranks),
        casts=2 * linear if model.autocast is not None else 0,
        hidden=config.num_attention_heads * config.attention_head_dim,
        blocks=len(blocks),
        image_tokens=latent[-1] * latent[-2] // config.patch_size**2,
        text_tokens=model.max_tokens,
        text_width=config.joint_attention_dim,
        latent=_product(latent),
        number=_number(model, trained),
        whole_adapter=whole,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _number(model: SD3, trained: list[nn.Parameter]) -> int:
    return trained[0].element_size() if model.autocast is None else model.autocast.itemsize


def _linear_parameters(transformer: nn.Module) -> int:
    """Parameters of the layers within blocks that a gradient passes through; it does not pass those that make modulations."""
    named = transformer.transformer_blocks.named_modules()
    layers = [module for name, module in named if isinstance(module, nn.Linear) and "norm" not in name]
    return sum(layer.weight.numel() for layer in layers)


def _sharded(whole: int, block: int, blocks: int, ranks: int) -> int:
    """A rank's shard, two gathered blocks (the present one and the next), and what is in no block."""
    return -(-whole // ranks) + 2 * block + max(0, whole - blocks * block)


def phase_bytes(spec: TrainSpec, of: Sizes, rows_per_call: int, ranks: int = 1) -> dict[str, int]:
    """The most that one rank's tensors hold in every phase, by :data:`PHASES`."""
    share, group, size = first_share(spec, ranks), spec.group_size, spec.sampling.window.size
    groups, cfg = share.groups.stop, 1 if spec.sampling.guidance == 1 else 2
    samples = groups * group // share.parts
    wide = 8 if spec.model.precision == "float64" else _FLOAT
    layers = (_EXACT if of.casts == 0 else _AUTOCAST)[spec.lora.targets]
    tokens = of.image_tokens + of.text_tokens
    row = tokens * of.hidden * of.number
    text_row = of.text_tokens * of.text_width * _FLOAT

    weights = of.transformer + of.vae
    conditions = (len(spec.prompts) + 1) * text_row
    learned = _states(spec) * of.adapter
    begun = groups if spec.sampling.shared_noise else groups * group
    trajectory = (begun + (2 * size + 1) * groups * group) * of.latent * wide  # of a split group, the others' part as well
    pictures = samples * 3 * spec.sampling.width * spec.sampling.height * _FLOAT
    held = weights + learned + conditions + trajectory

    rolled = min(rows_per_call, cfg * samples)
    most = cfg * samples * spec.trained_of_a_group // group // spec.optimizer.updates_per_rollout
    taught = min(training_call_rows(spec, rows_per_call), most)
    at_once = min(samples, _VAE_PICTURES) * spec.sampling.width * spec.sampling.height * _VAE_NUMBERS * _FLOAT
    return {
        "text": weights + of.text_encoder + conditions + int(len(spec.prompts) * text_row * layers.forward),
        "rollout": held + int(rolled * (row * layers.forward + text_row)) + _LATENT_COPIES * samples * of.latent * wide,
        "decode": held + max(pictures + at_once, _PICTURE_COPIES * pictures),
        "training": held
        + pictures
        + of.adapter  # the gradient
        + of.casts // (1 if ranks == 1 else ranks)
        + int(taught * (row * (of.blocks * layers.kept + layers.working) + text_row)),
    }


def _states(spec: TrainSpec) -> int:
    """How many times the adapter's size is kept: itself, two moments of the optimiser, and a moving average."""
    return 3 if spec.ema is None else 4


def training_call_rows(spec: TrainSpec, rows_per_call: int) -> int:
    """Rows of the largest training call: whole groups, as many as fit, but at least one."""
    one = spec.trained_of_a_group // spec.optimizer.updates_per_rollout * (1 if spec.sampling.guidance == 1 else 2)
    return max(1, rows_per_call // one) * one


def disk_bytes(spec: TrainSpec, of: Sizes) -> dict[str, int]:
    """What checkpoints (adapter, moments, average; one more while the newest is written) and LoRA files take in the end.

    LoRAs that somebody asks for meanwhile are not counted.
    """
    saved = {*range(spec.checkpoint_every, spec.iterations + 1, spec.checkpoint_every), spec.iterations}
    kept = kept_loras(saved, None, {spec.iterations}, spec.checkpoint_every, spec.keep_loras_every)
    loras = min(len(saved), len(kept) + 1)  # the best one may be another
    checkpoint = _states(spec) * of.whole_adapter
    total = (min(spec.keep_checkpoints, len(saved)) + 1) * checkpoint + loras * of.whole_adapter
    return {"checkpoint": checkpoint, "lora": of.whole_adapter, "loras": loras, "total": total}
