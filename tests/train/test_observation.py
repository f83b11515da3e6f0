"""What can be seen of a run: numbers by step and phase, TensorBoard's scalars, and pictures from fixed seeds."""

from __future__ import annotations

import random

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_jobs import PROMPTS, job, lora_bytes, numbers, run, trainer

from mixgrpo.backend import machine
from mixgrpo.backend.files import StorageError
from mixgrpo.backend.models.families import load_model
from mixgrpo.backend.models.lora_export import load_lora
from mixgrpo.backend.pictures import contact_sheet
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.evaluate import draw
from mixgrpo.backend.train.fixed import FixedPictures
from mixgrpo.backend.train.run_folder import RunFolder
from mixgrpo.backend.train.tensorboard import ScalarLog, scalars_of

WEIGHTS = {"jpeg_compressibility": 1.0}


# ---------------------------------------------------------------------- numbers


def test_numbers_by_step_are_the_iterations_own_taken_apart():
    one = trainer(
        sampling={"steps": 6, "window": {"size": 3, "start": 1, "stride": 1, "every": 1}},
        group_size=4,
        prompts_per_iteration=2,
        optimizer={"updates_per_rollout": 2, "learning_rate": 3e-3},
        rows_per_call=3,
    )
    for start in (1, 2):
        event = one.train_iteration()
        steps = event["steps"]
        assert [step["step"] for step in steps] == [start, start + 1, start + 2]
        for name in ("ratio_deviation", "clip_fraction"):
            assert sum(step[name] for step in steps) / 3 == pytest.approx(event[name], rel=1e-9)
        assert all(0 < step["ratio_deviation"] < 1 and 0 <= step["clip_fraction"] <= 0.5 for step in steps)
        assert len({step["ratio_deviation"] for step in steps}) == 3
        assert event["learning_rate"] == 3e-3


def test_memory_on_the_cpu_is_the_processs_and_is_called_so():
    one = trainer()
    event = one.train_iteration()
    memory = event["peak_memory"]
    assert memory["kind"] == "process_resident_so_far" and memory["bytes"].keys() == event["seconds"].keys()
    peaks = [memory["bytes"][phase] for phase in ("rollout", "decode", "score", "training")]
    assert peaks == sorted(peaks) and 50 * 2**20 < peaks[0] <= peaks[-1] <= machine.peak_memory() < machine.total_memory()
    ballast = torch.ones(40 * 2**20)  # 160 MiB that are really there
    again = one.train_iteration()["peak_memory"]["bytes"]
    assert again["rollout"] >= peaks[0] and len(ballast) and "replay" not in again


# ---------------------------------------------------------------------- TensorBoard


def read(folder):
    """{tag: {step: value}} as TensorBoard reads a folder."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: {one.step: one.value for one in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_the_events_numbers(tmp_path):
    spec = job(iterations=3, monitors=[{"scorer": "held_out_judge"}], sampling={"window": {"every": 1, "stride": 1}})
    events, shown = run(tmp_path, spec), read(tmp_path / "tensorboard")
    for event in events:
        at = event["iteration"]
        expected = {
            "reward": event["scores"]["jpeg_compressibility"]["mean"],
            "score/held_out_judge": event["scores"]["held_out_judge"]["mean"],
            "score_spread/jpeg_compressibility": event["scores"]["jpeg_compressibility"]["group_std"],
            "update/gradient_norm": event["gradient_norm"],
            "update/learning_rate": event["learning_rate"],
            "update/clip_fraction": event["clip_fraction"],
            "replay/log_prob_gap": event["replay"]["log_prob_gap"],
            "groups/dead": event["dead_groups"],
            "window/start": event["window"][0],
            "rows/rollout": event["rows"]["rollout"],
            "seconds/training": event["seconds"]["training"],
            "peak_memory_process_resident_so_far/decode": event["peak_memory"]["bytes"]["decode"],
        } | {f"ratio_deviation/step_{one['step']:02d}": one["ratio_deviation"] for one in event["steps"]}
        for tag, value in expected.items():
            assert shown[tag][at] == pytest.approx(value, rel=1e-6), tag
    assert shown["reward"].keys() == {1, 2, 3}
    assert shown["ratio_deviation/step_02"].keys() == {event["iteration"] for event in events if event["window"][0] > 0}


def test_what_an_attempt_wrote_beyond_its_checkpoint_is_void(tmp_path):
    first = ScalarLog(tmp_path, attempt=1, from_iteration=0)
    for step in range(1, 7):
        first.write(step, {"reward": step})
    second = ScalarLog(tmp_path, attempt=2, from_iteration=4)
    assert read(tmp_path)["reward"] == {1: 1, 2: 2, 3: 3, 4: 4}
    second.write(5, {"reward": -5.0})
    assert read(tmp_path)["reward"] == {1: 1, 2: 2, 3: 3, 4: 4, 5: -5}


def test_a_continued_run_goes_on_in_a_file_of_its_own(tmp_path):
    run(tmp_path, job(iterations=1))
    run(tmp_path, job(iterations=3))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert read(tmp_path / "tensorboard")["reward"].keys() == {1, 2, 3}


def test_missing_scores_are_left_out_of_the_scalars():
    event = trainer().train_iteration()
    event["scores"]["jpeg_compressibility"]["mean"] = None
    scalars = scalars_of(event, WEIGHTS)
    assert "reward" not in scalars and "score/jpeg_compressibility" not in scalars and "update/kl" not in scalars
    assert scalars_of(event | {"kl": 0.5}, WEIGHTS)["update/kl"] == 0.5


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="checkpoints are safe"):
        ScalarLog(tmp_path / "file", 1, 0)


# ---------------------------------------------------------------------- fixed pictures


def fixed(folder):
    """The iterations there are fixed pictures of."""
    return [int(file.stem.removeprefix("fixed_")) for file in sorted((folder / "fixed").iterdir())]


def sheet(pictures, seeds, prompts):
    return contact_sheet(pictures, seeds, [f"seed {seed}" for seed in range(seeds)] * len(prompts), prompts)


@pytest.mark.parametrize("ema", [None, {"every": 1}])
def test_they_are_what_sampling_draws_with_the_lora_of_the_iteration(tmp_path, ema):
    """The beginning is the base model's; a checkpoint's pictures are its LoRA's, of the average where that is exported."""
    optimizer = {"learning_rate": 0.02 if ema is None else 0.05}
    spec = job(iterations=3, checkpoint_every=2, sampling={"guidance": 2.0}, optimizer=optimizer, fixed_pictures=6, ema=ema)
    run(tmp_path, spec)
    assert fixed(tmp_path) == [0, 2, 3]
    seen = []
    for iteration in (0, 3):
        model = load_model(spec.model, torch.device("cpu"))
        if iteration:
            adapter.put_lora(model.transformer, load_lora(tmp_path / "lora" / "mixgrpo_000003.safetensors", model.transformer))
        pictures = draw(model, [prompt for prompt in PROMPTS for _ in range(2)], [0, 1] * 3, spec.sampling)
        expected = torch.tensor(list(sheet(pictures, 2, PROMPTS).tobytes()), dtype=torch.int16)
        with Image.open(tmp_path / "fixed" / f"fixed_{iteration:06d}.png") as drawn:
            found = torch.tensor(list(drawn.convert("RGB").tobytes()), dtype=torch.int16)
        assert found.shape == expected.shape and (found - expected).abs().max() <= 2  # float32 of another batch
        seen.append(found)
    assert (seen[0] - seen[1]).abs().max() > 10, "the LoRA changes nothing, so this test compares nothing"


@pytest.mark.parametrize(("pictures", "prompts", "each"), [(8, 3, 2), (2, 2, 1), (1, 1, 1), (64, 3, 21)])
def test_so_many_at_most_of_prompts_from_all_over_the_job(tmp_path, monkeypatch, pictures, prompts, each):
    drawn = []

    def record(model, velocity, rows, seeds, *_):
        drawn.append((rows, seeds))
        return torch.zeros(len(rows), 3, 8, 8)

    monkeypatch.setattr("mixgrpo.backend.train.fixed.draw_rows", record)
    one = trainer(fixed_pictures=pictures)
    one.counter.rows["fixed"] = 1
    FixedPictures(RunFolder(tmp_path), one).draw()
    ((rows, seeds),) = drawn
    assert rows.unique().tolist() == [place * 3 // prompts for place in range(prompts)] and seeds == list(range(each)) * prompts


def test_none_are_drawn_when_none_are_wanted_and_the_job_is_the_same(tmp_path):
    spec = job(fixed_pictures=0, iterations=1)
    run(tmp_path, spec)
    assert not (tmp_path / "fixed").exists() and spec.identity() == job().identity()


def test_they_change_no_number(tmp_path, monkeypatch):
    show = FixedPictures.draw

    def watched(self):
        torch.manual_seed(self._trainer.iteration)
        before = torch.get_rng_state(), random.getstate()
        show(self)
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        assert not self._trainer.counter.rows

    with monkeypatch.context() as patched:
        patched.setattr(FixedPictures, "draw", watched)
        with_pictures = run(tmp_path / "with", job(iterations=3, checkpoint_every=1))
    without = run(tmp_path / "without", job(iterations=3, checkpoint_every=1, fixed_pictures=0))
    assert numbers(with_pictures) == numbers(without) and lora_bytes(tmp_path / "with") == lora_bytes(tmp_path / "without")
    assert [event["rows"] for event in with_pictures] == [event["rows"] for event in without]
    assert fixed(tmp_path / "with") == [0, 1, 2, 3]


def test_what_a_kill_has_prevented_is_drawn_at_the_next_start(tmp_path):
    run(tmp_path, job(iterations=2))
    (tmp_path / "fixed" / "fixed_000002.png").unlink()
    run(tmp_path, job(iterations=3))
    assert fixed(tmp_path) == [0, 1, 2, 3]
    newest = tmp_path / "fixed" / "fixed_000003.png"
    before = newest.stat().st_mtime_ns
    run(tmp_path, job(iterations=4))
    assert fixed(tmp_path) == [0, 1, 2, 3, 4] and newest.stat().st_mtime_ns == before, "what is there is not drawn again"
