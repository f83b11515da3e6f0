"""Starting from an existing LoRA: the first pictures are that LoRA's, and whatever does not fit is said in one sentence."""

from __future__ import annotations

import math

import pytest
import torch
from training_jobs import job, lora_bytes, numbers, snapshot
from training_jobs import trainer as make_trainer

from mixgrpo.backend.demo import load_with_lora
from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.files import StorageError, load_metadata, load_tensors, save_tensors, sha256_of
from mixgrpo.backend.specs import SpecError
from mixgrpo.backend.train import trainer
from mixgrpo.backend.train.adapter import AdapterError
from mixgrpo.backend.train.launch import run_job, starting_from
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.run_folder import RunError, RunFolder
from mixgrpo.backend.train.trainer import Trainer, TrainingError
from mixgrpo.backend.train.worker import train

BIG_STEP = {"learning_rate": 0.05}


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """LoRAs of one iteration that visibly change the pictures: plain, rsLoRA, and of the MLP layers too."""
    folder = tmp_path_factory.mktemp("loras")
    kinds = {"plain": {}, "rslora": {"rslora": True}, "mlp": {"targets": "attention+mlp"}}
    return {name: train(folder / name, job(iterations=1, optimizer=BIG_STEP, lora=lora)) for name, lora in kinds.items()}


def begun(file, **changes):
    """A trainer that starts from the file."""
    return Trainer(starting_from(job(**changes), file), Ranks.join(), start=file)


@pytest.mark.parametrize("kind", ["plain", "rslora"])
def test_the_first_pictures_are_those_of_the_lora(loras, kind):
    """Against the base model with the file put on it as `mixgrpo sample` does, which knows no rsLoRA, only the file's alpha."""
    started = begun(loras[kind], seed=7, lora={"rslora": kind == "rslora"}).collect()
    plain = make_trainer(seed=7)
    base = plain.collect().pictures
    plain.model.transformer = load_with_lora(loras[kind]).transformer
    wanted = plain.collect().pictures
    assert (started.pictures - wanted).abs().max() <= (0 if kind == "plain" else 1e-5)
    assert (started.pictures - base).abs().max() > 1e-3


def test_training_goes_on_from_the_lora_with_a_fresh_optimiser(loras, tmp_path):
    spec = starting_from(job(iterations=2, seed=7), loras["plain"])
    last = run_job(spec, tmp_path / "run", start=loras["plain"])
    assert [event["iteration"] for event in RunFolder(tmp_path / "run").iterations()] == [1, 2]
    assert load_metadata(last)["mixgrpo.started_from"] == sha256_of(loras["plain"]) == spec.lora.start_from
    assert "mixgrpo.started_from" not in load_metadata(loras["plain"])
    before, after = load_tensors(loras["plain"]), load_tensors(tmp_path / "run" / "lora" / "mixgrpo_000001.safetensors")
    steps = [(after[name] - before[name]).abs().max() for name in before if "lora_" in name]
    assert 0 < max(steps) <= 1.01 * spec.optimizer.learning_rate  # Adam's first step from zero moments


def test_a_continued_run_needs_the_file_no_more(loras, tmp_path):
    spec = starting_from(job(iterations=2, seed=7), loras["plain"])
    run_job(spec, tmp_path / "straight", start=loras["plain"])
    first = spec.model_copy(update={"iterations": 1})
    run_job(first, tmp_path / "stopped", start=loras["plain"])
    (tmp_path / "stopped" / "start.safetensors").unlink()
    train(tmp_path / "stopped", spec)
    straight, stopped = (RunFolder(tmp_path / name).iterations() for name in ("straight", "stopped"))
    assert numbers(stopped) == numbers(straight) and lora_bytes(tmp_path / "stopped") == lora_bytes(tmp_path / "straight")


MISFITS = {
    "rank": ("plain", {"rank": 4, "alpha": 8}, "has rank 2, but lora.rank is 4; set lora.rank to 2"),
    "alpha": ("plain", {"alpha": 6}, "an alpha of 4, but lora.alpha 6 without rslora means 6; set lora.alpha to 4"),
    "rslora in the job": (
        "plain", {"rslora": True}, "alpha of 4, but lora.alpha 4 with rslora means 5.65685425; set lora.alpha to 2.82842712",
    ),
    "rslora in the file": (
        "rslora", {}, "alpha of 5.6568[0-9]*, but lora.alpha 4 without rslora means 4; set lora.alpha to 5.6568",
    ),
    "fewer layers": (
        "plain", {"targets": "attention+mlp"},
        r"adapts \d+ layers, but lora.targets attention\+mlp means \d+ \(.*\bff.* is in one of them only\); "
        "set lora.targets to attention$",
    ),
    "more layers": ("mlp", {}, r"but lora.targets attention means \d+ .*; set lora.targets to attention\+mlp$"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "lora", "sentence"), MISFITS.values(), ids=list(MISFITS))
def test_a_lora_of_another_form_is_refused_with_both_numbers(loras, tmp_path, monkeypatch, kind, lora, sentence):
    monkeypatch.setattr(trainer.adapter, "add_adapter", None)  # refused before
    spec = starting_from(job(lora=lora), loras[kind])
    with pytest.raises(AdapterError, match=f"^the LoRA to start from .*{sentence}"):
        run_job(spec, tmp_path, start=loras[kind])
    assert not RunFolder(tmp_path).events()


def test_setting_what_the_refusal_says_is_enough(loras):
    assert begun(loras["plain"], lora={"rslora": True, "alpha": 2.82842712}).iteration == 0
    assert begun(loras["rslora"], lora={"alpha": 4 * math.sqrt(2)}).iteration == 0


def test_layers_of_no_target_are_refused(loras, tmp_path):
    some = {name: value for name, value in load_tensors(loras["plain"]).items() if ".0.attn.to_q." not in name}
    file = save_tensors(tmp_path / "some.safetensors", some)
    with pytest.raises(AdapterError, match=r"\(transformer_blocks.0.attn.to_q is in one .*start from a LoRA that adapts exactly"):
        begun(file)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(lambda good: good[:-9], "not a readable safetensors file"), (lambda good: b"\x80\x04.", "pickle files")],
)
def test_a_file_that_is_no_lora_is_refused_in_the_words_of_its_reader(loras, tmp_path, content, sentence):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(content(loras["plain"].read_bytes()))
    with pytest.raises(StorageError, match=sentence):
        run_job(starting_from(job(), bad), tmp_path / "run", start=bad)
    foreign = save_tensors(tmp_path / "foreign.safetensors", {"double_blocks.0.lora_A.weight": torch.zeros(2, 2)})
    with pytest.raises(MixGRPOError, match="another family"):
        run_job(starting_from(job(), foreign), tmp_path / "run", start=foreign)  # in the same folder: nothing has begun


def test_the_folder_takes_and_gives_only_the_file_of_that_hash(loras, tmp_path):
    run, digest = RunFolder(tmp_path / "run"), sha256_of(loras["plain"])
    run.path.mkdir()
    with pytest.raises(RunError, match=f"start.safetensors is missing.*{digest[:12]}.*--start-from"):
        run.start_file(digest)
    with pytest.raises(RunError, match=f"is not the LoRA that the job starts from: .*lora.start_from says {digest[:12]}"):
        run.put_start(loras["mlp"], digest)
    assert snapshot(run.path) == {}
    run.put_start(loras["plain"], digest)
    run.put_start(tmp_path / "gone", digest)  # it is there already
    assert run.start_file(digest).read_bytes() == loras["plain"].read_bytes()
    with run.start_file(digest).open("ab") as file:
        file.write(b"x")
    with pytest.raises(RunError, match="is not the LoRA"):
        run.start_file(digest)
    run.put_start(loras["plain"], digest)
    run.start_file(digest)


def test_a_job_is_not_begun_without_its_file(loras, tmp_path):
    spec = starting_from(job(), loras["plain"])
    with pytest.raises(RunError, match="start.safetensors is missing"):
        train(tmp_path, spec)
    with pytest.raises(TrainingError, match="so its file must be given"):
        Trainer(spec, Ranks.join())


def test_another_file_than_the_job_names_is_refused(loras):
    spec = starting_from(job(), loras["plain"])
    assert starting_from(spec, loras["plain"]) == spec
    with pytest.raises(SpecError, match="lora.start_from of the job is .*, but the SHA-256 of .*; name the right file"):
        starting_from(spec, loras["mlp"])
    with pytest.raises(StorageError, match="cannot read .*nowhere.safetensors"):
        starting_from(spec, loras["plain"].with_name("nowhere.safetensors"))
