"""The shipped starter: its size, its files, and that it draws what it is said to draw."""

import json

import pytest
import torch

from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.models.base import ModelError
from mixgrpo.backend.rewards import make_scorer
from mixgrpo.backend.specs.job import parse_sampling
from mixgrpo.backend.starter import vae, world
from mixgrpo.backend.starter.load import VAE_FILE, WEIGHTS, load_starter
from mixgrpo.backend.train.evaluate import draw


def test_all_weights_together_are_at_most_16_mb_and_only_safetensors():
    files = [file for file in WEIGHTS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    assert {file.suffix for file in files} <= {".safetensors", ".json"}


def test_the_recorded_evaluation_is_within_the_starters_promise():
    evaluation = json.loads((WEIGHTS / "evaluation.json").read_text())
    best = evaluation["by_guidance"][f"{evaluation['best']:g}"]
    assert best["singles"] >= 0.9
    assert 0.4 <= best["pairs"] <= 0.75


def test_it_draws_as_the_recorded_evaluation_says():
    evaluation = json.loads((WEIGHTS / "evaluation.json").read_text())
    guidance = evaluation["best"]
    sampling = parse_sampling(
        {"steps": evaluation["steps"], "shift": evaluation["shift"], "guidance": guidance, "window": {"size": 1}}
    )
    captions = world.single_captions() * 2 + world.pair_captions()[::11]
    right = make_scorer("scene_accuracy").score(draw(load_starter(), captions, list(range(len(captions))), sampling), captions)
    recorded = evaluation["by_guidance"][f"{guidance:g}"]
    assert right[:48].mean().item() == pytest.approx(recorded["singles"], abs=0.15)  # 48 pictures: three deviations
    assert right[48:].mean().item() == pytest.approx(recorded["pairs"], abs=0.15)


def test_the_vae_file_survives_the_way_to_taesd_and_back():
    stored = load_tensors(VAE_FILE)
    back = vae.to_taesd(vae.from_taesd(stored))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    assert stored["vae_scale"].dtype == torch.float32


def test_a_picture_size_it_cannot_draw_is_refused():
    with pytest.raises(ModelError, match="multiples of 16 up to 128"):
        load_starter().latent_shape(72, 64)


def test_missing_weights_say_how_to_make_them(tmp_path):
    with pytest.raises(ModelError, match="backend.starter.make"):
        load_starter(folder=tmp_path)
