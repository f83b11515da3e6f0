"""The run folder: who may use it, what its event log says after kills, when a checkpoint counts."""

import json
import os

import pytest
import torch
from training_jobs import job, snapshot

from mixgrpo.backend.files import StorageError, load_json, save_json
from mixgrpo.backend.train.run_folder import Checkpoint, RunError, RunFolder

BASE = "b" * 64


def checkpoint(iteration):
    return Checkpoint(iteration, {"a": torch.full((3,), float(iteration))}, {"step.a": torch.tensor(1.0)}, {"ranks": 1})


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.lock()
    return run


def started(run, spec, from_iteration=0):
    run.open(spec)
    run.append("start", from_iteration=from_iteration, until=spec.iterations)


def save(run, iteration, keep=2):
    run.save_checkpoint(checkpoint(iteration), job().identity(), BASE, keep)


def load(run):
    return run.load_checkpoint(job().identity(), BASE)


# ------------------------------------------------------------------ ownership


def test_a_run_has_one_owner_at_a_time(folder):
    other = RunFolder(folder.path)
    with pytest.raises(RunError, match="is in use by another process; wait for it, stop it, or choose another folder"):
        other.lock()
    folder.unlock()
    other.lock()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use .*file.* as a run folder: .*choose another folder"):
        RunFolder(tmp_path / "file" / "run").lock()


# ------------------------------------------------------------------ the job


def test_opening_writes_the_job_and_counts_attempts(folder):
    started(folder, job())
    assert load_json(folder.path / "spec.json") == job().model_dump(mode="json")
    assert folder.attempt == 1
    folder.open(job(iterations=9))
    assert folder.attempt == 2 and load_json(folder.path / "spec.json")["iterations"] == 9


def test_a_changed_job_is_refused_with_every_field_that_changed(folder):
    started(folder, job())
    before = snapshot(folder.path)
    changes = {"seed": 4, "sampling": {"eta": 0.5}, "lora": {"rank": 8}, "rewards": [{"scorer": "scene_accuracy"}]}
    with pytest.raises(RunError) as refused:
        folder.open(job(**changes, name="other", iterations=9))
    sentence = str(refused.value)
    for part in (
        "seed was 0 and is now 4",
        "sampling.eta was 0.7 and is now 0.5",
        "lora.rank was 2 and is now 8",
        'rewards was [{"scorer": "jpeg_compressibility"',
        "Choose another folder for the changed job, or change the job back",
    ):
        assert part in sentence
    assert "name" not in sentence and "iterations" not in sentence and len(sentence) < 600
    assert snapshot(folder.path) == before


def test_a_job_that_never_began_may_be_corrected_in_its_folder(folder):
    folder.open(job(rewards=[{"scorer": "scene_acuracy"}]))
    folder.open(job())
    assert load_json(folder.path / "spec.json")["rewards"][0]["scorer"] == "jpeg_compressibility"


def test_a_job_is_guarded_by_a_checkpoint_even_without_events(folder):
    started(folder, job())
    save(folder, 1)
    (folder.path / "events.jsonl").unlink()
    with pytest.raises(RunError, match="seed was 0 and is now 1"):
        folder.open(job(seed=1))
    (folder.path / "spec.json").unlink()
    folder.open(job(seed=1))
    with pytest.raises(RunError, match="is a checkpoint of another job; choose another folder"):
        folder.load_checkpoint(job(seed=1).identity(), BASE)


def test_opening_clears_what_a_kill_left(folder):
    unfinished = folder.path / "checkpoints" / ".iteration_000001.safetensors.0a1b2c3d.part"
    unfinished.mkdir(parents=True)
    (unfinished / ".tmpXyZ").write_bytes(b"half")
    folder.open(job())
    assert not unfinished.exists() and unfinished.parent.exists()


# ------------------------------------------------------------------ events


def test_the_last_attempt_of_an_iteration_counts(folder):
    started(folder, job())
    for iteration, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
        folder.append("iteration", iteration=iteration, loss=loss)
    started(folder, job(), from_iteration=1)
    assert [event["iteration"] for event in folder.iterations()] == [1]  # 2 and 3 are to be done again
    folder.append("iteration", iteration=2, loss=0.25)
    assert [(event["iteration"], event["attempt"], event["loss"]) for event in folder.iterations()] == [(1, 1, 0.1), (2, 2, 0.25)]
    assert len(folder.events()) == 6  # nothing is ever removed


@pytest.mark.parametrize("cut", [1, 10, 40, -1])
def test_a_line_that_a_kill_cut_short_is_passed_over(folder, cut):
    started(folder, job())
    folder.append("iteration", iteration=1, loss=0.5)
    file = folder.path / "events.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:cut])
    kept = 2 if cut == -1 else 1  # only the line's end was missing
    assert len(folder.events()) == kept
    folder.append("iteration", iteration=1, loss=0.25)
    folder.append("iteration", iteration=2, loss=0.125)
    assert [event.get("loss") for event in folder.events()[kept:]] == [0.25, 0.125]
    assert [event["loss"] for event in folder.iterations()] == [0.25, 0.125]


def test_a_log_that_is_not_one_is_refused(folder):
    started(folder, job())
    file = folder.path / "events.jsonl"
    file.write_bytes(b"not an event\n" + file.read_bytes())
    with pytest.raises(StorageError, match="events.jsonl line 1 is not an event .*move the file away"):
        folder.events()


def test_an_event_that_cannot_be_written_leaves_the_log_readable(folder, tiny_disk):
    run = RunFolder(tiny_disk.folder)
    started(run, job())
    with tiny_disk.full(), pytest.raises(StorageError, match="cannot append to .*events.jsonl: .*checkpoints are safe"):
        run.append("iteration", iteration=1, text="x" * 100_000)
    run.append("iteration", iteration=1, loss=0.5)
    assert [event["event"] for event in run.events()] == ["start", "iteration"]


def test_no_event_holds_nan(folder):
    started(folder, job())
    with pytest.raises(ValueError, match="JSON compliant"):
        folder.append("iteration", iteration=1, loss=float("nan"))
    assert len(folder.events()) == 1


# ------------------------------------------------------------------ checkpoints


def test_the_newest_checkpoint_comes_back_bit_for_bit(folder):
    assert load(folder) is None
    for iteration in (9, 10, 99_999, 100_000):
        save(folder, iteration)
    loaded = load(folder)
    assert loaded.iteration == 100_000 and loaded.layout == {"ranks": 1}
    assert torch.equal(loaded.adapter["a"], torch.full((3,), 100_000.0)) and loaded.optimizer.keys() == {"step.a"}


def test_only_the_newest_are_kept(folder):
    for iteration in range(1, 6):
        save(folder, iteration, keep=2)
    stems = sorted(file.name for file in (folder.path / "checkpoints").iterdir())
    assert stems == [f"iteration_00000{n}.{suffix}" for n in (4, 5) for suffix in ("json", "safetensors")]


def test_tensors_without_a_marker_are_no_checkpoint(folder):
    """A kill between the two files: the older checkpoint counts, and the next save clears the rest."""
    save(folder, 1)
    save(folder, 2)
    (folder.path / "checkpoints" / "iteration_000002.json").unlink()
    assert load(folder).iteration == 1
    save(folder, 3, keep=1)
    assert sorted(file.stem for file in (folder.path / "checkpoints").iterdir()) == ["iteration_000003"] * 2


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "tensors cut": lambda tensors, marker: tensors.write_bytes(tensors.read_bytes()[:-5]),
    "tensors empty": lambda tensors, marker: tensors.write_bytes(b""),
    "one bit flipped": lambda tensors, marker: _flip(tensors),
    "tensors gone": lambda tensors, marker: tensors.unlink(),
    "marker cut": lambda tensors, marker: marker.write_bytes(marker.read_bytes()[:20]),
    "marker empty": lambda tensors, marker: marker.write_bytes(b""),
    "marker of another kind": lambda tensors, marker: marker.write_text("[1]"),
    "marker without its hash": lambda tensors, marker: marker.write_text('{"iteration": 2}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_checkpoint_is_refused_and_the_older_one_can_be_had(folder, damage):
    save(folder, 1)
    save(folder, 2)
    tensors = folder.path / "checkpoints" / "iteration_000002.safetensors"
    marker = tensors.with_suffix(".json")
    damage(tensors, marker)
    before = snapshot(folder.path)
    with pytest.raises(RunError) as refused:
        load(folder)
    assert str(refused.value).startswith(f"the checkpoint {tensors} is damaged or incomplete (")
    assert str(refused.value).endswith("delete it and iteration_000002.json to continue from iteration_000001")
    assert snapshot(folder.path) == before
    tensors.unlink(missing_ok=True)
    marker.unlink()
    assert load(folder).iteration == 1


def test_the_only_checkpoint_damaged_means_to_start_again(folder):
    save(folder, 1)
    (folder.path / "checkpoints" / "iteration_000001.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="iteration_000001.json to start again from the beginning$"):
        load(folder)


def test_a_checkpoint_belongs_to_its_base_model(folder):
    save(folder, 1)
    with pytest.raises(RunError, match="other weights of the base model .bbbbbbbbbbbb, now cccccccccccc.; put those back"):
        folder.load_checkpoint(job().identity(), "c" * 64)


def test_a_full_disk_during_a_save_keeps_the_older_checkpoint(tiny_disk):
    run = RunFolder(tiny_disk.folder)
    big = Checkpoint(2, {"a": torch.zeros(500_000)}, {}, {})
    save(run, 1, keep=1)
    before = snapshot(tiny_disk.folder)
    with tiny_disk.full(100_000), pytest.raises(StorageError, match="cannot write .*iteration_000002.safetensors"):
        run.save_checkpoint(big, job().identity(), BASE, keep=1)
    assert snapshot(tiny_disk.folder) == before
    run.save_checkpoint(big, job().identity(), BASE, keep=1)
    assert load(run).iteration == 2


def test_an_old_checkpoint_that_cannot_be_removed_is_named(folder, monkeypatch):
    save(folder, 1)

    def refuse(path, missing_ok=False):
        raise PermissionError("open in another program")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(StorageError, match="cannot remove an old checkpoint: open in another program; the new one is safe"):
        save(folder, 2, keep=1)
    assert load(folder).iteration == 2


def test_a_marker_is_written_after_its_tensors(folder, monkeypatch):
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append(target.name), replace(source, target)))
    save(folder, 7)
    assert order == ["iteration_000007.safetensors", "iteration_000007.json"]
    facts = json.loads((folder.path / "checkpoints" / order[1]).read_text())
    assert facts["iteration"] == 7 and facts["identity"] == job().identity()


def test_a_stored_job_that_is_damaged_is_named(folder):
    started(folder, job())
    (folder.path / "spec.json").write_text("{")
    with pytest.raises(StorageError, match="cannot read .*spec.json"):
        folder.open(job())
    save_json(folder.path / "spec.json", {"prompts": []})
    with pytest.raises(ValueError, match="prompts: needs at least 1 entry"):
        folder.open(job())
