"""Sample sheets: one for every iteration that can be afforded, and nothing that anybody can learn from training's numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from training_jobs import job, lora_bytes, numbers, run

from mixgrpo.backend.pictures import contact_sheet
from mixgrpo.backend.train import samples
from mixgrpo.backend.train.run_folder import RunFolder
from mixgrpo.backend.train.samples import SampleSheets
from mixgrpo.backend.train.worker import train


def rollout(groups=1, size=2, height=8, width=8):
    """What a sheet needs of a rollout: grey pictures, all alike."""
    return SimpleNamespace(
        pictures=torch.full((groups * size, 3, height, width), 0.5),
        prompts=torch.zeros(groups, dtype=torch.long),
        advantages=SimpleNamespace(values=torch.zeros(groups, size)),
    )


class Sheets:
    """Sheets of a folder at a time of its own."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now = folder, 0.0
        monkeypatch.setattr(samples, "monotonic", lambda: self.now)
        self.begin()

    def begin(self):
        """As a process that has just started."""
        self.sheets = SampleSheets(RunFolder(self.folder), job())

    def show(self, iteration, seconds, due=False):
        """Show an iteration after so many seconds; returns the iterations there is a sheet of then."""
        self.now += seconds
        self.sheets.show(iteration, rollout(), due)
        return self.kept()

    def kept(self):
        return [int(file.stem[-6:]) for file in sorted((self.folder / "samples").glob("iteration_0*.png"))]

    def lora(self, iteration, name="any"):
        (self.folder / "lora").mkdir(exist_ok=True)
        (self.folder / "lora" / f"{name}_{iteration:06d}.safetensors").touch()


@pytest.fixture
def sheets(tmp_path, monkeypatch):
    return Sheets(tmp_path, monkeypatch)


def test_every_second_at_most_and_only_the_newest_stays(sheets):
    assert sheets.show(1, 0) == [1]
    assert sheets.show(2, 0.9) == [1]
    assert sheets.show(3, 0.2) == [3]
    assert sheets.show(4, 0.3) == [3]
    assert sheets.show(5, 50) == [5]


def test_sheets_of_checkpoints_are_always_written_and_stay(sheets):
    sheets.show(1, 0)
    assert sheets.show(2, 0.1, due=True) == [2]
    sheets.lora(2)
    assert sheets.show(3, 1) == [2, 3]
    assert sheets.show(4, 0.1, due=True) == [2, 4]
    sheets.lora(4, "renamed")
    assert sheets.show(5, 0.1, due=True) == [2, 4, 5]
    sheets.begin()  # killed before it had saved iteration 5, which is trained again
    assert sheets.show(5, 0, due=True) == [2, 4, 5]
    sheets.begin()
    assert sheets.show(3, 1) == [2, 3, 4]


def test_what_else_lies_there_is_left_alone(sheets):
    (sheets.folder / "samples").mkdir()
    for name in ("mine.png", "iteration_best.png", "iteration_000009.txt"):
        (sheets.folder / "samples" / name).touch()
    sheets.show(1, 0)
    sheets.show(2, 5)
    names = {file.name for file in (sheets.folder / "samples").iterdir()}
    assert names == {"mine.png", "iteration_best.png", "iteration_000009.txt", "iteration_000002.png"}


def test_a_sheet_that_cannot_be_removed_now_goes_later(sheets, monkeypatch):
    sheets.show(1, 0)

    def refuse(path, missing_ok=False):
        raise PermissionError("open in another program")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuse)
        assert sheets.show(2, 1) == [1, 2]
    assert sheets.show(3, 1) == [3]


def test_sheets_of_large_groups_and_pictures_are_small(tmp_path):
    spec = job(group_size=64, prompts_per_iteration=6)
    SampleSheets(RunFolder(tmp_path), spec).show(1, rollout(6, 64, 40, 20), due=False)
    (file,) = (tmp_path / "samples").iterdir()
    with Image.open(file) as sheet:
        assert sheet.size == (16 * (48 + 6) + 6, 4 * (20 + 96 + 15 + 6) + 6)
        assert sheet.getpixel((6 + 24, 6 + 20 + 48)) == (128, 128, 128)


@pytest.mark.parametrize(("height", "width", "cell"), [(64, 64, (96, 96)), (1024, 512, (48, 96)), (2, 700, (96, 1))])
def test_a_picture_keeps_its_proportions(height, width, cell):
    sheet = contact_sheet(torch.zeros(2, 3, height, width), 2)
    assert sheet.size == (2 * (cell[0] + 6) + 6, cell[1] + 12)
    dark = [sheet.getpixel((x, y)) for x, y in ((6, 6), (6 + cell[0] - 1, 6 + cell[1] - 1), (cell[0] + 12, 6))]
    assert dark == [(0, 0, 0)] * 3 and sheet.getpixel((6 + cell[0], 6)) == (250, 250, 250)


def test_watching_changes_no_number(tmp_path, monkeypatch):
    """With a sheet for every iteration and with none: the same bits, and no random generator has moved."""
    spec = job(iterations=3, checkpoint_every=2)
    show = SampleSheets.show

    def watched(self, iteration, batch, due):
        torch.manual_seed(iteration)
        before = torch.get_rng_state(), random.getstate(), batch.pictures.clone()
        show(self, iteration, batch, due=True)
        after = torch.get_rng_state(), random.getstate(), batch.pictures
        assert torch.equal(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])

    monkeypatch.setattr(SampleSheets, "show", watched)
    with_sheets = run(tmp_path / "with", spec)
    monkeypatch.setattr(SampleSheets, "show", lambda *_: None)
    assert numbers(run(tmp_path / "without", spec)) == numbers(with_sheets)
    assert lora_bytes(tmp_path / "with") == lora_bytes(tmp_path / "without")
    assert not (tmp_path / "without" / "samples").exists()


def test_a_run_shows_its_newest_iteration(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_LEAST_SECONDS", 0.0)
    spec, seen = job(iterations=5, checkpoint_every=2), []
    train(tmp_path, spec, lambda *_: seen.append(sorted(file.name[-7:-4] for file in (tmp_path / "samples").iterdir())))
    assert seen == [["001"], ["002"], ["002", "003"], ["002", "004"], ["002", "004", "005"]]
