"""The starter's text encoder as a ComfyUI CLIP object, built from ComfyUI's own classes and our two configuration files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerFast

from mixgrpo.backend.files import load_json


def load_clip(comfy: ModuleType, folder: Path) -> Any:
    """A ``comfy.sd.CLIP`` with the weights in ``folder/text_encoder`` and the vocabulary in ``folder/tokenizer``."""
    config = load_json(folder / "text_encoder" / "config.json")
    length = config["max_position_embeddings"]

    class TextModel(comfy.clip_model.CLIPTextModel):
        def __init__(self, config_dict, dtype, device, operations):
            super().__init__(config_dict, dtype, device, operations)
            # ComfyUI's class has the vocabulary size of CLIP built in.
            vocabulary, width = config_dict["vocab_size"], config_dict["hidden_size"]
            self.set_input_embeddings(operations.Embedding(vocabulary, width, dtype=dtype, device=device))

    class Encoder(comfy.sd1_clip.SDClipModel):
        def __init__(self, device="cpu", dtype=None, model_options={}):  # noqa: B006 ComfyUI's signature
            tokens = {"start": config["bos_token_id"], "end": config["eos_token_id"], "pad": config["pad_token_id"]}
            super().__init__(
                device=device, dtype=dtype, max_length=length, textmodel_json_config=dict(config), model_class=TextModel,
                special_tokens=tokens, model_options=model_options,
            )  # fmt: skip

    class Tokenizer(comfy.sd1_clip.SDTokenizer):
        def __init__(self, embedding_directory=None, tokenizer_data={}):  # noqa: B006 ComfyUI's signature
            super().__init__(
                str(folder / "tokenizer"), max_length=length, embedding_directory=embedding_directory,
                embedding_size=config["hidden_size"], tokenizer_class=PreTrainedTokenizerFast, tokenizer_data=tokenizer_data,
            )  # fmt: skip

    class Target:
        params = {"clip_model": Encoder}
        clip = comfy.sd1_clip.SD1ClipModel

        @staticmethod
        def tokenizer(embedding_directory=None, tokenizer_data={}):  # noqa: B006 ComfyUI's signature
            return comfy.sd1_clip.SD1Tokenizer(embedding_directory, tokenizer_data, tokenizer=Tokenizer)

    clip = comfy.sd.CLIP(Target)
    weights = comfy.utils.load_torch_file(str(folder / "text_encoder" / "model.safetensors"))
    missing, unexpected = clip.load_sd(weights)
    assert not missing and not unexpected, f"ComfyUI's CLIP text model lacks {missing} and does not know {unexpected}"
    return clip
