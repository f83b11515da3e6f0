"""Two ranks under PyTorch's launcher, over gloo, against one rank without any."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_jobs import ENVIRONMENT, LAUNCHER, job, lora_bytes, numbers, run
from two_ranks import CASES, STRAIGHT, first_gradient

from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.models.lora_export import load_lora
from mixgrpo.backend.starter.load import load_starter
from mixgrpo.backend.train import launch
from mixgrpo.backend.train.adapter import adapter_hash
from mixgrpo.backend.train.launch import LaunchError, run_job, starting_from
from mixgrpo.backend.train.ranks import RankError, Ranks
from mixgrpo.backend.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """What two real processes wrote."""
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [*LAUNCHER, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def facts(out: Path, rank: int) -> dict:
    return json.loads((out / f"rank_{rank}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_the_reduced_gradient_is_that_of_one_rank(out, number):
    spec = job(**list(CASES.values())[number])
    two = load_tensors(out / f"gradient_{number}.safetensors")
    one, _ = first_gradient(spec, Ranks.join())
    assert two.keys() == one.keys()
    silent = [name for name, value in one.items() if value.norm() == 0]
    assert all("attn.add_q_proj" in name for name in silent) and len(silent) <= 2  # the last block drops its text's output
    together, alone = (torch.cat([tensors[name].flatten().double() for name in sorted(one)]) for tensors in (two, one))
    assert (together - alone).norm() / alone.norm() <= (1e-10 if spec.model.precision == "float64" else 1e-5)


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_every_rank_makes_the_same_number_of_model_calls_whatever_is_dropped(out, number):
    first, second = facts(out, 0)["rows"][number], facts(out, 1)["rows"][number]
    assert first == second and all(first.values())
    _, alone = first_gradient(job(**list(CASES.values())[number]), Ranks.join())
    assert {name: 2 * count for name, count in first.items()} == alone
    assert ("reference" in first) == ("objective" in list(CASES.values())[number])


def test_parameters_are_sharded_and_equal_on_all_ranks_after_every_update(out):
    first, second = facts(out, 0), facts(out, 1)
    assert len(set(first["hashes"])) == 2 and first["hashes"] == second["hashes"]
    whole = [2 * rows for rows, *_ in first["shards"][0]]
    assert [a[0] + b[0] for a, b in zip(first["shards"][0], second["shards"][0], strict=True)] == whole
    assert first["hashes"][-1] == RunFolder(out / "straight").iterations()[0]["adapter_hash"]
    assert first["threads"] == 1


def test_a_run_of_two_ranks_repeats_one_ranks_numbers(out, tmp_path):
    """Not bit for bit: sums have another order, which Adam's division by the gradient's own size enlarges."""
    two, one = RunFolder(out / "straight").iterations(), run(tmp_path, job(**STRAIGHT))
    assert [event["rows"] for event in two] == [event["rows"] for event in one]
    assert [event["window"] for event in two] == [event["window"] for event in one]
    for ours, theirs in zip(two, one, strict=True):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-2)
    assert two[0]["scores"]["jpeg_compressibility"] == pytest.approx(one[0]["scores"]["jpeg_compressibility"], rel=1e-3)
    start = RunFolder(out / "straight").events()[0]
    assert start["event"] == "start" and start["ranks"] == 2


def test_two_ranks_stopped_and_continued_repeat_themselves_bit_for_bit(out):
    straight, stopped = RunFolder(out / "straight"), RunFolder(out / "stopped")
    assert numbers(stopped.iterations()) == numbers(straight.iterations())
    assert lora_bytes(out / "stopped") == lora_bytes(out / "straight")
    assert [event["from_iteration"] for event in stopped.events() if event["event"] == "start"] == [0, 1]
    adapter = load_lora(stopped.lora_file("mixgrpo", 2), load_starter().transformer)
    assert (adapter.rank, adapter.alpha) == (2, 4.0)
    assert adapter_hash(adapter.tensors) == straight.iterations()[-1]["adapter_hash"]


def test_two_ranks_start_from_a_lora_as_one_does(out, tmp_path):
    lora = out / "straight" / "lora" / "mixgrpo_000002.safetensors"
    spec = starting_from(job(**STRAIGHT | {"seed": 6, "iterations": 1}), lora)
    run_job(spec, tmp_path, start=lora)
    (two,), (one,) = RunFolder(out / "started").iterations(), RunFolder(tmp_path).iterations()
    assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-2)
    same = adapter_hash(load_lora(lora, load_starter().transformer).tensors)
    assert facts(out, 0)["begun"] == facts(out, 1)["begun"] == same


def test_one_rank_continues_what_two_began_and_says_so(out):
    events = run(out / "straight", job(**STRAIGHT | {"iterations": 3}))
    assert [event["iteration"] for event in events] == [1, 2, 3]
    changed = [event for event in RunFolder(out / "straight").events() if event["event"] == "layout_changed"]
    assert [(event["was"]["ranks"], event["now"]["ranks"]) for event in changed] == [(2, 1)]


def test_prompts_that_cannot_be_shared_equally_are_refused(out, tmp_path):
    sentence = "3 prompts per iteration cannot be shared equally by 2 ranks; choose a multiple of 2"
    assert facts(out, 0)["refusal"] == facts(out, 1)["refusal"] == sentence
    with pytest.raises(RankError, match=sentence):
        run_job(job(prompts_per_iteration=3), tmp_path / "run", ranks=2)
    assert not (tmp_path / "run").exists()


def test_two_launched_ranks_continue_what_one_began_and_say_so(tmp_path, monkeypatch, capfd):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run(tmp_path / "run", job(prompts_per_iteration=2, iterations=1))
    alone = run(tmp_path / "alone", job(prompts_per_iteration=2, iterations=2))
    lora = run_job(job(prompts_per_iteration=2, iterations=2), tmp_path / "run", ranks=2)
    folder = RunFolder(tmp_path / "run")
    assert lora == folder.lora_file("mixgrpo", 2) and lora.exists()
    assert folder.read_history().layout_changes == [{"iteration": 1, "was": {"ranks": 1}, "now": {"ranks": 2}}]
    assert capfd.readouterr().out.count("with another layout (ranks 1 -> 2)") == 1
    assert folder.iterations()[-1]["gradient_norm"] == pytest.approx(alone[-1]["gradient_norm"], rel=1e-2)


def _failing_python(folder: Path) -> str:
    python = folder / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o700)
    return str(python)


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_a_failure_of_the_processes_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "sys", SimpleNamespace(executable=_failing_python(tmp_path)))
    with pytest.raises(LaunchError, match="the 2 worker processes ended with code 3; .* the same command continues"):
        run_job(job(prompts_per_iteration=2), tmp_path, ranks=2)
    RunFolder(tmp_path).lock()  # nobody holds the run any more
