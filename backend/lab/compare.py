"""The comparison: every entry draws every case, turn by turn, and is measured while it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .entries import Case, Entry, LabError, check_equal_nfe, check_labels, check_nfe, reference_sigmas

OnStep = Callable[[int], None]
"""Told the steps that a draw has taken so far."""


class Host(Protocol):
    """A model and what is needed to draw with it.

    Attributes:
        device: of the model.
        reference_batch: cases that :meth:`reference` may be given at once.
    """

    device: torch.device
    reference_batch: int

    def draw(self, entry: int, case: Case, on_step: OnStep) -> Tensor:
        """The group that entry number ``entry`` draws of a case: latents (G, …) in the model's own scale."""

    def reference(self, sigmas: Tensor, cases: Sequence[Case], on_step: OnStep) -> Tensor:
        """Euler over ``sigmas`` from the initial noise of each case: latents (cases, …) in the model's own scale."""

    def counted(self) -> tuple[int, int]:
        """Model calls and model rows since this was last asked."""


@dataclass(frozen=True)
class Draw:
    """One group, and what it cost.

    Attributes:
        latents: (G, …), float32 or float64 on the CPU.
        calls: of the model, which serve all members: what one sample costs alone.
        rows: of the model, all members and both prompts of guidance together.
        seconds: wall-clock time.
        peak_memory: largest number of bytes allocated on a CUDA device, the model's weights included; None on others.
    """

    latents: Tensor
    calls: int
    rows: int
    seconds: float
    peak_memory: int | None


@dataclass(frozen=True)
class Result:
    """What an entry drew.

    Attributes:
        draws: one for every case.
        references: (cases, …), or None.
    """

    entry: Entry
    draws: Sequence[Draw]
    references: Tensor | None

    @property
    def latents(self) -> Tensor:
        """All groups, (cases, G, …)."""
        return torch.stack([draw.latents for draw in self.draws])

    @property
    def nfe(self) -> float:
        """Function evaluations of a sample; a mean, since a sampler may choose its steps by what it sees."""
        return statistics.fmean(draw.calls for draw in self.draws)

    @property
    def rows(self) -> float:
        """Model rows of a group, a mean like :attr:`nfe`."""
        return statistics.fmean(draw.rows for draw in self.draws)

    @property
    def seconds(self) -> float:
        """Seconds of a group, the median over the cases."""
        return statistics.median(draw.seconds for draw in self.draws)

    @property
    def peak_memory(self) -> int | None:
        """The largest of the draws'."""
        peaks = [draw.peak_memory for draw in self.draws if draw.peak_memory is not None]
        return max(peaks, default=None)


@torch.no_grad()
def compare(
    entries: Sequence[Entry],
    cases: Sequence[Case],
    host: Host,
    *,
    reference_steps: int = 200,
    equal_nfe: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Draw every case with every entry.

    The entries take turns case by case, so that a machine that slows down or speeds up does so for all of them, after one draw
    that is not measured, which loads the model and lets it choose its kernels.

    Args:
        reference_steps: steps of the Euler run that entries are compared with, from the same initial noise; 0: none. Entries
            that begin or end at different sigmas have references of their own.
        equal_nfe: refuse an entry that does not cost what the first costs: before any draw if its plan says so, else after
            the first case.
        on_step: called with (steps taken, steps in all).

    Raises:
        LabError: labels or costs do not fit, or an entry drew NaN or infinity.
    """
    check_labels([entry.label for entry in entries])
    if equal_nfe:
        check_equal_nfe(entries)
    ends = {_ends(entry): reference_sigmas(entry.sigmas, reference_steps) for entry in entries if reference_steps}
    batches = [cases[start : start + host.reference_batch] for start in range(0, len(cases), host.reference_batch)]
    total = len(ends) * len(batches) * reference_steps + entries[0].steps + len(cases) * sum(entry.steps for entry in entries)
    progress = _Progress(total, on_step)

    references = {
        end: torch.cat([_on_cpu(host.reference(sigmas, batch, progress.begin(reference_steps))) for batch in batches])
        for end, sigmas in ends.items()
    }
    host.draw(0, cases[0], progress.begin(entries[0].steps))
    draws: list[list[Draw]] = [[] for _ in entries]
    for case in cases:
        for index, entry in enumerate(entries):
            draws[index].append(_measured(host, index, entry, case, progress.begin(entry.steps)))
            if equal_nfe:
                check_nfe(entries[0], draws[0][-1].calls, entry, draws[index][-1].calls)
    return [Result(entry, drawn, references.get(_ends(entry))) for entry, drawn in zip(entries, draws, strict=True)]


def _ends(entry: Entry) -> tuple[float, float]:
    """Where its path begins and ends."""
    return entry.sigmas[0].item(), entry.sigmas[-1].item()


def _measured(host: Host, index: int, entry: Entry, case: Case, on_step: OnStep) -> Draw:
    cuda = host.device.type == "cuda"
    host.counted()
    if cuda:
        torch.cuda.synchronize(host.device)
        torch.cuda.reset_peak_memory_stats(host.device)
    started = time.perf_counter()
    latents = host.draw(index, case, on_step)
    if cuda:
        torch.cuda.synchronize(host.device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(host.device) if cuda else None
    latents = _on_cpu(latents)
    for member, latent in enumerate(latents):
        if not torch.isfinite(latent).all():
            raise LabError(
                f"{entry.label!r} drew NaN or infinity in sample {member} of seed {case.seed}; use less guidance, a lower eta, "
                "another solver, or float32"
            )
    return Draw(latents, *host.counted(), seconds, peak)


def _on_cpu(latents: Tensor) -> Tensor:
    return latents.to("cpu", torch.float64 if latents.dtype == torch.float64 else torch.float32)


class _Progress:
    """Steps over all draws; a draw that takes fewer or more steps than were planned for it does not shift the others."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None):
        self._total, self._report, self._next = total, report, 0

    def begin(self, steps: int) -> OnStep:
        """What a draw of so many steps tells its progress to."""
        before, self._next = self._next, self._next + steps

        def on_step(done: int) -> None:
            if self._report:
                self._report(before + min(done, steps), self._total)

        return on_step
