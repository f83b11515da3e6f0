"""A run that is asked to stop at every point where it looks: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from servers import attempts, events, fields, lora_bytes, numbers

from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.train.run_folder import RunFolder
from mixgrpo.backend.train.worker import Stopped, train

SPEC = parse_job(fields(iterations=3, checkpoint_every=100))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def asked_at(call: int, what: str):
    """Says ``what`` from its call of that number on; a run looks before every iteration and after every rollout."""
    calls = itertools.count(1)
    return lambda: what if next(calls) >= call else None


@pytest.mark.parametrize(("call", "reached"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_pause_saves_what_is_trained_and_the_rest_follows_bit_for_bit(tmp_path, uninterrupted, call, reached):
    with pytest.raises(Stopped, match="pause"):
        train(tmp_path, SPEC, asked=asked_at(call, "pause"))
    assert events(tmp_path)[-1] | {"event": "paused", "iteration": reached} == events(tmp_path)[-1]
    saved = sorted(file.name for file in tmp_path.glob("checkpoints/*.json"))
    assert saved == ([f"iteration_{reached:06d}.json"] if reached else [])
    lora = train(tmp_path, SPEC)
    assert lora.name == "small_000003.safetensors" and attempts(tmp_path) == 2
    assert numbers(tmp_path) == numbers(uninterrupted)[:3]
    assert lora_bytes(tmp_path, 3) == lora_bytes(uninterrupted, 3)


def test_a_cancelled_run_saves_nothing_new_and_obeys_the_control_file_once(tmp_path):
    run = RunFolder(tmp_path)
    for what, event in (("pause", "paused"), ("cancel", "cancelled")):
        run.request(what)
        with pytest.raises(Stopped, match=what):
            train(tmp_path, SPEC)
        assert events(tmp_path)[-1]["event"] == event
        assert run.requested() is None and not list(tmp_path.glob("checkpoints/*"))
    (tmp_path / "control").write_text("dance")
    assert run.requested() is None
