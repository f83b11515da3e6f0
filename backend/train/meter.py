"""Seconds and peak memory of an iteration's phases."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any

import torch

from ..machine import peak_memory
from .ranks import Ranks


class Meter:
    """Measures phases by name; a phase that is entered again adds its seconds and keeps its higher peak.

    On a GPU the peak is what PyTorch had allocated at most within the phase. The CPU keeps no such account: there it is the most
    that the process has ever held until the phase's end (resident set), which only grows.
    """

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str):
        """Measure the block as ``name``."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        peak = peak_memory() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
        if peak is not None:
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    def take(self, ranks: Ranks) -> dict[str, Any]:
        """The phases since the last call: this rank's ``seconds``, and ``peak_memory``, the largest over ranks (collective)."""
        seconds, peaks, self.seconds, self.peaks = self.seconds, self.peaks, {}, {}
        phases = {name: int(peak) for name, peak in ranks.largest(peaks).items()} if peaks else {}
        kind = "process_resident_so_far" if self._cuda is None else "cuda_allocated"
        return {
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "peak_memory": {"kind": kind, "bytes": phases},
        }


class StepNumbers:
    """The ratio and the clipped share by window step, over all updates of an iteration."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}

    def add(self, index: int, ratio_deviation: float, clipped: float, rows: int) -> None:
        """Sums over some rows of the window step ``index``, counted from the window's start."""
        sums = self._sums.setdefault(index, [0.0, 0.0, 0.0])
        for place, value in enumerate((ratio_deviation, clipped, rows)):
            sums[place] += value

    def take(self, start: int, ranks: Ranks) -> list[dict[str, float]]:
        """Means over all ranks since the last call, by absolute ``step`` (a collective call).

        Args:
            start: the window's.
        """
        sums, self._sums = self._sums, {}
        ratios = {f"ratio {index}": ratio / rows for index, (ratio, _, rows) in sums.items()}
        means = ranks.mean(ratios | {f"clip {index}": clipped / rows for index, (_, clipped, rows) in sums.items()})
        return [
            {"step": start + index, "ratio_deviation": means[f"ratio {index}"], "clip_fraction": means[f"clip {index}"]}
            for index in sorted(sums)
        ]
