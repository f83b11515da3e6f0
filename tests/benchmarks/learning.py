"""What the same number of model rows teaches: MixGRPO, the full SDE it is measured against, and a control.

    python tests/benchmarks/learning.py --out FOLDER     # 3 arms x 3 seeds; runs that are in FOLDER already are not repeated
    python tests/benchmarks/learning.py --quick          # 1 seed, a few iterations: does it run and count right?

The arms are the presets ``mixgrpo`` (a window of 4 of 25 steps) and ``full-sde`` (24 stochastic steps, 14 of them trained), and
``permuted``: mixgrpo whose advantages are shuffled within every group, which leaves everything but what they say. All else is the
same: the starter model, its captions, 4 prompts x 12 pictures an iteration, and a budget of weighted rows (forward 1, trained 3)
as counted by the trainer's forward hook. Judged by scene accuracy on held-out captions and seeds, drawn by the plain ODE.
The last line is one JSON object; FOLDER/learning.json keeps the curves.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from mixgrpo.backend.demo import demo_job, held_out_pairs
from mixgrpo.backend.files import load_json, save_json
from mixgrpo.backend.flow.advantages import Advantages
from mixgrpo.backend.flow.noise import derive_seed
from mixgrpo.backend.rewards import make_scorer
from mixgrpo.backend.specs import TrainSpec
from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.specs.presets import PRESETS, merged
from mixgrpo.backend.train.evaluate import draw
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.trainer import Trainer

ARMS = {"mixgrpo": "mixgrpo", "full_sde": "full-sde", "permuted": "mixgrpo"}
BUDGET = 80_000
WEIGHTS = {"training": 3}
"""What a row counts for by phase; any other phase's counts 1."""


def job(arm: str, seed: int, iterations: int) -> TrainSpec:
    """The preset of an arm with what suits the starter; the window goes as far as in the 300 iterations of the paper."""
    demo = demo_job(1, seed)
    fields = {
        "prompts": list(demo.prompts),
        "rewards": [reward.model_dump() for reward in demo.rewards],
        "monitors": [monitor.model_dump() for monitor in demo.monitors],
        "sampling": {"guidance": demo.sampling.guidance},
        "lora": demo.lora.model_dump(exclude_none=True),
        "optimizer": {"learning_rate": 5e-4, "clip_range": 1e-3, "updates_per_rollout": 2},
        "prompts_per_iteration": 4,
        "seed": seed,
        "iterations": iterations,
    }
    if arm != "full_sde":
        fields["sampling"] |= {"window": {"every": max(1, round(25 * iterations / 300))}}
    return parse_job(merged(PRESETS[ARMS[arm]].fields, fields))


class Permuted:
    """An objective whose advantages are shuffled within every group, by seed and call."""

    def __init__(self, trainer: Trainer):
        self._advantages, self._seed, self._calls = trainer.objective.advantages, trainer.spec.seed, 0

    def __call__(self, scores: dict[str, torch.Tensor]) -> Advantages:
        plain, self._calls = self._advantages(scores), self._calls + 1
        values = plain.values.clone()
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "permuted", self._calls))
        for group in values:
            group.copy_(group[torch.randperm(len(group), generator=generator)])
        return replace(plain, values=values)


def held_out_accuracy(trainer: Trainer, pairs: int) -> torch.Tensor:
    """1 or 0 for every held-out (caption, seed) pair, as the demo draws them."""
    captions, seeds = held_out_pairs(pairs)
    one = trainer.model
    sampling = demo_job(1, 0).sampling
    with trainer.counter.phase("measuring"):
        pictures = draw(one, captions, seeds, sampling)
    trainer.counter.rows.pop("measuring", None)
    return make_scorer("scene_accuracy").score(pictures, captions)


def run(arm: str, seed: int, budget: int, pairs: int) -> dict[str, Any]:
    """Train one arm until its budget is spent; returns its curve and the held-out pairs before and after."""
    started, spec = time.monotonic(), job(arm, seed, _expected_iterations(arm, budget))
    trainer = Trainer(spec, Ranks.join())
    trainer.model.text_encoder = _text_encoder()
    if arm == "permuted":
        trainer.objective.advantages = Permuted(trainer)
    before = held_out_accuracy(trainer, pairs)
    spent, curve, marks = 0, [], [budget / 3, 2 * budget / 3]
    while spent < budget:
        numbers = trainer.train_iteration()
        cost = sum(count * WEIGHTS.get(phase, 1) for phase, count in numbers["rows"].items())
        spent += cost
        point = {"iteration": numbers["iteration"], "rows": spent, "window": numbers["window"][0]}
        point |= {name: score["mean"] for name, score in numbers["scores"].items()}
        if marks and spent >= marks[0]:
            marks.pop(0)
            point["held_out"] = held_out_accuracy(trainer, pairs // 4).mean().item()
        curve.append(point)
        print(f"{arm} {seed}  {spent}/{budget} rows  scene accuracy {point['scene_accuracy']:.3f}", flush=True)
    after = held_out_accuracy(trainer, pairs)
    seconds = round(time.monotonic() - started, 1)
    return {
        "arm": arm, "seed": seed, "rows": spent, "iterations": len(curve), "seconds": seconds, "curve": curve,
        "before": before.tolist(), "after": after.tolist(),
    }  # fmt: skip


def _expected_iterations(arm: str, budget: int) -> int:
    """Weighted rows of an iteration by the closed form, at mid-run: 4 prompts, guidance doubles, the first step is shared."""
    trained, shared = (14, 1) if arm == "full_sde" else (4, 6)
    rollout = shared + 12 * (25 - shared)
    training = 3 * (12 * (trained - 1) + 2)
    return max(1, round(budget / (2 * 4 * (rollout + training))))


def _text_encoder() -> Any:
    """The trainer drops its text encoder once the job's prompts are embedded; held-out captions need it again."""
    from mixgrpo.backend.starter.load import load_starter

    return load_starter().text_encoder


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Gains in points of held-out scene accuracy by arm, and the claims."""
    gains = {arm: [100 * (mean(one["after"]) - mean(one["before"])) for one in runs if one["arm"] == arm] for arm in ARMS}
    arms = {
        arm: {
            "gain": round(mean(values), 2),
            "gains": [round(value, 2) for value in values],
            "iterations": [one["iterations"] for one in runs if one["arm"] == arm],
            "seconds": [one["seconds"] for one in runs if one["arm"] == arm],
        }
        for arm, values in gains.items()
    }
    difference = [mix - full for mix, full in zip(gains["mixgrpo"], gains["full_sde"], strict=True)]
    return {
        **arms,
        "mix_minus_full": round(mean(difference), 2),
        "mix_minus_full_std": round(stdev(difference), 2) if len(difference) > 1 else None,
        "mix_not_worse_by_3": mean(difference) > -3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="Folder that keeps every run (default: a temporary one).")
    parser.add_argument("--budget", type=int, default=BUDGET, help="Weighted model rows of a run.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=400, help="Held-out pictures.")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.budget, given.seeds, given.pairs = 3_000, 1, 24
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        out, runs = given.out or Path(temporary), []
        out.mkdir(parents=True, exist_ok=True)
        for seed in range(given.seeds):
            for arm in ARMS:
                kept = out / f"{arm}_{seed}_{given.budget}.json"
                if not kept.exists():
                    save_json(kept, run(arm, seed, given.budget, given.pairs))
                runs.append(load_json(kept))
        result = summary(runs)
        curves = [{name: one[name] for name in ("arm", "seed", "rows", "iterations", "curve")} for one in runs]
        save_json(out / "learning.json", {"summary": result, "curves": curves})
    print(f"{'arm':<10}{'gain':>8}   by seed            iterations")
    for arm in ARMS:
        print(f"{arm:<10}{result[arm]['gain']:>8.1f}   {result[arm]['gains']!s:<18} {result[arm]['iterations']}")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
