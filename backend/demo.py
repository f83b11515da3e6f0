"""``mixgrpo demo``: train the starter for a few minutes, measure it on captions and seeds it was never trained on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .console import console, progress_bar
from .files import save_json
from .models.lora_export import load_lora
from .models.sd3 import SD3
from .pictures import contact_sheet, save_picture
from .plot import training_chart
from .rewards import make_scorer
from .specs import SamplingSpec, TrainSpec
from .specs.job import mixed_reward, parse_job
from .starter import world
from .starter.load import load_starter
from .train.adapter import put_lora
from .train.evaluate import draw
from .train.launch import run_job
from .train.run_folder import RunFolder

GUIDANCE = 2.0  # the base model's best among 1, 2, 3, 4; see backend/starter/README.md
ITERATIONS = 60
_FIRST_SEED = 1_000_000


def demo_job(iterations: int, seed: int) -> TrainSpec:
    """The job of the demo: scene accuracy on all captions that are not held out; the second judge only watches."""
    captions = [caption for caption in world.pair_captions() if not world.is_held_out(caption)]
    captions += world.single_captions() * 3  # now and then a single shape, so that what is right stays right
    return parse_job(
        {
            "name": "demo",
            "prompts": captions,
            "sampling": {"steps": 10, "shift": 3.0, "guidance": GUIDANCE, "eta": 1.2, "window": {"start": 2, "size": 4}},
            "group_size": 12,
            "prompts_per_iteration": 8,
            "rewards": [{"scorer": "scene_accuracy", "options": {"partial": True}}],
            "monitors": [{"scorer": "held_out_judge"}],
            "lora": {"rank": 16, "alpha": 32, "targets": "attention+mlp"},
            "optimizer": {"learning_rate": 1e-3, "updates_per_rollout": 2, "clip_range": 1e-3},
            "seed": seed,
            "iterations": iterations,
            "checkpoint_every": 10,
        }
    )


def run_demo(out: Path, iterations: int | None, pairs: int, seed: int) -> dict[str, Any]:
    """Measure, train, measure again; returns what ``summary.json`` holds."""
    started = time.monotonic()
    spec = demo_job(iterations or ITERATIONS, seed)
    captions, seeds = held_out_pairs(pairs)
    single_captions = world.single_captions() * max(1, pairs // 40)
    everything = captions + single_captions
    all_seeds = [*seeds, *range(_FIRST_SEED + pairs, _FIRST_SEED + len(everything))]

    before = _draw(load_starter(), everything, all_seeds, spec.sampling, "before")
    lora = run_job(spec, out)
    after = _draw(load_with_lora(lora), everything, all_seeds, spec.sampling, "after")

    numbers = compare(before, after, everything, pairs)
    events = RunFolder(out).iterations()
    shown = out / lora.name
    shutil.copyfile(lora, shown)
    save_picture(out / "before_after.png", _grid(before, after, captions))
    save_picture(out / "curves.png", _curves(spec, events))
    summary = {
        "held_out": numbers,
        "seconds": round(time.monotonic() - started, 1),
        "replay_max": max(gap for event in events for gap in (*event["replay"].values(), *event.get("replay_gate", {}).values())),
        "guidance": spec.sampling.guidance,
        "iterations": spec.iterations,
        "lora": str(shown.absolute()),
    }
    save_json(out / "summary.json", summary)
    _tell(summary, out)
    return summary


def held_out_pairs(count: int) -> tuple[list[str], list[int]]:
    """(caption, seed) pairs of two-shape captions that the demo never trains on; every pair has a seed of its own."""
    captions = [caption for caption in world.pair_captions() if world.is_held_out(caption)]
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [captions[order[index % len(order)]] for index in range(count)]
    return chosen, [_FIRST_SEED + index for index in range(count)]


def load_with_lora(path: Path | None) -> SD3:
    """The starter with a LoRA of this project, or without one."""
    model = load_starter()
    if path is not None:
        put_lora(model.transformer, load_lora(path, model.transformer))
    return model


def compare(before: torch.Tensor, after: torch.Tensor, captions: Sequence[str], pairs: int) -> dict[str, Any]:
    """Scene accuracy and the held-out judge before and after, on the first ``pairs`` pictures; singles are the rest."""
    scorer, judge = make_scorer("scene_accuracy"), make_scorer("held_out_judge")
    right_before, right_after = scorer.score(before, captions), scorer.score(after, captions)
    judged_before, judged_after = (judge.score(pictures[:pairs], captions[:pairs]).mean().item() for pictures in (before, after))
    gain = (right_after - right_before)[:pairs].double()
    half = 1.96 * gain.std().item() / pairs**0.5
    difference = gain.mean().item()
    return {
        "before": right_before[:pairs].mean().item(),
        "after": right_after[:pairs].mean().item(),
        "difference": difference,
        "ci95": [difference - half, difference + half],
        "judge_before": judged_before,
        "judge_after": judged_after,
        "single_before": right_before[pairs:].mean().item(),
        "single_after": right_after[pairs:].mean().item(),
        "pairs": pairs,
        "singles": len(captions) - pairs,
    }


def sample_sheet(out: Path, prompts: list[str], lora: Path | None, count: int, seed: int, sampling: SamplingSpec) -> None:
    """Draw ``count`` pictures of every prompt and save them as one sheet, a row a prompt."""
    model = load_with_lora(lora)
    texts = [prompt for prompt in prompts for _ in range(count)]
    seeds = [seed + index for _ in prompts for index in range(count)]
    pictures = _draw(model, texts, seeds, sampling, "drawing")
    save_picture(out, contact_sheet(pictures, count, [f"seed {number}" for number in seeds], prompts, cell=128))


def _draw(model: SD3, prompts: list[str], seeds: list[int], sampling: SamplingSpec, title: str) -> torch.Tensor:
    with progress_bar(title, len(prompts)) as update:
        return draw(model, prompts, seeds, sampling, on_batch=lambda done, _: update(done))


def _grid(before: torch.Tensor, after: torch.Tensor, captions: list[str], columns: int = 12) -> Any:
    """Two rows of pictures for the same captions and seeds; + and - say whether scene accuracy calls them right."""
    scorer = make_scorer("scene_accuracy")
    pictures = torch.cat([before[:columns], after[:columns], before[columns : 2 * columns], after[columns : 2 * columns]])
    texts = [*captions[:columns] * 2, *captions[columns : 2 * columns] * 2]
    labels = ["+ right" if right else "- wrong" for right in scorer.score(pictures, texts).tolist()]
    return contact_sheet(pictures, columns, labels, ["before", "after", "before", "after"])


def _curves(spec: TrainSpec, events: list[dict[str, Any]]) -> Any:
    """Reward and scores while exploring, and whether the updates were of a sensible size."""
    means = [{name: score["mean"] for name, score in event["scores"].items()} for event in events]
    weights = {reward.scorer: reward.weight for reward in spec.rewards}
    curve = {
        "iteration": [event["iteration"] for event in events],
        "reward": [mixed_reward(row, weights) for row in means],
        "scores": {name: [row[name] for row in means] for name in means[0]},
    }
    more = {
        "clipped share of ratios": {"clip fraction": [event["clip_fraction"] for event in events]},
        "gradient norm": {"before clipping": [event["gradient_norm"] for event in events]},
    }
    return training_chart(curve, more)


def _tell(summary: dict[str, Any], out: Path) -> None:
    held_out = summary["held_out"]
    low, high = held_out["ci95"]
    lines = [
        "",
        f"scene accuracy, two shapes   {held_out['before']:.1%} -> {held_out['after']:.1%}   "
        f"(difference {held_out['difference']:+.1%}, 95 % interval {low:+.1%} to {high:+.1%}, {held_out['pairs']} pairs)",
        f"scene accuracy, one shape    {held_out['single_before']:.1%} -> {held_out['single_after']:.1%}",
        f"held-out judge               {held_out['judge_before']:.3f} -> {held_out['judge_after']:.3f}   (never trained on)",
        f"replay gap, largest          {summary['replay_max']:.1e}   (rollout against training pass, before the first update)",
        f"time                         {summary['seconds'] / 60:.1f} min",
        "",
        f"LoRA      {summary['lora']}",
        f"pictures  {(out / 'before_after.png').absolute()}",
        f"curves    {(out / 'curves.png').absolute()}",
        f"summary   {(out / 'summary.json').absolute()}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
