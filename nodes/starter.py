"""The bundled starter model as ComfyUI objects."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from ..backend import starter
from ..backend.errors import MixGRPOError
from ..backend.specs import ModelSpec
from .types import CATEGORY, ModelReference

WEIGHTS = Path(starter.__file__).parent / "weights"
_FILES = {
    "transformer": Path("transformer", "diffusion_pytorch_model.safetensors"),
    "text encoder": Path("text_encoder", "model.safetensors"),
    "tokenizer": Path("tokenizer", "tokenizer.json"),
    "VAE": Path("vae", "starter_vae.safetensors"),
}


class StarterError(MixGRPOError):
    """The starter model cannot be loaded."""


class StarterModel(io.ComfyNode):
    """The starter as MODEL, CLIP and VAE for stock nodes, and as a reference for the trainer; all four are the same files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_StarterModel",
            display_name="MixGRPO Starter Model",
            category=CATEGORY,
            description="Loads the small text-to-image model that comes with MixGRPO. It draws 64x64 pictures of coloured "
            "shapes, for example 'a red circle left of a blue square on a white background'.",
            inputs=[],
            outputs=[
                io.Model.Output("model", display_name="MODEL", tooltip="The diffusion model, in float32 as it is trained."),
                io.Clip.Output("clip", display_name="CLIP", tooltip="The text encoder, for CLIP Text Encode."),
                io.Vae.Output("vae", display_name="VAE", tooltip="Decodes latents of 8x8 into pictures of 64x64."),
                ModelReference.Output("model_ref", display_name="MIXGRPO_MODEL", tooltip="Tells a trainer what to train."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(*load_starter_objects(WEIGHTS), ModelSpec(family="starter"))


def load_starter_objects(folder: Path) -> tuple:
    """MODEL, CLIP and VAE from the starter's files, in the float32 that the trainer computes in.

    Raises:
        StarterError: a file is missing.
    """
    missing = [name for name, file in _FILES.items() if not (folder / file).is_file()]
    if missing:
        raise StarterError(f"the starter's {', '.join(missing)} is missing from {folder}; fetch the MixGRPO folder again")

    import comfy.sd
    import comfy.utils
    import torch

    from .starter_clip import load_clip

    model = comfy.sd.load_diffusion_model(str(folder / _FILES["transformer"]), model_options={"dtype": torch.float32})
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(folder / _FILES["VAE"])), dtype=torch.float32)
    vae.throw_exception_if_invalid()
    return model, load_clip(folder), vae
