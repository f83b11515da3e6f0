"""What an iteration costs next to the full SDE, in model rows and in time.

    python tests/benchmarks/iteration.py            # 2 alternations on a random SD3 of 8 layers x 512, 256 image tokens
    python tests/benchmarks/iteration.py --quick    # 1 alternation, a smaller model: does it run and count right?

The presets ``mixgrpo``, ``mixgrpo-flash`` and ``mixgrpo-flash-star`` against ``full-sde`` with nothing shared: one prompt,
a group of 12, 25 steps, windows of 4. Rows are counted by a forward hook: forward 1, trained 3, guidance doubles both,
the base of a KL adds 1; every window position is run once and compared with the closed form. Time is that of whole iterations
without decoding and scoring, the arms taking turns, the moving windows at the positions 0, 10 and 20, whose mean is that of all
positions where cost falls evenly. ``other_share`` is what is neither model (forward and backward), decoding nor scoring. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
from random_models import random_sd3_transformer

from mixgrpo.backend.models.base import take
from mixgrpo.backend.models.sd3 import SD3
from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.specs.presets import PRESETS, merged
from mixgrpo.backend.starter.load import load_starter
from mixgrpo.backend.train import trainer as trainer_module
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.trainer import Trainer

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
STEPS, GROUP, WINDOW, UPDATES, TRAINED = 25, 12, 4, 4, 14
POSITIONS = range(STEPS - WINDOW)
RATIOS = {"mixgrpo": 1.0, "mixgrpo_flash": 0.4, "mixgrpo_flash_star": 0.2}
LIMITS = {"rows": (0.39, 0.30, 0.28), "time": (0.45, 0.35, 0.33)}


def positions(arm: str) -> list[int]:
    """Where the window of an arm goes; Flash* stays."""
    return [0] if arm in ("mixgrpo_flash_star", "full_sde") else list(POSITIONS)


def closed_form(arm: str, start: int, guidance: bool = False, kl: bool = False) -> int:
    """Weighted rows of an iteration of one prompt."""
    if arm == "full_sde":
        rollout, trained = GROUP * STEPS, GROUP * TRAINED
    else:
        after = math.ceil((STEPS - start - WINDOW) * RATIOS[arm])
        rollout = start + 1 + GROUP * (WINDOW - 1 + after)
        trained = UPDATES * (1 + GROUP // UPDATES * (WINDOW - 1))
    return (rollout + 3 * trained + (trained if kl else 0)) * (2 if guidance else 1)


def random_sd3(layers: int, side: int) -> SD3:
    """An SD3 transformer of that many layers and 64 times the width on side x side tokens; the rest is the starter's."""
    starter = load_starter()
    told = starter.text_encoder.config
    transformer = random_sd3_transformer(layers, side, told.hidden_size, told.projection_dim)
    transformer.eval().requires_grad_(False)
    return SD3(transformer, starter.text_encoder, starter.tokenizer, starter.vae, starter.max_tokens)


def make_trainer(arm: str, layers: int, side: int, **changes: Any) -> Trainer:
    """A trainer of the arm's preset on the random model, whose iteration i has the window at the i-th of its positions."""
    starts = {"policy": "list", "starts": positions(arm)} if arm != "full_sde" else {}
    fields = {
        "prompts": ["a red circle on a white background"],
        "rewards": [{"scorer": "jpeg_compressibility"}],
        "prompts_per_iteration": 1,
        "sampling": {"width": 16 * side, "height": 16 * side, "shared_noise": arm != "full_sde", "window": starts},
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"learning_rate": 1e-5},
    }
    preset = PRESETS[arm.replace("_", "-")].fields
    spec = parse_job(merged(merged(preset, fields), changes))
    with mock.patch.object(trainer_module, "load_model", lambda *_: random_sd3(layers, side)):
        one = Trainer(spec, Ranks.join())
    one.gate = {"mean_gap": 0.0}  # the check of a process's first iteration is no cost of an iteration
    return one


def weighted(rows: dict[str, int]) -> int:
    """Rows by phase; trained ones count 3."""
    return sum(count * (3 if phase == "training" else 1) for phase, count in rows.items())


def count_rows(layers: int, side: int, every: int) -> dict[str, float]:
    """Mean over ``every``-th positions of an iteration's rows relative to the full SDE's; all must be the closed form's."""
    shares = {}
    for options in ({}, {"guidance": True}, {"kl": True}, {"guidance": True, "kl": True}):
        changes: dict[str, Any] = {"sampling": {"guidance": 2.0}} if options.get("guidance") else {}
        if options.get("kl"):
            changes["objective"] = {"kl": {"weight": 0.1}}
        for arm in ("full_sde", *RATIOS):
            one, counted = make_trainer(arm, layers, side, **changes), []
            for start in positions(arm)[:: 10 if options else every]:
                one.iteration = positions(arm).index(start)
                counted.append(weighted(one.train_iteration()["rows"]))
                expected = closed_form(arm, start, **options)
                if counted[-1] != expected:
                    raise SystemExit(f"{arm} with {options} at {start}: {counted[-1]} rows, the closed form says {expected}")
            if not options:
                shares[arm] = mean(counted)
    return {arm: round(shares[arm] / shares["full_sde"], 4) for arm in RATIOS}


class Stopwatch:
    """Seconds in the model, forward and backward, and in decoding and scoring."""

    def __init__(self, one: Trainer, clock: Callable[[], float]):
        self.clock, self.model, self.decode, self.score = clock, 0.0, 0.0, 0.0
        one.model.decode = self._timed(one.model.decode, "decode")
        one._score = self._timed(one._score, "score")
        one.model.transformer.register_forward_pre_hook(self._before)
        one.model.transformer.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._began = self.clock()

    def _after(self, *_: Any) -> None:
        self.model += self.clock() - self._began

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            result = function(*args, **kwargs)
            setattr(self, part, getattr(self, part) + self.clock() - began)
            return result

        return timed

    def of_an_iteration(self, one: Trainer) -> float:
        """Run one; returns its seconds, all in all."""
        self.model = self.decode = self.score = 0.0
        backward = self._timed(torch.Tensor.backward, "model")
        began = self.clock()
        with mock.patch.object(torch.Tensor, "backward", backward):
            one.train_iteration()
        return self.clock() - began


def time_iterations(layers: int, side: int, alternations: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of iterations without decoding and scoring, and ratios within each alternation."""
    arms = ("full_sde", *RATIOS)
    trainers = {arm: make_trainer(arm, layers, side) for arm in arms}
    watches = {arm: Stopwatch(one, clock) for arm, one in trainers.items()}
    with torch.no_grad():  # the first call of a model allocates
        for one in trainers.values():
            told = take(one.conditions, torch.zeros(GROUP).long())
            one.model.velocity(torch.zeros(GROUP, *one.latent_shape), torch.tensor(1.0), told)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    decode, other = [], []
    for turn in range(alternations):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            one, watch, spent = trainers[arm], watches[arm], []
            for place in range(0, len(positions(arm)), 10):
                one.iteration = place
                whole = watch.of_an_iteration(one)
                spent.append(whole - watch.decode - watch.score)
                decode.append(watch.decode)
                other.append((spent[-1] - watch.model) / whole)
                print(f"{arm:<20} window at {one.iteration - 1:>2}  {whole:8.1f} s", flush=True)
            seconds[arm].append(mean(spent))
    ratios = {arm: [a / b for a, b in zip(seconds[arm], seconds["full_sde"], strict=True)] for arm in RATIOS}
    return {
        "time": {arm: round(median(values), 4) for arm, values in ratios.items()},
        "other_share": round(median(other), 4),
        "seconds": {arm: round(median(values), 2) for arm, values in seconds.items()},
        "decode_seconds": round(median(decode), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--alternations", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = count_rows(1, 2, 10 if given.quick else 1)
    layers, side, alternations = (2, 4, 1) if given.quick else (8, 16, given.alternations)
    timed = time_iterations(layers, side, alternations, CLOCKS[given.clock])
    print(f"{platform.machine()}, torch {torch.__version__}, {given.threads} threads, {given.clock} clock")
    print(f"SD3, {layers} layers x {64 * layers}, {side * side} image tokens, {alternations} alternations")
    print(f"{'':<20}{'rows':>8}{'at most':>9}{'time':>8}{'at most':>9}{'seconds':>9}")
    for place, arm in enumerate(RATIOS):
        limits = [LIMITS[kind][place] for kind in ("rows", "time")]
        print(f"{arm:<20}{rows[arm]:>8.3f}{limits[0]:>9}{timed['time'][arm]:>8.3f}{limits[1]:>9}{timed['seconds'][arm]:>9}")
    print(f"{'full_sde':<20}{1:>8}{'':>9}{1:>8}{'':>9}{timed['seconds']['full_sde']:>9}")
    print(json.dumps({"rows": rows, **timed}), flush=True)


if __name__ == "__main__":
    main()
