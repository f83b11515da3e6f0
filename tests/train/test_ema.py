"""The moving average and the learning rate: their formulas, and what is exported."""

from __future__ import annotations

import math

import pytest
import torch
from training_jobs import job, run, trainer

from mixgrpo.backend.files import load_metadata, load_tensors
from mixgrpo.backend.specs import EmaSpec, SpecError
from mixgrpo.backend.train.adapter import adapter_hash, adapter_tensors
from mixgrpo.backend.train.ema import Ema, ema_decay, learning_rate
from mixgrpo.backend.train.run_folder import RunFolder


def rates(updates: int, **optimizer) -> list[float]:
    spec = job(optimizer={"learning_rate": 2.0} | optimizer).optimizer
    return [learning_rate(spec, update) for update in range(updates)]


def test_the_learning_rate_rises_and_falls_as_written():
    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(5, warmup=4) == [0.5, 1.0, 1.5, 2.0, 2.0]
    found = rates(9, warmup=2, cosine=6)
    assert found == pytest.approx([1.0, 2.0, 2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4), 0, 0, 0], abs=1e-12)
    with pytest.raises(SpecError, match="cosine 4, where the learning rate is 0, must be above warmup 4"):
        rates(1, warmup=4, cosine=4)


def test_a_job_does_not_go_on_at_a_rate_of_nothing():
    assert job(iterations=10, optimizer={"updates_per_rollout": 2, "cosine": 20}, group_size=4).optimizer.cosine == 20
    with pytest.raises(SpecError, match="0 from update 18 on, and 10 iterations of 2 updates go on after it; train at most 9 it"):
        job(iterations=10, optimizer={"updates_per_rollout": 2, "cosine": 18}, group_size=4)


def test_the_optimiser_steps_at_that_rate():
    one, seen = trainer(optimizer={"updates_per_rollout": 2, "warmup": 4, "learning_rate": 1e-3}, iterations=2), []
    one.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    one.train_iteration()
    one.train_iteration()
    assert seen == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


def test_the_average_is_the_written_sum():
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    ema = Ema(EmaSpec(decay=0.3, every=2), {"a": parameter}, None)
    values, expected = [5.0, 2.0, 7.0, -1.0, 3.0, 4.0, 9.0], 1.0
    for update, value in enumerate(values):
        parameter.data.fill_(value)
        ema.after(update)
        if update % 2:
            decay = ema_decay(EmaSpec(decay=0.3), update // 2)
            expected = decay * expected + (1 - decay) * value
    assert ema.whole()["a"].item() == pytest.approx(expected, rel=1e-12)
    assert [ema_decay(EmaSpec(decay=0.3), n) for n in (0, 1, 2, 3)] == [0.1, 2 / 11, 3 / 12, 0.3]


@pytest.mark.parametrize("export", ["ema", "raw"])
def test_the_lora_is_what_the_job_says_and_says_so(tmp_path, export):
    spec = job(ema={"every": 1, "export": export}, iterations=3, optimizer={"learning_rate": 1e-2})
    events = run(tmp_path, spec)
    folder = RunFolder(tmp_path)
    (file,) = tmp_path.glob("checkpoints/*03.safetensors")
    tensors = load_tensors(file)
    parts = {
        part: {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
        for part in ("adapter", "ema")
    }
    parts["raw"] = parts.pop("adapter")
    assert adapter_hash(parts["raw"]) == events[-1]["adapter_hash"] != adapter_hash(parts["ema"])
    lora = folder.lora_file(spec.name, 3)
    said = load_metadata(lora)
    assert (said["mixgrpo.weights"], said["mixgrpo.adapter"]) == (export, adapter_hash(parts[export]))
    saved = [event for event in folder.events() if event["event"] == "saved"]
    assert {event["weights"] for event in saved} == {export}
    up = next(value for name, value in sorted(load_tensors(lora).items()) if name.endswith("lora_up.weight") or "lora_B" in name)
    assert any(torch.equal(up, value) for value in parts[export].values())
    other = parts["raw" if export == "ema" else "ema"]
    assert not any(torch.equal(up, value) for value in other.values())


def test_swapped_in_it_is_what_draws_and_leaves_no_trace():
    one = trainer(ema={"every": 1}, optimizer={"learning_rate": 1e-2})
    one.train_iteration()
    before = adapter_hash(adapter_tensors(one.model.transformer))
    with one.ema.swapped_in():
        assert adapter_hash(adapter_tensors(one.model.transformer)) == adapter_hash(one.ema.whole()) != before
    assert adapter_hash(adapter_tensors(one.model.transformer)) == before


def test_an_average_changes_no_other_number(tmp_path):
    with_it, without = (run(tmp_path / name, job(ema=ema, iterations=3)) for name, ema in (("a", {"every": 1}), ("b", None)))
    assert [event["adapter_hash"] for event in with_it] == [event["adapter_hash"] for event in without]
