"""What two ranks compute, for test_two_ranks.py: ``torch.distributed.run two_ranks.py OUT`` writes it to files."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from training_jobs import job

from mixgrpo.backend.files import save_tensors, sha256_of
from mixgrpo.backend.specs import TrainSpec
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.ranks import RankError, Ranks, full
from mixgrpo.backend.train.run_folder import Checkpoint, RunFolder
from mixgrpo.backend.train.trainer import Trainer
from mixgrpo.backend.train.worker import train

_TWO_GROUPS = {"group_size": 4, "prompts_per_iteration": 2, "optimizer": {"updates_per_rollout": 2}}
CASES: dict[str, dict[str, Any]] = {
    "float32": _TWO_GROUPS,
    "float32, own noise, a window inside": _TWO_GROUPS | {"sampling": {"shared_noise": False, "window": {"start": 1}}},
    "float64": _TWO_GROUPS | {"model": {"precision": "float64"}},
    # an odd rank shards unevenly; 2 rows per call make several forward passes before one backward pass
    "float64, guidance, odd rank, small calls": _TWO_GROUPS
    | {"model": {"precision": "float64"}, "sampling": {"guidance": 2.0}, "lora": {"rank": 3, "targets": "attention+mlp"}}
    | {"rows_per_call": 2},
}
CASES["float64, all of the objective"] = {
    "model": {"precision": "float64"},
    "sampling": {"steps": 6, "window": {"start": 1, "size": 3}},
    "group_size": 6,
    "prompts_per_iteration": 4,
    "optimizer": {"updates_per_rollout": 2, "clip_range_high": 3e-4},
    "advantage": {"std": "global", "trim": 0.2, "best_and_worst": 4},
    "objective": {"kl": {"weight": 0.5, "space": "mean"}, "step_weights": "inverse_dt", "trained_steps": 2},
}
CASES["float64, GDPO"] = {
    "model": {"precision": "float64"},
    "group_size": 4,
    "prompts_per_iteration": 4,
    "rewards": [{"scorer": "jpeg_compressibility"}, {"scorer": "scene_accuracy", "options": {"partial": True}}],
    "advantage": {"mixing": "gdpo", "best_and_worst": 2},
    "objective": {"kl": {"weight": 0.1}},
}
STRAIGHT: dict[str, Any] = _TWO_GROUPS | {"iterations": 2, "seed": 5}


def trained_before(spec: TrainSpec) -> Checkpoint:
    """A checkpoint whose B matrices are not zero, so that the gradient reaches the A matrices too."""
    alone = Trainer(spec, Ranks(0, 1, torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: value + 0.02 * torch.randn(value.shape, generator=generator).to(value)
        for name, value in sorted(adapter.adapter_tensors(alone.model.transformer).items())
    }
    return Checkpoint(2, tensors, {}, {})


def with_failures(trainer: Trainer) -> Trainer:
    """Its rewards fail for the third group of an iteration and for some of others: not for the same number on two ranks."""
    score = trainer._score

    def failing(pictures: torch.Tensor, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = score(pictures, prompts)
        for values in scores.values():
            for place, members in {2: slice(None), 3: slice(1, 3), 0: slice(2, 3)}.items():
                if trainer.share.start <= place < trainer.share.stop:
                    values[place - trainer.share.start, members] = math.nan
        return scores

    trainer._score = failing
    return trainer


def first_gradient(spec: TrainSpec, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The adapter's whole gradient before the first update of a continued run, and this rank's model rows until then."""
    trainer = Trainer(spec, ranks, trained_before(spec))
    batch = (with_failures(trainer) if spec.prompts_per_iteration == 4 else trainer).collect()
    trainer.accumulate(batch, trainer.members(batch, 0))
    return {name: full(parameter.grad).clone() for name, parameter in trainer.parameters.items()}, trainer.counter.take()


def main(out: Path) -> None:
    ranks = Ranks.join()
    rows = []
    for number, changes in enumerate(CASES.values()):
        gradient, counted = first_gradient(job(**changes), ranks)
        rows.append(counted)
        if ranks.first:
            save_tensors(out / f"gradient_{number}.safetensors", gradient)

    trainer, hashes, shards = Trainer(job(**STRAIGHT), ranks), [], []
    batch = trainer.collect()
    for number in range(2):
        trainer.update(batch, number)
        hashes.append(adapter.adapter_hash(adapter.adapter_tensors(trainer.model.transformer)))
        shards.append([list(parameter.to_local().shape) for parameter in trainer.parameters.values()])

    train(out / "straight", job(**STRAIGHT))
    train(out / "stopped", job(**STRAIGHT | {"iterations": 1}))
    train(out / "stopped", job(**STRAIGHT))
    lora = RunFolder(out / "straight").lora_file("mixgrpo", 2)
    started = job(**STRAIGHT | {"seed": 6, "iterations": 1, "lora": {"start_from": sha256_of(lora)}})
    if ranks.first:
        RunFolder(out / "started").put_start(lora, started.lora.start_from)
    train(out / "started", started)
    begun = Trainer(started, ranks, start=lora).checkpoint().adapter
    refusal = ""
    try:
        train(out / "refused", job(prompts_per_iteration=3))
    except RankError as error:
        refusal = str(error)
    facts = {"hashes": hashes, "shards": shards, "refusal": refusal, "threads": torch.get_num_threads()}
    facts["rows"] = rows
    facts["begun"] = adapter.adapter_hash(begun)
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    Ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
