"""What MixGRPO Sampler costs next to ComfyUI's euler, and what a shared beginning saves.

    python tests/benchmarks/sampler.py              # 15 alternations; the starter, and a random SD3 of 8 layers
    python tests/benchmarks/sampler.py --quick      # 1 alternation, smaller models: does it run and count right?

Three runs of 25 steps with 8 samples take turns: ComfyUI's euler; the sampler node with a window at step 12 and own noise, which
calls the model as often and with as many rows; the same with shared noise. Ratios are taken within each alternation, so that a
machine whose speed drifts shifts both sides; model rows are counted by a forward hook. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "comfyui"))

from comfyui_tree import comfyui_root, import_comfy  # noqa: E402 (found by the line above)

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
STEPS, GROUP, WINDOW = 25, 8, (12, 4)
SHARED_CALLS, FULL_CALLS = WINDOW[0] + 1, STEPS - WINDOW[0] - 1


@dataclass(frozen=True)
class Subject:
    """A MODEL with prompts, and an empty latent of one sample."""

    name: str
    model: Any
    positive: list
    negative: list
    latent: torch.Tensor


def starter() -> Subject:
    """The shipped starter, or the same with random weights where none is shipped."""
    import tempfile

    from starter_files import SHIPPED, STARTERS, write_random_starter

    from mixgrpo.nodes.starter import load_starter_objects

    folder = SHIPPED if "shipped" in STARTERS else write_random_starter(Path(tempfile.mkdtemp()))
    model, clip, _ = load_starter_objects(folder)
    texts = ("a red circle left of a blue square on a white background", "")
    positive, negative = (clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in texts)
    return Subject("starter", model, positive, negative, torch.zeros(1, 16, 8, 8))


def random_sd3(comfy: Any, layers: int, side: int) -> Subject:
    """An SD3 transformer of that many layers and 64 times the width, on a picture of side x side tokens."""
    from random_models import random_sd3_transformer

    transformer = random_sd3_transformer(layers, side)
    model = comfy.sd.load_diffusion_model_state_dict(transformer.state_dict())
    told = [[torch.randn(1, 16, 128), {"pooled_output": torch.randn(1, 64)}] for _ in range(2)]
    name = f"SD3, {layers} layers x {64 * layers}, {side * side} image tokens"
    return Subject(name, model, told[:1], told[1:], torch.zeros(1, 16, 2 * side, 2 * side))


class Calls:
    """The rows and seconds of every call of a MODEL's network."""

    def __init__(self, model: Any, clock: Callable[[], float]):
        network: nn.Module = model.model.diffusion_model
        self._clock = clock
        self.rows: list[int] = []
        self.seconds: list[float] = []
        network.register_forward_pre_hook(self._before)
        network.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple) -> None:
        self.rows.append(len(args[0]))
        self._began = self._clock()

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.seconds.append(self._clock() - self._began)

    def during(self, run: Callable[[], Any]) -> tuple[float, list[int], list[float]]:
        """(seconds of the whole run, rows by call, seconds by call)."""
        self.rows, self.seconds = [], []
        began = self._clock()
        run()
        return self._clock() - began, self.rows, self.seconds


def euler(comfy: Any, subject: Subject) -> None:
    """What KSampler does: euler, simple."""
    import latent_preview

    latent = subject.latent.repeat(GROUP, 1, 1, 1)
    comfy.sample.sample(
        subject.model, comfy.sample.prepare_noise(latent, 7), STEPS, 1.0, "euler", "simple", subject.positive, subject.negative,
        latent, callback=latent_preview.prepare_callback(subject.model, STEPS), disable_pbar=True, seed=7,
    )  # fmt: skip


def node(subject: Subject, shared: bool) -> None:
    """MixGRPO Sampler; one latent becomes a group."""
    from mixgrpo.nodes.sampler import FlowSampler

    FlowSampler.execute(
        subject.model, subject.positive, subject.negative, {"samples": subject.latent}, seed=7, steps=STEPS, schedule="shift",
        shift=3.0, cfg=1.0, group_size=GROUP, shared_noise=shared, eta=0.7, window_start=WINDOW[0], window_size=WINDOW[1],
    )  # fmt: skip


@torch.inference_mode()
def measure(comfy: Any, subject: Subject, alternations: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Ratios within each alternation, whose order is turned round every time; call times by rows; counted rows."""
    calls = Calls(subject.model, clock)
    runs = {
        "euler": lambda: euler(comfy, subject),
        "node": lambda: node(subject, shared=False),
        "shared": lambda: node(subject, shared=True),
    }
    runs["shared"]()  # loading and the first calls of both sizes stay out
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    by_rows: dict[int, list[float]] = {1: [], GROUP: []}
    rows: dict[str, int] = {}
    for turn in range(alternations):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            whole, called, each = calls.during(runs[name])
            seconds[name].append(whole)
            rows[name] = sum(called)
            for count, one in zip(called, each, strict=True):
                by_rows[count].append(one)
    t1, t8 = median(by_rows[1]), median(by_rows[GROUP])
    over = [one / other for one, other in zip(seconds["node"], seconds["euler"], strict=True)]
    saved = [one / other for one, other in zip(seconds["shared"], seconds["node"], strict=True)]
    return {
        "model": subject.name,
        "node_over_euler_time": median(over),
        "node_over_euler_spread": spread(over),
        "shared_prefix_time": median(saved),
        "shared_prefix_spread": spread(saved),
        "shared_prefix_predicted": (SHARED_CALLS * t1 + FULL_CALLS * t8) / (STEPS * t8),
        "t1": t1,
        "t8": t8,
        "seconds": {name: median(times) for name, times in seconds.items()},
        "rows": rows,
    }


def spread(values: list[float]) -> list[float]:
    """First and third quartile."""
    return [values[0]] * 2 if len(values) < 2 else quantiles(values, n=4)[::2]


def table(results: list[dict[str, Any]]) -> str:
    """For people."""
    lines = []
    for r in results:
        euler_s, node_s, shared_s = (r["seconds"][name] for name in ("euler", "node", "shared"))
        low, high = r["node_over_euler_spread"]
        low_saved, high_saved = r["shared_prefix_spread"]
        lines += [
            r["model"],
            f"  ComfyUI euler             {euler_s:8.3f} s  {r['rows']['euler']:4} rows",
            f"  node, own noise           {node_s:8.3f} s  {r['rows']['node']:4} rows",
            f"  node, shared noise        {shared_s:8.3f} s  {r['rows']['shared']:4} rows",
            f"  node / euler              {r['node_over_euler_time']:8.3f}    quartiles {low:.3f} to {high:.3f}",
            f"  shared / own noise        {r['shared_prefix_time']:8.3f}    quartiles {low_saved:.3f} to {high_saved:.3f}",
            f"  predicted                 {r['shared_prefix_predicted']:8.3f}    "
            f"(13 t1 + 12 t8) / (25 t8), t1 {1000 * r['t1']:.2f} ms, t8 {1000 * r['t8']:.2f} ms",
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=15, help="of the three runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: this process's, for a machine in use")
    parser.add_argument("--model", choices=["both", "starter", "sd3"], default="both", help="what to sample")
    parser.add_argument("--quick", action="store_true", help="1 alternation and small models, to see that it runs")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    comfy = import_comfy(comfyui_root())
    comfy.utils.PROGRESS_BAR_ENABLED = False
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    makers = {"starter": starter, "sd3": lambda: random_sd3(comfy, 2, 4) if chosen.quick else random_sd3(comfy, 8, 16)}
    subjects = [make() for name, make in makers.items() if chosen.model in ("both", name)]
    alternations = 1 if chosen.quick else chosen.alternations
    results = [measure(comfy, subject, alternations, CLOCKS[chosen.clock]) for subject in subjects]
    worst = max(results, key=lambda r: abs(r["shared_prefix_time"] - r["shared_prefix_predicted"]))
    summary = {
        "node_over_euler_time": max(r["node_over_euler_time"] for r in results),
        "shared_prefix_time": worst["shared_prefix_time"],
        "shared_prefix_predicted": worst["shared_prefix_predicted"],
        "rows": worst["rows"],
        "alternations": alternations,
        "clock": chosen.clock,
        "threads": chosen.threads,
        "load_before": load,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "models": results,
    }
    print(table(results))
    print(f"{summary['machine']}, {chosen.threads} threads, {chosen.clock} clock, load {load} before the first run")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
