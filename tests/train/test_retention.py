"""Which LoRAs stay: the newest two, the best, those that were asked for, and every k-th."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from training_jobs import job, lora_bytes, numbers, run

from mixgrpo.backend.demo import ITERATIONS, demo_job
from mixgrpo.backend.train.retention import MOST, kept_loras
from mixgrpo.backend.train.run_folder import RunFolder
from mixgrpo.backend.train.worker import train


def kept(loras, best=None, wanted=(), checkpoint_every=1, keep_every=None):
    return sorted(kept_loras(set(loras), best, set(wanted), checkpoint_every, keep_every))


def test_the_newest_two_the_best_the_wanted_and_every_kth_stay():
    assert kept(range(1, 21), keep_every=1000) == [19, 20]
    assert kept(range(1, 21), best=7, keep_every=1000) == [7, 19, 20]
    assert kept(range(1, 21), best=7, wanted={3, 90}, keep_every=1000) == [3, 7, 19, 20]
    assert kept(range(1, 21), keep_every=6) == [6, 12, 18, 19, 20]
    assert kept([]) == [] and kept([5], keep_every=1000) == [5]


def test_k_need_not_be_a_multiple_of_what_is_saved():
    assert kept(range(25, 151, 25), keep_every=10) == list(range(25, 151, 25))
    assert kept(range(3, 34, 3), keep_every=10) == [12, 21, 30, 33]
    assert kept([10, 13, 20, 30, 40], keep_every=10) == [10, 20, 30, 40]


def test_a_run_like_the_demo_keeps_all_and_no_run_keeps_more_than_some_dozens():
    demo = demo_job(ITERATIONS, 0)
    saved = range(10, ITERATIONS + 1, 10)
    assert kept(saved, checkpoint_every=demo.checkpoint_every, keep_every=demo.keep_loras_every) == list(saved)
    assert kept(range(1, 17)) == list(range(1, 17))
    for every, reached in ((1, 999), (10, 99_990), (7, 100_000)):
        stay = kept(range(every, reached + 1, every), best=every, wanted={2 * every}, checkpoint_every=every)
        assert MOST / 2 <= len(stay) <= MOST + 4
        gaps = [later - earlier for earlier, later in zip(stay[2:-2], stay[3:-2], strict=False)]
        assert max(gaps) - min(gaps) == 0, "they lie at equal distances"


@pytest.mark.parametrize("keep_every", [None, 4, 9])
def test_to_remove_as_it_goes_leaves_what_to_remove_in_the_end_would(keep_every):
    """Nothing that a later decision would keep for its distance has been removed by an earlier one."""
    order = random.Random(keep_every or 0)
    saved = sorted(order.sample(range(1, 400), 150))
    left: set[int] = set()
    for iteration in saved:
        left = kept_loras(left | {iteration}, None, set(), 1, keep_every)
        assert left == kept_loras(left, None, set(), 1, keep_every)
    assert left == kept_loras(set(saved), None, set(), 1, keep_every)


# ------------------------------------------------------------------ in a run folder


def folder_with(path: Path, *iterations: int) -> RunFolder:
    for kind, name, suffix in (("lora", "a", "safetensors"), ("lora", "b", "safetensors"), ("samples", "iteration", "png")):
        (path / kind).mkdir(exist_ok=True)
        for iteration in iterations:
            (path / kind / f"{name}_{iteration:06d}.{suffix}").write_bytes(bytes(8))
    return RunFolder(path)


def names(path: Path, kind: str) -> list[str]:
    return sorted(file.name for file in (path / kind).iterdir())


def test_a_lora_goes_under_all_its_names_and_with_its_sheet(tmp_path):
    folder = folder_with(tmp_path, 1, 2)
    assert folder.retain(lambda loras, wanted: loras - {1}) == {1}
    assert names(tmp_path, "lora") == ["a_000002.safetensors", "b_000002.safetensors"]
    assert names(tmp_path, "samples") == ["iteration_000002.png"]


def test_what_somebody_waits_for_is_told_to_whoever_decides(tmp_path):
    folder = folder_with(tmp_path, 1, 2)
    assert folder.wanted() == set()
    RunFolder(folder.path).want(2)
    RunFolder(folder.path).want(9)
    assert folder.retain(lambda loras, wanted: loras & wanted) == {1} and folder.wanted() == {2, 9}
    RunFolder(tmp_path / "new").want(4)
    assert RunFolder(tmp_path / "new").wanted() == {4}


def test_a_file_that_is_open_where_that_matters_goes_later(tmp_path, monkeypatch):
    folder = folder_with(tmp_path, 1, 2)

    def refuse(path, missing_ok=False):
        raise PermissionError("open in another program")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuse)
        assert folder.retain(lambda loras, wanted: {2}) == set()
    with open(tmp_path / "lora" / "a_000001.safetensors", "rb") as reader:
        assert folder.retain(lambda loras, wanted: {2}) == {1}
        assert reader.read() == bytes(8)


# ------------------------------------------------------------------ in a run


def test_a_run_removes_as_it_goes_and_says_so(tmp_path):
    """With another retention the numbers and what is left are the same; the target of every run of this job stays."""
    everything = run(tmp_path / "all", job(iterations=7, keep_loras_every=1))
    run(tmp_path / "few", job(iterations=3, keep_loras_every=1000))
    some = run(tmp_path / "few", job(iterations=7, keep_loras_every=1000))
    assert numbers(some) == numbers(everything)
    folder = RunFolder(tmp_path / "few")
    best = folder.read_history().best(range(1, 8), {"jpeg_compressibility": 1.0})
    assert folder.lora_iterations() == {best, 3, 6, 7}
    left, before = lora_bytes(folder.path), lora_bytes(tmp_path / "all")
    assert len(before) == 7 and left.items() <= before.items()
    said = [event for event in folder.events() if event["event"] in ("saved", "removed")]
    assert [event["iteration"] for event in said if event["event"] == "saved"] == [1, 2, 3, 4, 5, 6, 7]
    removed = {iteration for event in said if event["event"] == "removed" for iteration in event["iterations"]}
    assert removed == set(range(1, 8)) - folder.lora_iterations()
    sheets = {int(file.stem[-6:]) for file in (folder.path / "samples").iterdir()}
    assert sheets == folder.lora_iterations()


def test_an_iteration_that_somebody_waits_for_is_saved_and_stays(tmp_path):
    RunFolder(tmp_path).want(3)
    run(tmp_path, job(iterations=8, checkpoint_every=2, keep_loras_every=1000))
    saved = [event["iteration"] for event in RunFolder(tmp_path).events() if event["event"] == "saved"]
    assert saved == [2, 3, 4, 6, 8]
    assert 3 in RunFolder(tmp_path).lora_iterations() and len(RunFolder(tmp_path).lora_iterations()) <= 4


@pytest.mark.parametrize("content", [Path.read_bytes, lambda other: b"damaged"], ids=["other numbers", "damaged"])
def test_a_lora_of_an_earlier_attempt_gives_way(tmp_path, content):
    """The newest checkpoint was lost; what is trained again in its place is another layout's, and so is the LoRA then."""
    run(tmp_path, job(iterations=2))
    folder = RunFolder(tmp_path)
    lora = folder.lora_file("mixgrpo", 2)
    right = lora_bytes(tmp_path)
    lora.write_bytes(content(folder.lora_file("mixgrpo", 1)))
    for file in (tmp_path / "checkpoints").glob("iteration_000002.*"):
        file.unlink()
    run(tmp_path, job(iterations=2))
    assert lora_bytes(tmp_path) == right
    assert [event["iteration"] for event in folder.events() if event["event"] == "saved"] == [1, 2, 2]


def test_sheets_of_an_attempt_that_no_longer_counts_go_when_the_next_begins(tmp_path):
    run(tmp_path, job(iterations=2))
    sheet = tmp_path / "samples" / "iteration_000009.png"
    sheet.write_bytes(b"drawn by an attempt that was killed")
    seen = []
    train(tmp_path, job(iterations=3), asked=lambda: seen.append(sheet.exists()))
    assert seen and not any(seen)
