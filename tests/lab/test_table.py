"""The table: distances, diversity and intervals by hand; failed scores; what so few values do not say."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from lab_results import drawn, entry

from mixgrpo.backend.files import load_json
from mixgrpo.backend.lab.compare import Result
from mixgrpo.backend.lab.entries import Case, LabError
from mixgrpo.backend.lab.results import conclude, fresh_folder
from mixgrpo.backend.lab.table import COLUMNS, group_diversity, interval, make_table, rmse
from mixgrpo.backend.specs import RewardSpec

NAN = math.nan


def result(label: str, latents: torch.Tensor, references: torch.Tensor | None = None) -> Result:
    """A result with these latents (cases, G, …)."""
    return Result(entry(label), [drawn(group) for group in latents], references)


def rewards(**weights: float) -> tuple[RewardSpec, ...]:
    return tuple(RewardSpec(scorer=name, weight=weight) for name, weight in weights.items())


def test_rmse_is_over_all_samples_and_dimensions():
    references = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0.0, 3.0])[None, :, None, None]
    assert rmse(references[:, None] + offsets, references) == pytest.approx(math.sqrt(9 / 2), rel=1e-6)
    assert rmse(references[:, None], references) == 0


def test_diversity_is_the_mean_over_pairs_and_groups():
    at = torch.tensor([[0.0, 1.0, 3.0], [5.0, 5.0, 5.0]])  # distances 1, 2, 3 and 0, 0, 0
    latents = at[:, :, None, None].expand(2, 3, 4, 5)
    assert group_diversity(latents) == pytest.approx((2 + 0) / 2)
    assert group_diversity(latents[:, :1]) is None


def test_the_interval_is_students():
    mean, low, high = interval(torch.tensor([1.0, 2.0, NAN, 3.0]))
    half = 4.302652729911275 / math.sqrt(3)  # t of 2 degrees of freedom at 97.5 %, std 1
    assert (mean, low, high) == pytest.approx((2, 2 - half, 2 + half), rel=1e-9)
    assert interval(torch.tensor([4.0, NAN])) == (4.0, None, None)
    assert interval(torch.tensor([NAN])) == (None, None, None)


def test_cases_not_samples_are_independent():
    """Members of a group that are one picture do not narrow the interval; a difference is taken case by case."""
    one = torch.tensor([[1.0], [2.0], [4.0]])
    same = torch.zeros(3, 5, 2)
    first, second = make_table(
        [result("a", same), result("b", same)], [{"x": one.expand(3, 5)}, {"x": one.expand(3, 5) + 1}], rewards(x=2.0)
    )
    assert (first["reward_mean"], first["reward_low"], first["reward_high"]) == pytest.approx(interval(2 * one[:, 0]))
    assert (first["difference_mean"], first["difference_low"]) == (None, None)
    assert [second[f"difference_{part}"] for part in ("mean", "low", "high")] == pytest.approx([2, 2, 2])
    assert second["reward_low"] < second["reward_mean"] == pytest.approx(2 * 10 / 3)
    assert second["scores"] == {"x": pytest.approx(10 / 3)}


def test_failed_scores_are_left_out_and_counted():
    values = torch.tensor([[1.0, NAN], [3.0, 5.0], [NAN, NAN]])
    other = torch.tensor([[1.0, 1.0], [NAN, 1.0], [1.0, 1.0]])
    same = torch.zeros(3, 2, 2)
    row, second = make_table(
        [result("a", same), result("b", same)], [{"x": values, "y": other}, {"x": other, "y": other}], rewards(x=1.0, y=10.0)
    )
    assert row["failed"] == 4 and row["reward_mean"] == pytest.approx((11 + 15) / 2)
    assert row["scores"] == {"x": pytest.approx((1 + 4) / 2), "y": pytest.approx(1)}
    assert second["difference_mean"] == pytest.approx(((11 - 11) + (11 - 15)) / 2), "the third case has nothing to compare with"
    json.dumps([row, second], allow_nan=False)


def test_without_rewards_and_reference_their_columns_are_empty():
    (row,) = make_table([result("a", torch.zeros(2, 1, 3))], [{}], ())
    assert set(row) == {*COLUMNS, "scores"} and row["scores"] == {} and row["failed"] == 0
    unknown = [name for name, value in row.items() if value is None]
    measured = {"label", "sampler", "steps", "nfe", "rows", "seconds", "failed", "scores"}
    assert set(unknown) == {*COLUMNS} - measured


def test_everything_is_kept_in_files(tmp_path):
    results = [result(label, torch.randn(2, 2, 3), torch.randn(2, 3)) for label in ("a, b", "c")]
    shades = torch.tensor([[0.2, 1.0], [0.4, 1.0]])[:, :, None, None, None]  # of the first and the second of each group
    pictures = [shades.expand(2, 2, 3, 32, 32), 0.5 * shades.expand(2, 2, 3, 32, 32)]
    cases = [Case("any", 7), Case("any", 8)]
    comparison = conclude({"seeds": 2}, results, pictures, cases, rewards(jpeg_compressibility=1.0))
    comparison.save(tmp_path)
    assert load_json(tmp_path / "table.json") == {"settings": {"seeds": 2}, "table": comparison.rows}
    with open(tmp_path / "table.csv", newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["label"] for row in read] == ["a, b", "c"]
    assert [*read[0]] == [*COLUMNS, "jpeg_compressibility"] and read[0]["peak_memory"] == ""
    shown = [[comparison.grid.getpixel((across, down))[0] for across in (-200, -60)] for down in (-200, -60)]
    assert shown == [[51, 26], [102, 51]], "rows are cases, columns are samplers, of each group the first"
    assert float(read[1]["rmse"]) == comparison.rows[1]["rmse"]
    assert float(read[1]["jpeg_compressibility"]) == comparison.rows[1]["scores"]["jpeg_compressibility"]


def test_the_grid_shows_seeds_or_else_the_samples_of_the_only_one():
    for cases in (1, 2):
        shades = torch.linspace(0, 1, cases * 3).view(cases, 3, 1, 1, 1).expand(-1, -1, 3, 32, 32)
        results = [result("a", torch.zeros(cases, 3, 2))]
        grid = conclude({}, results, [shades], [Case("any", seed) for seed in range(cases)], ()).grid
        shown = shades[0] if cases == 1 else shades[:, 0]
        middle = np.array(grid)[:, -64, 0] / 255
        bands = [middle[grid.height - (len(shown) - row) * 134 + 64] for row in range(len(shown))]
        assert bands == pytest.approx([shade[0, 0, 0].item() for shade in shown], abs=0.01)


def test_a_folder_of_results_is_never_used_twice(tmp_path):
    (tmp_path / "new" / "compare_00002").mkdir(parents=True)
    assert [fresh_folder(tmp_path / "new").name for _ in range(3)] == ["compare_00001", "compare_00003", "compare_00004"]
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="cannot make a folder for the results: .*file"):
        fresh_folder(tmp_path / "file")
