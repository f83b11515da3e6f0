"""A stage of the starter's training continues where it stopped, bit for bit."""

import torch
from torch import nn

from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.starter.stages import Stage


def run(folder, until, stops=()):
    """Train a small network to ``until``, in a new process's place at every stop; returns the finished stage."""
    for end in (*stops, until):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        stage = Stage(folder, model, torch.optim.AdamW(model.parameters()), until, save_every=5)
        while stage.step < end:
            stage.set_learning_rate(1e-2, decay=8)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(stage.step))
            stage.update(model(x).square().mean())
    return stage


def test_a_stopped_stage_continues_bit_equal(tmp_path):
    whole, stopped = run(tmp_path / "whole", 12), run(tmp_path / "stopped", 12, stops=(5, 7))
    assert stopped.step == whole.step == 12
    for kind in ("model", "ema", "optimizer"):
        ours, theirs = load_tensors(stopped.file(kind)), load_tensors(whole.file(kind))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_averaged_weights_of_every_checkpoint_stay_and_raw_ones_of_the_newest(tmp_path):
    stage = run(tmp_path, 12)
    assert [stage.file("ema", step).exists() for step in (5, 10, 12)] == [True, True, True]
    assert [stage.file("model", step).exists() for step in (5, 10, 12)] == [False, False, True]
