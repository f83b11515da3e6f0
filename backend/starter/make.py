"""Making the starter model from nothing: ``python -m mixgrpo.backend.starter.make FOLDER``.

Stages run in order and each continues where it stopped; on two CPU cores all of it takes a few hours. The denoiser and
the VAE only share the latent code, so ``--only`` lets them train at the same time.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from ..files import load_json, load_tensors, save_json, save_tensors
from ..models.weights import write_manifest
from . import denoiser, judge, latents, text, vae
from .evaluate import evaluate
from .load import TRANSFORMER_FILE, VAE_FILE, WEIGHTS

STAGES = ("text", "code", "judge", "vae", "denoiser", "publish", "evaluate")
_DENOISER_STEPS, _VAE_STEPS, _TEXT_STEPS, _JUDGE_STEPS = 6_000, 4_400, 1_500, 2_000


def make(folder: Path, only: str | None, seed: int, denoiser_steps: int) -> None:
    """Run all stages, or one."""
    for stage in STAGES:
        if only in (None, stage):
            print(f"— {stage}", flush=True)
            _run(stage, folder, seed, denoiser_steps)


def _run(stage: str, folder: Path, seed: int, denoiser_steps: int) -> None:
    if stage == "text" and not (folder / "text_encoder" / "model.safetensors").exists():
        print(f"reads {text.train_reader(_TEXT_STEPS, seed, folder):.1%} of all captions")
    elif stage == "code" and not (folder / "latent_code.safetensors").exists():
        latents.fit_code(3000, seed).save(folder / "latent_code.safetensors")
    elif stage == "judge" and not (folder / "judge.safetensors").exists():
        print(f"judges {judge.train_judge(folder, seed, _JUDGE_STEPS):.1%} of true pictures right")
    elif stage == "vae":
        vae.train(folder, _VAE_STEPS, seed)
    elif stage == "denoiser":
        denoiser.train(folder, denoiser_steps, seed)
    elif stage == "publish":
        publish(folder, WEIGHTS, seed)
    elif stage == "evaluate":
        save_json(WEIGHTS / "evaluation.json", evaluate(pairs=400, singles=240, steps=10, shift=3.0))


def publish(folder: Path, weights: Path, seed: int) -> None:
    """Write the trained parts, in float16, as the files that diffusers and ComfyUI read."""
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(folder / part, weights / part, dirs_exist_ok=True)
    shutil.copyfile(folder / "judge.safetensors", weights / "judge.safetensors")
    denoiser_step, averaged = _averaged(folder / "denoiser")
    save_tensors(weights / "transformer" / TRANSFORMER_FILE.name, averaged, {"format": "pt"})
    denoiser.build_transformer().save_config(weights / "transformer")
    vae_step, averaged = _averaged(folder / "vae_training")
    save_tensors(weights / "vae" / VAE_FILE.name, vae.to_taesd(averaged))  # its scale and shift stay float32
    save_json(weights / "made_by.json", {"seed": seed, "denoiser_steps": denoiser_step, "vae_steps": vae_step})
    write_manifest(weights)


def _averaged(stage: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Steps and averaged weights, in float16, of a stage's newest checkpoint."""
    step = load_json(stage / "progress.json")["step"]
    return step, _half(load_tensors(stage / f"ema_{step:07d}.safetensors"))


def _half(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.half() if value.is_floating_point() else value for name, value in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the starter model: data, text encoder, VAE, denoiser, judge.")
    parser.add_argument("folder", type=Path, help="working folder; keeps checkpoints")
    parser.add_argument("--only", choices=STAGES, help="run one stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--denoiser-steps", type=int, default=_DENOISER_STEPS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make(arguments.folder, arguments.only, arguments.seed, arguments.denoiser_steps)


if __name__ == "__main__":
    main()
