"""What the trainer refuses, before it loads a model where it can, and what of a run survives a failure."""

import pytest
import torch
from training_jobs import fields, job, lora_bytes, numbers, run, snapshot
from training_jobs import trainer as make_trainer

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.files import StorageError, save_json
from mixgrpo.backend.models.base import ModelError
from mixgrpo.backend.rewards import SCORERS
from mixgrpo.backend.train import adapter, trainer, worker
from mixgrpo.backend.train.ranks import RankError, Ranks
from mixgrpo.backend.train.run_folder import RunError, RunFolder
from mixgrpo.backend.train.worker import train

REFUSED = {
    "unknown scorer": ({"rewards": [{"scorer": "beauty"}]}, "there is no scorer called 'beauty'; there are: .*scene_accuracy"),
    "unknown monitor": ({"monitors": [{"scorer": "beauty"}]}, "there is no scorer called 'beauty'; there are: "),
    "unknown option": (
        {"rewards": [{"scorer": "scene_accuracy", "options": {"partail": True}}]},
        "the scorer 'scene_accuracy' has no option 'partail'; its options are: partial",
    ),
    "option's value": (
        {"rewards": [{"scorer": "scene_accuracy", "options": {"partial": 3}}]},
        "scene_accuracy: partial must be true or false, got 3",
    ),
    "held-out reward": (
        {"rewards": [{"scorer": "held_out_judge"}]},
        "held_out_judge is held out: it may only be watched; list it under monitors",
    ),
    "caption outside the grammar": (
        {"prompts": ["a purple dodecahedron"], "rewards": [{"scorer": "scene_accuracy"}]},
        "a purple dodecahedron",
    ),
    "eta too large": ({"sampling": {"eta": 9.0}}, "eta 9.0 is too large for step 0 .*use at most "),
    "eta too large for a later window": (
        {"sampling": {"eta": 1.6, "steps": 25, "shift": 1.0, "window": {"start": 9, "size": 1, "stride": 5, "every": 1}}},
        "eta 1.6 is too large for step 23",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_a_job_that_cannot_be_trained_is_refused_before_a_model_is_loaded(changes, sentence, monkeypatch):
    monkeypatch.setattr(trainer, "load_model", None)
    with pytest.raises(MixGRPOError, match=sentence) as refused:
        make_trainer(**{"iterations": 300} | changes)
    assert "\n" not in str(refused.value)


def test_the_noise_level_is_checked_only_for_windows_the_run_reaches():
    sampling = {"eta": 1.6, "steps": 25, "shift": 1.0, "window": {"start": 9, "size": 1, "stride": 5, "every": 3}}
    make_trainer(sampling=sampling, iterations=9)
    with pytest.raises(MixGRPOError, match="too large for step 23"):
        make_trainer(sampling=sampling, iterations=10)


@pytest.mark.parametrize(("width", "height"), [(60, 64), (64, 8), (64, 4096)])
def test_a_picture_size_that_the_model_lacks_is_refused(width, height):
    with pytest.raises(ModelError, match=f"multiples of 16 up to .* not {width}x{height}; its own size is 64"):
        make_trainer(sampling={"width": width, "height": height})


def test_a_refused_job_leaves_no_trace_that_blocks_the_corrected_one(tmp_path):
    with pytest.raises(MixGRPOError, match="no scorer called"):
        run(tmp_path, job(rewards=[{"scorer": "jpeg_compresibility"}]))
    assert len(run(tmp_path, job(iterations=1))) == 1


def test_a_changed_job_is_refused_and_changes_nothing(tmp_path):
    run(tmp_path, job())
    before = snapshot(tmp_path)
    with pytest.raises(RunError, match="sampling.guidance was 1.0 and is now 2.0"):
        run(tmp_path, job(sampling={"guidance": 2.0}, iterations=3))
    assert snapshot(tmp_path) == before


def test_a_run_that_is_in_use_is_refused_and_changes_nothing(tmp_path):
    run(tmp_path, job(iterations=1))
    owner = RunFolder(tmp_path)
    owner.lock()
    before = snapshot(tmp_path)
    with pytest.raises(RunError, match="is in use by another process"):
        run(tmp_path, job(iterations=2))
    assert snapshot(tmp_path) == before
    owner.unlock()
    assert len(run(tmp_path, job(iterations=2))) == 2


def test_other_weights_of_the_base_model_are_refused(tmp_path, monkeypatch):
    run(tmp_path, job(iterations=1))
    before = snapshot(tmp_path)
    monkeypatch.setattr(worker, "base_model_hash", lambda spec: "f" * 64)
    with pytest.raises(RunError, match="was trained on other weights of the base model .*now ffffffffffff"):
        train(tmp_path, job(iterations=2))
    after = snapshot(tmp_path)
    assert after.pop("spec.json") != before.pop("spec.json") and after == before  # only the new target is noted


def test_a_full_disk_during_training_loses_nothing_that_was_saved(tiny_disk, tmp_path):
    """The disk fills up after iteration 2's event; freed, the same command continues to the uninterrupted run's numbers."""
    spec, folder = job(iterations=4), tiny_disk.folder
    state = {}

    def fill(event, left):
        if event["iteration"] == 2:
            state["saved"] = {name: content for name, content in snapshot(folder).items() if name.startswith(("check", "lora"))}
            state["full"] = tiny_disk.full(left=20_000)
            state["full"].__enter__()

    try:
        with pytest.raises(StorageError, match="cannot write .*iteration_000002.safetensors: .*; nothing saved before"):
            train(folder, spec, fill)
    finally:
        state["full"].__exit__(None, None, None)
    after = snapshot(folder)
    assert len(state["saved"]) == 3 and state["saved"].items() <= after.items()
    assert {name for name in after if name.startswith(("check", "lora"))} == state["saved"].keys()
    assert numbers(run(folder, spec)) == numbers(run(tmp_path / "straight", spec))
    assert lora_bytes(folder) == lora_bytes(tmp_path / "straight")


class Blind:
    """A scorer that can score nothing, or not the first picture."""

    held_out = False

    def __init__(self, name, blind):
        self.name, self.blind = name, blind

    def check_prompts(self, prompts):
        pass

    def score(self, images, prompts):
        scores = images.flatten(1).mean(1)
        scores[self.blind] = float("nan")
        return scores


def test_pictures_that_no_reward_can_score_stop_the_run(monkeypatch):
    monkeypatch.setitem(SCORERS, "blind", lambda: Blind("blind", slice(None)))
    with pytest.raises(trainer.TrainingError, match="blind could score no picture of iteration 1; there is nothing to learn"):
        make_trainer(rewards=[{"scorer": "blind"}, {"scorer": "jpeg_compressibility"}]).train_iteration()


def test_some_pictures_or_a_whole_monitor_may_fail(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SCORERS, "dim", lambda: Blind("dim", slice(1)))
    monkeypatch.setitem(SCORERS, "blind", lambda: Blind("blind", slice(None)))
    save_json(
        tmp_path / "spec.json",
        fields(group_size=4, rewards=[{"scorer": "dim"}], monitors=[{"scorer": "blind"}], iterations=1),
    )
    worker.main([str(tmp_path)])
    (event,) = RunFolder(tmp_path).iterations()
    assert event["failed"] == 5 and event["dead_groups"] == 0
    assert event["scores"]["blind"] == {"mean": None, "group_std": None} and event["scores"]["dim"]["mean"] > 0
    assert "iteration 1  dim 0." in capsys.readouterr().out


def test_a_worker_says_in_one_line_why_it_ends(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="give one run folder"):
        worker.main([])
    with pytest.raises(SystemExit, match="^StorageError: cannot read .*spec.json"):
        worker.main([str(tmp_path)])
    save_json(tmp_path / "spec.json", fields(group_size=1))
    with pytest.raises(SystemExit, match="^SpecError: group_size: must be at least 2"):
        worker.main([str(tmp_path)])


def test_a_gradient_that_is_not_finite_stops_before_the_update(monkeypatch):
    one = make_trainer()
    batch = one.collect()
    for parameter in one.parameters.values():
        parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer))
    with pytest.raises(trainer.TrainingError, match="the gradient is not finite in iteration 1; lower the learning rate"):
        one.update(batch, 0)
    assert adapter.adapter_hash(adapter.adapter_tensors(one.model.transformer)) == before


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RankError, match="process 2 of this machine has no GPU of its own, there are 1; start one process"):
        Ranks.join()


def test_an_adapter_of_other_layers_is_refused():
    one = make_trainer()
    tensors = adapter.adapter_tensors(one.model.transformer)
    name, value = next(iter(tensors.items()))
    del tensors[name]
    with pytest.raises(MixGRPOError, match="do not match the adapted layers"):
        adapter.load_adapter(one.model.transformer, tensors)
    with pytest.raises(MixGRPOError, match="do not match the adapted layers"):
        adapter.load_adapter(one.model.transformer, tensors | {name: value[:1]})
