"""Models with random weights, for measuring what depends on their shape alone."""

from __future__ import annotations

import torch
from diffusers import SD3Transformer2DModel


def random_sd3_transformer(layers: int, side: int, text_width: int = 128, pooled_width: int = 64) -> SD3Transformer2DModel:
    """An SD3 transformer of that many layers and 64 times the width, on a picture of side x side tokens."""
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=2 * side, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=layers, caption_projection_dim=64 * layers, joint_attention_dim=text_width,
        pooled_projection_dim=pooled_width, pos_embed_max_size=2 * side,
    )  # fmt: skip
