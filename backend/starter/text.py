"""The starter's text encoder: a small CLIP text model with a word vocabulary of its own, taught to read captions.

It is trained first and alone: linear layers must read the layout that a caption states off the pooled embedding and off
the states of the last two positions (always padding, so they have seen the whole caption). The denoiser is then trained
on frozen embeddings; there are only 1,081 different texts, so they are computed once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from tqdm import trange
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from . import world

MAX_TOKENS = 16
WIDTH = 128
_WORDS = [
    "a",
    "an",
    *world.COLOURS,
    *world.SHAPES,
    "left",
    "right",
    "of",
    "above",
    "below",
    "on",
    *world.BACKGROUNDS,
    "background",
]
VOCABULARY = {word: index for index, word in enumerate(["<unk>", *_WORDS, "<start>", "<end>"])}
START_TOKEN, END_TOKEN = VOCABULARY["<start>"], VOCABULARY["<end>"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, case folded, punctuation dropped; CLIP's start/end frame, padded with the end token."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[.,!?;:]"), " ")])
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", START_TOKEN), ("<end>", END_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<end>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
    )


def build_encoder() -> CLIPTextModelWithProjection:
    """A randomly initialised text encoder (0.4 M parameters)."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=START_TOKEN,
            eos_token_id=END_TOKEN,
            pad_token_id=END_TOKEN,
        )
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Token ids of shape (texts, 16)."""
    return tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")["input_ids"]


@torch.no_grad()
def embed(
    encoder: CLIPTextModelWithProjection, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (texts, 16, 128) after the final norm, and pooled projected embeddings (texts, 128)."""
    outputs = encoder(input_ids=token_ids(tokenizer, texts))
    return outputs.last_hidden_state, outputs.text_embeds


def _targets(captions: list[str]) -> dict[str, torch.Tensor]:
    """Class indices (captions,) per attribute."""
    stated = [world.stated_classes(world.parse_caption(caption)) for caption in captions]
    return {name: torch.tensor([classes[name] for classes in stated]) for name in world.CLASSES}


_CLASSES = {name: len(classes) for name, classes in world.CLASSES.items()}
_READ_AT = {-2: ("first_colour", "first_shape"), -1: ("second_colour", "second_shape")}


def train_reader(steps: int, seed: int, save: Path) -> float:
    """Train the encoder to read, save it in transformers' folder form, and return its reading accuracy in [0, 1]."""
    torch.manual_seed(seed)
    tokenizer, encoder = build_tokenizer(), build_encoder().train()
    pooled_heads = nn.ModuleDict({name: nn.Linear(WIDTH, count) for name, count in _CLASSES.items()})
    state_heads = nn.ModuleDict({f"{name}": nn.Linear(WIDTH, _CLASSES[name]) for names in _READ_AT.values() for name in names})
    captions = world.single_captions() * 8 + world.pair_captions()
    ids, targets = token_ids(tokenizer, captions), _targets(captions)
    parameters = [*encoder.parameters(), *pooled_heads.parameters(), *state_heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for _ in trange(steps, desc="text encoder"):
        rows = torch.randint(len(captions), (128,))
        outputs = encoder(input_ids=ids[rows])
        logits = [(pooled_heads[name](outputs.text_embeds), name) for name in _CLASSES]
        logits += [
            (state_heads[name](outputs.last_hidden_state[:, at]), name) for at, names in _READ_AT.items() for name in names
        ]
        loss = sum(nn.functional.cross_entropy(values, targets[name][rows]) for values, name in logits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    encoder.eval()
    with torch.no_grad():
        pooled = encoder(input_ids=ids).text_embeds
        right = torch.stack([pooled_heads[name](pooled).argmax(-1) == targets[name] for name in _CLASSES]).all(0)
    encoder.half().save_pretrained(save / "text_encoder")
    tokenizer.save_pretrained(save / "tokenizer")
    return right.float().mean().item()
