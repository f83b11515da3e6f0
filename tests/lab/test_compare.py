"""The comparison over a host that is told what to do: order of draws, counts, progress, references, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lab_results import entry
from torch import Tensor

from mixgrpo.backend.lab import compare as comparing
from mixgrpo.backend.lab.compare import compare
from mixgrpo.backend.lab.entries import Case, LabError, reference_sigmas

CASES = [Case("a prompt", seed) for seed in range(3)]


class Told:
    """Draws constants; every step of a draw costs ``calls[entry]`` calls of 2 rows."""

    device = torch.device("cpu")
    reference_batch = 2

    def __init__(self, entries, calls: Sequence[int] = (1, 1), broken: tuple[int, int] | None = None):
        self.entries, self.calls, self.broken = entries, calls, broken
        self.log: list[tuple] = []
        self._counted = 0

    def draw(self, index: int, case: Case, on_step) -> Tensor:
        self.log.append((self.entries[index].label, case.seed))
        steps = self.entries[index].steps
        for step in range(steps):
            on_step(step + 1)
        self._counted += steps * self.calls[index]
        latents = torch.full((2, 3), float(index), dtype=torch.bfloat16)
        if self.broken == (index, case.seed):
            latents[1, 2] = torch.inf
        return latents

    def reference(self, sigmas: Tensor, cases: Sequence[Case], on_step) -> Tensor:
        self.log.append((sigmas[0].item(), [case.seed for case in cases]))
        for step in range(len(sigmas) - 1):
            on_step(step + 1)
        self._counted += 1000
        return sigmas[0] * torch.tensor([[float(case.seed)] * 3 for case in cases])

    def counted(self) -> tuple[int, int]:
        counted, self._counted = self._counted, 0
        return counted, 2 * counted


def test_entries_take_turns_after_references_and_one_draw_that_does_not_count():
    entries = [entry("a", 4), entry("b", 6, first=0.5)]
    host, seen = Told(entries, (1, 2)), []
    first, second = compare(entries, CASES, host, reference_steps=5, on_step=lambda *at: seen.append(at))
    assert host.log == [
        (1.0, [0, 1]), (1.0, [2]), (0.5, [0, 1]), (0.5, [2]), ("a", 0),
        ("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip
    assert (first.nfe, first.rows, second.nfe, second.rows) == (4, 8, 12, 24)
    assert first.latents.shape == (3, 2, 3) and second.latents.dtype == torch.float32 and second.latents.unique().item() == 1
    assert first.references[:, 0].tolist() == [0, 1, 2] and second.references[:, 0].tolist() == [0, 0.5, 1]
    total = 4 * 5 + 4 + 3 * (4 + 6)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert first.peak_memory is None and first.seconds >= 0


def test_seconds_are_the_median_over_cases(monkeypatch):
    entries = [entry("a", 1)]
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr(comparing.time, "perf_counter", lambda: next(clock))
    (result,) = compare(entries, CASES, Told(entries), reference_steps=0)
    assert result.seconds == 2.0 and result.references is None


def test_nothing_is_drawn_when_labels_cannot_be_told_apart():
    for labels, sentence in (
        (["a", " a"], "the label 'a' stands for two"),
        (["a", " "], "entry 2 has no label"),
        ([], "no sampler"),
    ):
        host = Told([entry(label) for label in labels])
        with pytest.raises(LabError, match=sentence):
            compare(host.entries, CASES, host)
        assert not host.log


def test_equal_nfe_is_asked_of_every_first_case():
    entries = [entry("a", 4), entry("b", 4)]
    with pytest.raises(LabError, match="'b' costs 8 function evaluations a sample and 'a' costs 4.*sigmas of another length"):
        compare(entries, CASES, host := Told(entries, (1, 2)), reference_steps=0, equal_nfe=True)
    assert len(host.log) == 3, "after the first case"
    compare(entries, CASES, Told(entries, (2, 2)), reference_steps=0, equal_nfe=True)


def test_a_sampler_that_breaks_is_named_with_its_seed_and_sample():
    entries = [entry("a"), entry("b")]
    with pytest.raises(LabError, match="'b' drew NaN or infinity in sample 1 of seed 2"):
        compare(entries, CASES, Told(entries, broken=(1, 2)), reference_steps=0)


def test_a_reference_goes_from_end_to_end():
    sigmas = torch.tensor([0.8, 0.5, 0.1])
    table = reference_sigmas(sigmas, 7)
    assert len(table) == 8 and table[0] == sigmas[0] and table[-1].item() == pytest.approx(0.1) and (table[1:] < table[:-1]).all()
    whole = reference_sigmas(torch.tensor([1.0, 0.0]), 9)
    assert whole[0] == 1 and whole[-1] == 0
