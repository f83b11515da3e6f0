"""What four ranks compute, for test_four_ranks.py: ``torch.distributed.run four_ranks.py OUT`` writes it to files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from training_jobs import job
from two_ranks import first_gradient, trained_before

from mixgrpo.backend.files import save_tensors
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.ranks import RankError, Ranks
from mixgrpo.backend.train.trainer import Trainer

_SPLIT = {"group_size": 8, "prompts_per_iteration": 2, "optimizer": {"updates_per_rollout": 2}}
_DOUBLE = {"model": {"precision": "float64"}}
CASES: dict[str, dict[str, Any]] = {
    "whole groups": _DOUBLE | {"prompts_per_iteration": 4, "sampling": {"guidance": 2.0}},
    "two groups over four ranks, the best and worst": _SPLIT | _DOUBLE | {"advantage": {"best_and_worst": 4}},
    "one group over four ranks, own noise": _DOUBLE
    | {"group_size": 8, "sampling": {"shared_noise": False, "window": {"start": 1}}},
    "bfloat16": {"model": {"precision": "bfloat16"}, "prompts_per_iteration": 4},
    "offloaded, checkpointed, averaged": _SPLIT
    | _DOUBLE
    | {"offload": True, "gradient_checkpointing": True, "ema": {"every": 1}},
}
MISFITS: dict[str, dict[str, Any]] = {
    "4 ranks and 1 prompts per iteration split every group over 4 ranks, but 6 members of a group cannot": {"group_size": 6},
    "but 2 members of a group in one update cannot be shared equally": {
        "group_size": 8,
        "optimizer": {"updates_per_rollout": 4},
    },
    "3 prompts per iteration cannot be shared equally by 4 ranks": {"prompts_per_iteration": 3},
}


def main(out: Path) -> None:
    ranks = Ranks.join()
    facts: dict[str, Any] = {"rows": [], "shards": [], "refused": []}
    for number, changes in enumerate(CASES.values()):
        gradient, rows = first_gradient(job(**changes), ranks)
        facts["rows"].append(rows)
        if ranks.first:
            save_tensors(out / f"gradient_{number}.safetensors", gradient)
    trainer = Trainer(job(**list(CASES.values())[-1]), ranks, trained_before(job(**list(CASES.values())[-1])))
    iteration = trainer.train_iteration()
    facts["iteration"] = {name: iteration[name] for name in ("scores", "rows", "adapter_hash")}
    saved = trainer.checkpoint()
    resumed = Trainer(trainer.spec, ranks, saved).checkpoint()
    facts["resumed"] = adapter.adapter_hash(resumed.adapter)
    facts["averages"] = [adapter.adapter_hash(saved.ema), adapter.adapter_hash(resumed.ema)]
    if ranks.first:
        save_tensors(out / "ema.safetensors", saved.ema)
    facts["mesh"] = list(next(iter(trainer.parameters.values())).device_mesh.mesh.shape)
    for changes in MISFITS.values():
        try:
            Trainer(job(**changes), ranks)
        except RankError as error:
            facts["refused"].append(str(error))
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    Ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
