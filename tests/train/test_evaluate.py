"""Drawing: a picture depends on its caption and seed, not on its company."""

import pytest
import torch
from training_jobs import PROMPTS, job

from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.models.base import RowCounter
from mixgrpo.backend.models.lora_export import load_lora
from mixgrpo.backend.rewards import make_scorer
from mixgrpo.backend.specs.job import parse_sampling
from mixgrpo.backend.starter.load import load_starter
from mixgrpo.backend.train.adapter import put_lora
from mixgrpo.backend.train.evaluate import EvaluationError, draw
from mixgrpo.backend.train.trainer import sigma_table
from mixgrpo.backend.train.worker import train

PAIRS = [(PROMPTS[index % 3], 100 + index) for index in range(7)]


@pytest.fixture(scope="module")
def model():
    return load_starter()


def sampling(**changes):
    return parse_sampling({"steps": 4, "window": {"size": 1}} | changes)


def pictures(model, pairs, settings, **options):
    prompts, seeds = zip(*pairs, strict=True)
    return draw(model, prompts, seeds, settings, **options)


def farthest(ours, theirs):
    """Largest relative L2 distance of a picture."""
    return ((ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)).max()


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_picture_is_the_same_in_any_company(model, guidance):
    settings = sampling(guidance=guidance)
    together = pictures(model, PAIRS, settings)
    assert together.shape == (7, 3, 64, 64) and together.dtype == torch.float32
    assert 0 <= together.min() and together.max() <= 1
    for batch in (1, 3):
        assert farthest(pictures(model, PAIRS, settings, batch=batch), together) <= 1e-5
    assert farthest(pictures(model, PAIRS[::-1], settings).flip(0), together) <= 1e-5
    assert farthest(pictures(model, PAIRS[4:5], settings), together[4:5]) <= 1e-5
    assert min((a - b).abs().max() for index, a in enumerate(together) for b in together[:index]) > 0.1


def test_a_picture_is_euler_from_comfyuis_noise(model):
    """The whole table by hand: x' = x + v (sigma' - sigma) from the noise that ComfyUI draws for that seed at batch size 1."""
    settings = sampling()
    x, table = initial_noise(5, (1, 16, 8, 8)), sigma_table(settings)
    with torch.no_grad():
        for sigma, sigma_next in zip(table, table[1:], strict=False):
            x = x + model.velocity(x, sigma, model.encode([PROMPTS[0]])) * (sigma_next - sigma)
    assert (draw(model, [PROMPTS[0]], [5], settings) - model.decode(x)).abs().max() <= 1e-6


@pytest.mark.parametrize(("guidance", "negative", "rows"), [(1.0, "", 1), (1.0, "a red circle", 1), (2.0, "", 2), (0.0, "", 2)])
def test_guidance_one_costs_one_evaluation(model, guidance, negative, rows):
    counter = RowCounter(model.transformer)
    pictures(model, PAIRS, sampling(guidance=guidance), negative_prompt=negative, batch=3)
    counter.close()
    assert counter.take() == {"other": rows * 4 * len(PAIRS)}


def test_the_negative_prompt_is_heard_when_there_is_guidance(model):
    one, other = (
        {text: pictures(model, PAIRS[:2], sampling(guidance=guidance), negative_prompt=text) for text in ("", PROMPTS[0])}
        for guidance in (1.0, 3.0)
    )
    assert torch.equal(one[""], one[PROMPTS[0]]) and not torch.allclose(other[""], other[PROMPTS[0]], atol=1e-2)


@pytest.mark.parametrize("seeds", [[], [1], [1, 2, 3]])
def test_every_prompt_needs_a_seed_of_its_own(model, seeds):
    with pytest.raises(EvaluationError, match=f"^2 prompts and {len(seeds)} seeds; give one seed for every prompt$"):
        draw(model, PROMPTS[:2], seeds, sampling())


def test_progress_counts_pictures(model):
    seen = []
    pictures(model, PAIRS, sampling(), batch=3, on_batch=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_guidance_draws_what_the_captions_say(model):
    """Nine captions of one shape: an untrained, mis-scaled or mis-conditioned model draws none of them right."""
    captions = [f"a {colour} {shape} on a white background" for colour in ("red", "green", "blue") for shape in SHAPES]
    drawn = draw(model, captions, range(9), parse_sampling({"steps": 12, "guidance": 2.0, "window": {"size": 1}}))
    assert make_scorer("scene_accuracy").score(drawn, captions).mean() >= 0.5


SHAPES = ("circle", "square", "triangle")


def test_a_lora_from_a_run_changes_the_picture_and_a_fresh_one_does_not(model, tmp_path):
    lora = train(tmp_path, job(iterations=1, optimizer={"learning_rate": 0.05}))
    trained = load_starter()
    put_lora(trained.transformer, load_lora(lora, trained.transformer))
    before, after = (pictures(which, PAIRS[:2], sampling()) for which in (model, trained))
    assert (before - after).abs().max() > 1e-3
    for name, parameter in trained.transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert torch.allclose(pictures(trained, PAIRS[:2], sampling()), before, atol=1e-6)
