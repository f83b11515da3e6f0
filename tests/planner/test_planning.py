"""mixgrpo plan: what it promises, against what really happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from held import HeldBytes, measured
from training_jobs import job, run, trainer

from mixgrpo.backend.files import load_json, save_json
from mixgrpo.backend.flow.window import WindowError
from mixgrpo.backend.models.base import ModelError
from mixgrpo.backend.models.families import load_model
from mixgrpo.backend.planner.memory import phase_bytes, sizes
from mixgrpo.backend.planner.plan import BadSize, DoesNotFit, make_plan, parse_size
from mixgrpo.backend.planner.rows import rows_by_window
from mixgrpo.backend.rewards import ScorerError
from mixgrpo.backend.train import adapter
from mixgrpo.backend.train.ranks import RankError
from mixgrpo.backend.train.worker import train

NOT_SHARED = {"steps": 4, "window": {"size": 2}, "shared_noise": False}
BFLOAT16 = {"model": {"precision": "bfloat16"}, "optimizer": {"clip_range": 0.3}}
KL = {"kl": {"weight": 0.1}}
FLASH = {"solver_after": "dpmpp_2m", "ratio": 0.4}
TOLERANCE, ABOVE_WEIGHTS = 0.1, 0.3
"""Of a phase's peak, and of what of it is more than the weights."""


@pytest.fixture
def no_weights(monkeypatch):
    """Loading any fails."""

    def refuse(*_, **__):
        raise AssertionError("a plan loads no weights")

    monkeypatch.setattr("diffusers.SD3Transformer2DModel.from_pretrained", refuse)
    monkeypatch.setattr("transformers.CLIPTextModelWithProjection.from_pretrained", refuse)
    monkeypatch.setattr("mixgrpo.backend.starter.load.load_tensors", refuse)


@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 16, "targets": "attention+mlp"}])
def test_parameters_are_those_of_the_model(places, lora):
    spec = job(lora=lora)
    model = load_model(spec.model, torch.device("cpu"))
    parts = {"transformer": model.transformer, "text_encoder": model.text_encoder, "vae": model.vae}
    real = {name: sum(value.numel() for value in part.parameters()) for name, part in parts.items()}
    adapter.add_adapter(model.transformer, spec.lora, 0)
    real["lora"] = sum(value.numel() for value in adapter.adapter_parameters(model.transformer).values())
    assert make_plan(spec).parameters == real


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"steps": 7, "window": {"size": 2, "stride": 1, "every": 1}}, "iterations": 5},
        {"sampling": {"steps": 7, "window": {"size": 3, "stride": 2, "every": 1}, "guidance": 3.0}, "iterations": 3},
        {"sampling": {"steps": 6, "window": {"size": 2, "stride": 2, "every": 1}, "shared_noise": False}, "iterations": 2},
        {"sampling": {"steps": 9, "window": {"size": 2, "stride": 3, "every": 1}, "mode": FLASH}, "iterations": 3},
        {"sampling": {"steps": 6, "window": {"size": 1, "stride": 2, "every": 1}, "mode": {"solver": "heun"}}, "iterations": 3},
        {"sampling": {"steps": 6, "window": {"size": 3}, "guidance": 2.0}, "iterations": 1, "objective": KL},
        {"sampling": {"steps": 7, "window": {"size": 4}}, "iterations": 1, "objective": {"trained_steps": 2}, "seed": 1},
        {"sampling": {"steps": 7, "window": {"size": 4}}, "iterations": 1, "objective": {"trained_steps": 2}, "seed": 5},
        {"sampling": {"steps": 6, "window": {"size": 3}}, "iterations": 1, "group_size": 6, "advantage": {"best_and_worst": 4}},
    ],
)
def test_rows_of_every_window_are_what_the_hook_counts(changes):
    changes = {"group_size": 4, "prompts_per_iteration": 2, "optimizer": {"updates_per_rollout": 2}, **changes}
    planned = rows_by_window(job(**changes))
    one, counted = trainer(**changes), []
    one.model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: counted.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    assert [row.iterations for row in planned] == [1] * changes["iterations"]
    for number, row in enumerate(planned):
        event = one.train_iteration()
        assert event["window"] == [row.window.start, row.window.size]
        assert (event["rows"]["rollout"], event["rows"]["training"]) == (row.rollout, row.training)
        replay = row.replay if number == 0 else 0
        assert (event["rows"].get("replay", 0), event["rows"].get("reference", 0)) == (replay, row.reference)
        assert sum(counted) == row.rollout + row.training + row.reference + replay
        counted.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows_per_call": 4},
        {"lora": {"targets": "attention+mlp", "rank": 32}, "sampling": NOT_SHARED | {"guidance": 2.0}},
        BFLOAT16,
        BFLOAT16 | {"lora": {"targets": "attention+mlp"}},
        {"model": {"precision": "float64"}},
        {"sampling": NOT_SHARED | {"width": 128}, "group_size": 2},
        {"sampling": {"steps": 4, "window": {"size": 3}}, "group_size": 12, "optimizer": {"updates_per_rollout": 2}},
    ],
    ids=lambda changes: ", ".join(changes) or "plain",
)
def test_memory_of_every_phase_is_what_tensors_hold(changes, monkeypatch):
    changes = {"sampling": NOT_SHARED, "group_size": 4, "prompts_per_iteration": 2, **changes}
    spec = job(**changes)
    promised = phase_bytes(spec, sizes(spec), spec.rows_per_call)
    one = trainer(**changes)
    weights = HeldBytes([*one.model.transformer.parameters(), *one.model.vae.parameters()]).now
    held = measured(one, monkeypatch)
    for phase in ("rollout", "decode", "training"):
        assert promised[phase] == pytest.approx(held[phase], rel=TOLERANCE), phase
        assert promised[phase] - weights == pytest.approx(held[phase] - weights, rel=ABOVE_WEIGHTS), phase


def test_memory_of_embedding_the_prompts():
    spec = job(prompts=[f"a red circle on a {colour} background" for colour in ("white", "black") * 20])
    model = load_model(spec.model, torch.device("cpu"))
    parts = (model.transformer, model.text_encoder, model.vae)
    held = HeldBytes([tensor for part in parts for tensor in (*part.parameters(), *part.buffers())])
    with held, held.phase("text"):
        kept = model.encode(list(spec.prompts)), model.encode([spec.negative_prompt])
    assert len(kept) == 2
    assert phase_bytes(spec, sizes(spec), spec.rows_per_call)["text"] == pytest.approx(held.peak["text"], rel=TOLERANCE)


def test_nothing_is_loaded(places, no_weights):
    plan = make_plan(job())
    assert plan.device == "cpu" and plan.available > plan.needed > max(plan.memory.values()) and plan.past is None
    assert json.loads(json.dumps(plan.as_data()))["rows"][0]["seconds"] is None


def test_what_cannot_fit_is_refused_with_what_would(places):
    spec = job(group_size=64, prompts_per_iteration=4, optimizer={"updates_per_rollout": 64}, sampling={"guidance": 2.0})
    everything = make_plan(spec)
    with pytest.raises(DoesNotFit, match="set rows_per_call to 128") as refusal:
        make_plan(spec, memory=everything.needed - 1)
    assert f"phase {max(everything.memory, key=everything.memory.get)}" in str(refusal.value)
    less = make_plan(spec.model_copy(update={"rows_per_call": 128}), memory=everything.needed - 1)
    assert less.rows == everything.rows and less.needed < everything.needed
    with pytest.raises(DoesNotFit, match="even with rows_per_call 1 it does not fit"):
        make_plan(spec, memory=2**20)
    assert make_plan(spec, memory=everything.needed).available == everything.needed


def test_ranks_share_the_work_and_on_the_cpu_the_memory(places):
    spec = job(group_size=8, prompts_per_iteration=4)
    one, two = make_plan(spec), make_plan(spec, ranks=2)
    assert one.rows == two.rows and two.needed > one.needed and sizes(spec, 2).adapter * 2 == sizes(spec).adapter
    with pytest.raises(RankError, match="multiple of 3"):
        make_plan(spec, ranks=3)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rewards": [{"scorer": "taste"}]}, ScorerError),
        ({"sampling": {"width": 72}}, ModelError),
        ({"sampling": {"steps": 6, "window": {"size": 2, "policy": "random", "last": 2, "first": 3}}}, WindowError),
    ],
)
def test_what_the_trainer_would_refuse_is_refused(places, changes, error):
    with pytest.raises(error):
        make_plan(job(**changes))


def test_time_comes_from_the_newest_run_of_the_same_kind(places):
    spec = job(group_size=4, iterations=3)
    folder = places / "data" / "runs" / "0123456789abcdef"
    events = run(folder, spec)
    other = spec.model_copy(update={"prompts_per_iteration": 2, "iterations": 10})
    plan = make_plan(other)
    assert plan.past.folder == folder and plan.past.iterations == 3
    (row,) = plan.rows
    rates = [sorted(event["seconds"][name] / event["rows"][name] for event in events)[1] for name in ("rollout", "training")]
    pictures = sorted((event["seconds"]["decode"] + event["seconds"]["score"]) / 4 for event in events)[1]
    expected = row.rollout * rates[0] + row.training * rates[1] + 8 * pictures
    assert plan.seconds(row) == pytest.approx(expected) and plan.total_seconds == pytest.approx(10 * expected)
    assert make_plan(other, ranks=2).past is None
    for changes in ({"sampling": {"width": 128}}, {"model": {"precision": "float64"}}):
        assert make_plan(job(**changes)).past is None
    (folder / "spec.json").write_text("{}")
    assert make_plan(other).past is None


def test_a_run_in_the_current_folder_counts_too(places):
    run(places / "runs" / "mine", job(iterations=1))
    assert make_plan(job()).past.folder.name == "mine"


def test_groups_that_ranks_split_have_their_beginning_on_each():
    spec = job(group_size=8, prompts_per_iteration=2, sampling={"steps": 7, "window": {"size": 2, "start": 2}})
    (whole,), (split,) = rows_by_window(spec, 2), rows_by_window(spec, 4)
    assert (split.rollout - whole.rollout, split.training - whole.training, split.replay - whole.replay) == (2 * 3, 2, 2)
    assert make_plan(spec, 4).memory["rollout"] < make_plan(spec, 2).memory["rollout"]


def test_an_average_is_planned_for():
    plain, averaged = (make_plan(job(ema=ema)) for ema in (None, {"every": 1}))
    assert averaged.disk["checkpoint"] == plain.disk["checkpoint"] * 4 / 3
    assert averaged.memory["training"] - plain.memory["training"] == plain.disk["lora"]


def test_disk_is_what_the_files_take(places):
    spec = job(lora={"rank": 16}, iterations=5, checkpoint_every=2, keep_checkpoints=1)
    train(places / "run", spec)
    disk = make_plan(spec).disk
    loras = list((places / "run" / "lora").iterdir())
    assert disk["loras"] == len(loras) == 3
    (checkpoint,) = (places / "run" / "checkpoints").glob("*.safetensors")
    assert disk["lora"] == pytest.approx(loras[0].stat().st_size, rel=0.05)
    assert disk["checkpoint"] == pytest.approx(checkpoint.stat().st_size, rel=0.05)
    assert disk["total"] == 3 * disk["lora"] + 2 * disk["checkpoint"]
    fewer = make_plan(spec.model_copy(update={"iterations": 100, "keep_loras_every": 50})).disk
    assert fewer["loras"] == 4  # 50, 98, 100, and perhaps another that is the best


@pytest.mark.parametrize(
    ("text", "bytes_"), [("8GiB", 2**33), ("8g", 2**33), (" 1.5 MiB ", 3 * 2**19), ("2GB", 2_000_000_000), ("4096", 4096)]
)
def test_amounts_of_memory(text, bytes_):
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "8XB", "8 GiB each"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(BadSize, match="write it like 8GiB"):
        parse_size(text)


def test_the_command_shows_plans_and_refuses(places):
    save_json(places / "job.json", job(iterations=30).model_dump(mode="json"))

    def plan(*options):
        command = [sys.executable, "-m", "mixgrpo.backend.cli", "plan", "job.json", *options]
        variables = os.environ | {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)

    shown = plan()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "time          unknown" in shown.stdout and "transformer 3,790,144" in shown.stdout
    answer = json.loads(plan("--json").stdout)
    assert answer["rows"] == make_plan(job(iterations=30)).as_data()["rows"] and answer["memory"].keys() >= {"training"}
    refused = plan("--memory", "64MiB")
    assert refused.returncode == 1 and refused.stdout.startswith("error DoesNotFit: ")
    assert load_json(places / "job.json")["iterations"] == 30 and sorted(file.name for file in places.iterdir()) == ["job.json"]
