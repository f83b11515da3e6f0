"""How well the starter draws what its captions say, by guidance: ``python -m mixgrpo.backend.starter.evaluate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..files import save_json
from ..rewards import make_scorer
from ..specs.job import parse_sampling
from ..train.evaluate import draw
from . import world
from .load import WEIGHTS, load_starter

GUIDANCES = (1.0, 2.0, 3.0, 4.0)
_FIRST_SEED = 500_000


def evaluate(pairs: int, singles: int, steps: int, shift: float, guidances: tuple[float, ...] = GUIDANCES) -> dict[str, Any]:
    """Scene accuracy and held-out judge on random captions, for every guidance; the best is best on two shapes."""
    model = load_starter()
    order = torch.randperm(len(world.pair_captions()), generator=torch.Generator().manual_seed(1)).tolist()
    pair_texts = [world.pair_captions()[order[index % len(order)]] for index in range(pairs)]
    single_texts = [world.single_captions()[index % 24] for index in range(singles)]
    texts, seeds = pair_texts + single_texts, [_FIRST_SEED + index for index in range(pairs + singles)]
    accuracy, judge = make_scorer("scene_accuracy"), make_scorer("held_out_judge")
    rows = {}
    for guidance in guidances:
        sampling = parse_sampling({"steps": steps, "shift": shift, "guidance": guidance, "window": {"size": 1}})
        pictures = draw(model, texts, seeds, sampling)
        right, judged = accuracy.score(pictures, texts), judge.score(pictures, texts)
        rows[f"{guidance:g}"] = {
            "pairs": right[:pairs].mean().item(),
            "singles": right[pairs:].mean().item(),
            "judge_pairs": judged[:pairs].mean().item(),
            "judge_singles": judged[pairs:].mean().item(),
        }
        print(
            f"guidance {guidance:g}: " + "  ".join(f"{name} {value:.3f}" for name, value in rows[f"{guidance:g}"].items()),
            flush=True,
        )
    best = max(rows, key=lambda guidance: rows[guidance]["pairs"])
    return {
        "steps": steps,
        "shift": shift,
        "count": {"pairs": pairs, "singles": singles},
        "by_guidance": rows,
        "best": float(best),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Scene accuracy of the starter model at several guidances.")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--singles", type=int, default=240)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=WEIGHTS / "evaluation.json")
    arguments = parser.parse_args()
    save_json(arguments.out, evaluate(arguments.pairs, arguments.singles, arguments.steps, arguments.shift))


if __name__ == "__main__":
    main()
