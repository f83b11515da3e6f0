"""Stop and resume: whatever the moment of the kill, every later number and weight is the uninterrupted run's."""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from training_jobs import ENVIRONMENT, WORKER, job, lora_bytes, numbers, run, snapshot, trainer

from mixgrpo.backend.files import StorageError, load_metadata, save_json
from mixgrpo.backend.train import run_folder, worker
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.run_folder import RunError, RunFolder
from mixgrpo.backend.train.trainer import Trainer
from mixgrpo.backend.train.worker import train

posix = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
# two updates, a window that moves, guidance, a changing learning rate, an average: everything that a continuation could forget
RICH = {
    "group_size": 4,
    "optimizer": {"updates_per_rollout": 2, "learning_rate": 3e-3, "warmup": 3, "cosine": 40},
    "ema": {"every": 3},
    "sampling": {"guidance": 1.5, "window": {"size": 1, "stride": 1, "every": 2}},
    "seed": 3,
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of an uninterrupted run to iteration 12."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, job(iterations=12, **RICH))
    return folder


@posix
def test_a_killed_run_continues_as_if_nothing_had_happened(straight, tmp_path):
    folder = tmp_path / "killed"
    save_json(folder / "spec.json", job(iterations=12, **RICH).model_dump(mode="json"))
    process = subprocess.Popen([*WORKER, folder], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not list(folder.glob("checkpoints/iteration_*.json")):
        time.sleep(0.01)
    delay = random.uniform(0, 1.5)
    time.sleep(delay)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"the worker was to be killed after {delay} s: {errors.decode()[-2000:]}"

    worker.main([str(folder)])
    run_of_two = RunFolder(folder)
    starts = [event for event in run_of_two.events() if event["event"] == "start"]
    assert [start["attempt"] for start in starts] == [1, 2] and 1 <= starts[1]["from_iteration"] < 12, delay
    assert numbers(run_of_two.iterations()) == numbers(RunFolder(straight).iterations()), delay
    loras, others = lora_bytes(folder), lora_bytes(straight)
    assert loras == others and list(loras)[-1] == "mixgrpo_000012.safetensors", delay
    assert not list(folder.rglob("*.part"))
    assert not any(event["event"] == "layout_changed" for event in run_of_two.events())


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


def kill_at(monkeypatch, moment: int) -> list[str]:
    """Raise :class:`Killed` instead of the file operation number ``moment`` of a run; returns the names of those before."""
    done: list[str] = []

    def guarded(name, operation):
        def instead(*args, **kwargs):
            if len(done) == moment:
                raise Killed
            done.append(name)
            return operation(*args, **kwargs)

        return instead

    monkeypatch.setattr(os, "replace", guarded("rename", os.replace))
    monkeypatch.setattr(RunFolder, "append", guarded("append", RunFolder.append))
    monkeypatch.setattr(run_folder.Path, "unlink", guarded("unlink", run_folder.Path.unlink))
    return done


def test_a_kill_before_any_file_operation_loses_nothing(tmp_path, monkeypatch):
    spec = job(iterations=2, keep_checkpoints=1)
    straight = numbers(run(tmp_path / "straight", spec))
    loras, moment = lora_bytes(tmp_path / "straight"), 0
    while True:
        folder = tmp_path / f"killed_{moment}"
        with monkeypatch.context() as patched:
            done = kill_at(patched, moment)
            try:
                train(folder, spec)
                break
            except Killed:
                pass
        assert numbers(run(folder, spec)) == straight, (moment, done)
        assert lora_bytes(folder) == loras, (moment, done)
        kept = [file.stem for file in (folder / "checkpoints").glob("*.json")]
        assert "iteration_000002" in kept, (moment, done)
        shutil.rmtree(folder)
        moment += 1
    assert moment == len(done) > 14


def test_the_same_target_again_trains_nothing(straight, monkeypatch):
    before = snapshot(straight)
    monkeypatch.setattr(Trainer, "__init__", None)  # not even a model is loaded
    assert train(straight, job(iterations=12, **RICH)) == RunFolder(straight).lora_file("mixgrpo", 12)
    after = snapshot(straight)
    assert before == after


def test_a_larger_target_continues_to_the_same_numbers(straight, tmp_path):
    first = run(tmp_path, job(iterations=2, **RICH))
    assert len(first) == 2
    events = run(tmp_path, job(iterations=5, **RICH))
    assert numbers(events) == numbers(RunFolder(straight).iterations()[:5])
    assert [event["attempt"] for event in events] == [1, 1, 2, 2, 2]
    assert lora_bytes(tmp_path).items() <= lora_bytes(straight).items()
    assert len(lora_bytes(tmp_path)) == 5


def test_a_smaller_target_returns_its_lora_or_says_what_there_is(tmp_path):
    run(tmp_path, job(iterations=4, checkpoint_every=2))
    before = lora_bytes(tmp_path)
    assert train(tmp_path, job(iterations=2, checkpoint_every=2)).name == "mixgrpo_000002.safetensors"
    with pytest.raises(RunError, match="already trained to iteration 4 and has no LoRA of iteration 3; set iterations to 4 or"):
        train(tmp_path, job(iterations=3, checkpoint_every=2))
    assert lora_bytes(tmp_path) == before and len(before) == 2


def test_free_fields_may_change_and_another_name_gets_its_own_lora(tmp_path):
    run(tmp_path, job(iterations=2))
    lora = train(tmp_path, job(iterations=2, name="second", checkpoint_every=5))
    assert lora.name == "second_000002.safetensors"
    loras = lora_bytes(tmp_path)
    assert loras["second_000002.safetensors"] == loras["mixgrpo_000002.safetensors"]


def test_a_lora_that_was_moved_away_is_written_again(tmp_path):
    run(tmp_path, job())
    before = lora_bytes(tmp_path)
    lora = RunFolder(tmp_path).lora_file("mixgrpo", 2)
    lora.unlink()
    assert train(tmp_path, job()) == lora and lora_bytes(tmp_path) == before
    metadata = load_metadata(lora)
    assert metadata["mixgrpo.iteration"] == "2" and metadata["mixgrpo.spec"] == job().identity()
    assert metadata["mixgrpo.rewards"] == "jpeg_compressibility x 1" and metadata["mixgrpo.base_model"] == "starter"


def test_a_changed_layout_is_written_down_and_said(straight, tmp_path, capsys):
    """Another number of threads and another way to split calls: the run goes on, and near what it would have been."""
    run(tmp_path, job(iterations=1, **RICH))
    assert "layout" not in capsys.readouterr().out
    torch.set_num_threads(2)
    try:
        continued = run(tmp_path, job(iterations=2, rows_per_call=1, **RICH))
    finally:
        torch.set_num_threads(1)
    changes = [event for event in RunFolder(tmp_path).events() if event["event"] == "layout_changed"]
    assert [(event["was"]["rows_per_call"], event["now"]["rows_per_call"]) for event in changes] == [(256, 1)]
    said = capsys.readouterr().out
    assert "continued from iteration 1 with another layout (rows_per_call 256 -> 1, threads 1 -> 2)" in said
    assert "no longer bit-equal" in said
    second, same = continued[-1], RunFolder(straight).iterations()[1]
    assert second["gradient_norm"] == pytest.approx(same["gradient_norm"], rel=1e-2)


def test_a_checkpoint_holds_adapter_optimiser_and_iteration(tmp_path):
    """Put into a fresh trainer it gives itself back, bit for bit."""
    first = trainer(**RICH)
    first.train_iteration()
    spec, saved = job(**RICH), first.checkpoint()
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(saved, spec.identity(), "base", keep=1)
    loaded = folder.load_checkpoint(spec.identity(), "base")
    again = Trainer(spec, Ranks.join(), loaded).checkpoint()
    assert saved.iteration == again.iteration == 1 and saved.layout == loaded.layout
    for part in ("adapter", "optimizer"):
        ours, theirs = getattr(saved, part), getattr(again, part)
        assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    fields = {name.split(".", 1)[0] for name in saved.optimizer}
    assert fields == {"step", "exp_avg", "exp_avg_sq"} and len(saved.optimizer) == 3 * len(saved.adapter)


def test_a_run_that_fails_to_report_keeps_its_checkpoints(tmp_path):
    """The caller's callback is the caller's: its error ends the run, which then continues from the last checkpoint."""

    def report(event, left):
        if event["iteration"] == 2:
            raise StorageError("the log is full")

    with pytest.raises(StorageError, match="the log is full"):
        train(tmp_path / "a", job(iterations=3), report)
    assert numbers(run(tmp_path / "a", job(iterations=3))) == numbers(run(tmp_path / "b", job(iterations=3)))
