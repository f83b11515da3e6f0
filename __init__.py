"""MixGRPO for ComfyUI: reinforcement learning of flow-matching image models, inside the tool they are drawn with."""
