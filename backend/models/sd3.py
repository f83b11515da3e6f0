"""Stable Diffusion 3 as diffusers has it: transformer, one CLIP-style text encoder, an autoencoder."""

from __future__ import annotations

import torch
from diffusers import AutoencoderTiny, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

from .base import Conditions, ModelError

LORA_TARGETS = {
    "attention": r"transformer_blocks\.\d+\.(attn|attn2)\."
    r"(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
    "attention+mlp": r"transformer_blocks\.\d+\.((attn|attn2)\."
    r"(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2))",
}
"""peft matches a string against whole module paths; the last block has no ``to_add_out`` and no ``ff_context``."""


class SD3:
    """An SD3 transformer with its text encoder and VAE; see :class:`~.base.FlowModel`.

    The transformer runs in ``autocast`` when its latents' arithmetic is lower than its weights'.
    """

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: CLIPTextModelWithProjection,
        tokenizer: PreTrainedTokenizerBase,
        vae: AutoencoderTiny,
        max_tokens: int,
    ):
        self.transformer, self.text_encoder, self.tokenizer, self.vae = transformer, text_encoder, tokenizer, vae
        self.max_tokens = max_tokens
        self.latent_channels = transformer.config.in_channels
        self.autocast: torch.dtype | None = None
        self._max_side = transformer.config.pos_embed_max_size * transformer.config.patch_size

    @property
    def device(self) -> torch.device:
        return self.vae.device  # a trainer drops the text encoder

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditions:
        """``states`` (P, tokens, width) after the encoder's final norm, and ``pooled`` (P, width)."""
        tokens = self.tokenizer(prompts, padding="max_length", max_length=self.max_tokens, truncation=True, return_tensors="pt")[
            "input_ids"
        ]
        outputs = self.text_encoder(input_ids=tokens.to(self.device))
        return {"states": outputs.last_hidden_state, "pooled": outputs.text_embeds}

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """(channels, height / 8, width / 8)."""
        unit = 8 * self.transformer.config.patch_size
        limit = 8 * self._max_side
        if any(side % unit or not unit <= side <= limit for side in (width, height)):
            raise ModelError(
                f"this model draws pictures whose sides are multiples of {unit} up to {limit} pixels, not {width}x{height}; "
                f"its own size is {8 * self.transformer.config.sample_size}"
            )
        return (self.latent_channels, height // 8, width // 8)

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Velocity in the arithmetic of ``x``; SD3 is told 1000 sigma as its timestep."""
        timestep = (sigma * 1000).expand(len(x))
        with torch.autocast(x.device.type, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            velocity = self.transformer(
                hidden_states=x,
                encoder_hidden_states=conditions["states"].to(x.dtype),
                pooled_projections=conditions["pooled"].to(x.dtype),
                timestep=timestep,
                return_dict=False,
            )[0]
        return velocity.to(x.dtype)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures in [0, 1], 16 latents at a time."""
        parts = [self.vae.decode(part.to(self.vae.dtype), return_dict=False)[0] for part in latents.split(16)]
        return ((torch.cat(parts).float() + 1) / 2).clamp(0, 1)
