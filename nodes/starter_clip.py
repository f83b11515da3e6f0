"""The starter's text encoder as a ComfyUI CLIP, built from ComfyUI's own classes and the encoder's two configuration files.

Both sides must read a prompt alike, so what the trainer cannot read (prompt weights, embeddings) is refused, and what it
cuts off (words beyond the encoder's length) is cut off here too.
"""

from __future__ import annotations

import logging
from pathlib import Path

import comfy.clip_model
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import torch
from transformers import PreTrainedTokenizerFast

from ..backend.errors import MixGRPOError
from ..backend.files import load_json


class PromptError(MixGRPOError):
    """A prompt that the trainer would read in another way."""


def load_clip(folder: Path) -> comfy.sd.CLIP:
    """A CLIP with the weights in ``folder/text_encoder`` and the vocabulary in ``folder/tokenizer``, in float32."""
    config = load_json(folder / "text_encoder" / "config.json")
    length = config["max_position_embeddings"]

    class Encoder(comfy.sd1_clip.SDClipModel):
        def __init__(self, device="cpu", dtype=None, model_options={}):  # noqa: B006 ComfyUI's signature
            tokens = {"start": config["bos_token_id"], "end": config["eos_token_id"], "pad": config["pad_token_id"]}
            super().__init__(
                device=device, dtype=dtype, max_length=length, textmodel_json_config=dict(config), model_class=_TextModel,
                special_tokens=tokens, model_options=model_options,
            )  # fmt: skip

    class Tokenizer(_Tokenizer):
        def __init__(self, embedding_directory=None, tokenizer_data={}):  # noqa: B006 ComfyUI's signature
            super().__init__(
                str(folder / "tokenizer"), max_length=length, embedding_directory=None, embedding_size=config["hidden_size"],
                tokenizer_class=_WordTokenizer, tokenizer_data=tokenizer_data,
            )  # fmt: skip

    class Target:
        params = {"clip_model": Encoder}
        clip = comfy.sd1_clip.SD1ClipModel

        @staticmethod
        def tokenizer(embedding_directory=None, tokenizer_data={}):  # noqa: B006 ComfyUI's signature
            return comfy.sd1_clip.SD1Tokenizer(embedding_directory, tokenizer_data, tokenizer=Tokenizer)

    clip = comfy.sd.CLIP(Target, model_options={"dtype": torch.float32})
    weights = comfy.utils.load_torch_file(str(folder / "text_encoder" / "model.safetensors"))
    missing, unexpected = clip.load_sd(weights)
    if missing or unexpected:
        raise MixGRPOError(f"the starter's text encoder lacks {missing} and holds unknown {unexpected}; fetch the folder again")
    return clip


class _TextModel(comfy.clip_model.CLIPTextModel):
    def __init__(self, config_dict, dtype, device, operations):
        super().__init__(config_dict, dtype, device, operations)
        # ComfyUI's class has the vocabulary size of CLIP built in.
        vocabulary, width = config_dict["vocab_size"], config_dict["hidden_size"]
        self.set_input_embeddings(operations.Embedding(vocabulary, width, dtype=dtype, device=device))


class _WordTokenizer:
    """The vocabulary alone: ``tokenizer_config.json`` names classes that only one major version of transformers knows."""

    @staticmethod
    def from_pretrained(folder: str) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))


class _Tokenizer(comfy.sd1_clip.SDTokenizer):
    def tokenize_with_weights(self, text, return_word_ids=False, **options):
        """One chunk of tokens, all of weight 1: what the trainer's tokenizer makes of the same text."""
        check_prompt(text)
        chunks = super().tokenize_with_weights(text, return_word_ids, **options)
        if len(chunks) > 1:
            words = self.max_length - 2
            logging.warning("MixGRPO: the starter reads the first %d words of a prompt; the rest of %r is cut off", words, text)
        return chunks[:1]


def check_prompt(text: str) -> None:
    """Refuse weights, brackets and embeddings, which ComfyUI would read and the trainer would take for words.

    Raises:
        PromptError: names the prompt and what to write instead.
    """
    plain = comfy.sd1_clip.escape_important(text)
    if (text and comfy.sd1_clip.token_weights(plain, 1.0) != [(text, 1.0)]) or "embedding:" in text:
        raise PromptError(
            f"the starter reads plain words, as its trainer does: write {text!r} without (weights:1.2), brackets or embeddings"
        )
