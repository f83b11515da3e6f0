"""The held-out judge: another way to see the same scenes."""

import numpy as np
import pytest
import torch
from scenes import CHANGES, DEGRADATIONS, changed_renders, true_renders

from mixgrpo.backend.files import StorageError, load_metadata, load_tensors, save_tensors
from mixgrpo.backend.rewards import HELD_OUT, BatchError, Scorer, make_scorer
from mixgrpo.backend.rewards.scene import is_right
from mixgrpo.backend.rewards.scene_reader import read_scenes
from mixgrpo.backend.starter import world
from mixgrpo.backend.starter.judge import CLASSES, WEIGHTS, HeldOutJudge, JudgeNetwork, stated_classes, train_judge
from mixgrpo.backend.starter.judge_scenes import JudgeScenes, draw_no_scene
from mixgrpo.backend.starter.latents import fit_code

CAPTION = "a red square on a white background"
shipped = pytest.mark.skipif(not WEIGHTS.exists(), reason="the starter's weights are not laid out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A starter folder with a latent code and a judge that has hardly learnt."""
    folder = tmp_path_factory.mktemp("starter")
    fit_code(60, 0).save(folder / "latent_code.safetensors")
    train_judge(folder, seed=0, steps=2, scenes=30, batch=12, checked=10)
    return folder


def test_is_small_and_writes_a_small_file(folder):
    assert sum(parameter.numel() for parameter in JudgeNetwork().parameters()) <= 150_000
    assert (folder / "judge.safetensors").stat().st_size <= 300_000
    assert load_metadata(folder / "judge.safetensors") == {"seed": "0", "steps": "2"}


def test_training_is_a_function_of_the_seed(folder, tmp_path):
    def trained(seed: int) -> dict[str, torch.Tensor]:
        train_judge(tmp_path, seed=seed, steps=2, scenes=30, batch=12, checked=10)
        return load_tensors(tmp_path / "judge.safetensors")

    (tmp_path / "latent_code.safetensors").write_bytes((folder / "latent_code.safetensors").read_bytes())
    first = load_tensors(folder / "judge.safetensors")
    assert all(torch.equal(tensor, first[name]) for name, tensor in trained(0).items())
    assert not torch.equal(trained(1)["heads.axis.weight"], first["heads.axis.weight"])


def test_batches_are_a_function_of_seed_and_step(folder):
    scenes = JudgeScenes(folder / "latent_code.safetensors", 30, seed=0)
    pictures, rows, well_formed = scenes.batch(5, 20)
    assert pictures.shape == (20, 3, 64, 64) and pictures.min() >= 0 and pictures.max() <= 1
    assert well_formed.sum() == 14 and rows.max() < 30
    assert torch.equal(scenes.batch(5, 20)[0], pictures) and not torch.equal(scenes.batch(6, 20)[0], pictures)


def test_only_pictures_that_show_their_caption_are_called_well_formed(folder):
    scenes = JudgeScenes(folder / "latent_code.safetensors", 100, seed=0)
    pictures, rows, well_formed = scenes.batch(0, 200)
    right = make_scorer("scene_accuracy").score(pictures, [scenes.captions[row] for row in rows])
    bent = slice(140, 164)
    assert right[well_formed].mean() > 0.5
    assert right[~well_formed].mean() < 0.1 and right[bent].mean() < 0.1


def test_pictures_that_are_no_scenes_are_none():
    """The training set's negatives, seen by the reward: hardly one is right under the caption it began from."""
    rng = np.random.default_rng(0)
    scenes = read_scenes(np.stack([np.asarray(draw_no_scene(rng), np.float32) for _ in range(200)]))
    layouts = [world.parse_caption(caption) for caption in world.single_captions() + world.pair_captions()]
    assert sum(any(is_right(scene, layout) for layout in layouts) for scene in scenes) <= 20


def test_states_what_the_caption_says():
    classes = stated_classes(world.parse_caption("a red circle below a blue square on a black background"))
    names = {name: CLASSES[name][index] for name, index in classes.items()}
    assert names == {
        "axis": "vertical", "background": "black", "first_colour": "blue", "first_shape": "square",
        "second_colour": "red", "second_shape": "circle",
    }
    single = stated_classes(world.parse_caption(CAPTION))
    assert CLASSES["second_colour"][single["second_colour"]] == CLASSES["second_shape"][single["second_shape"]] == "none"


def test_score_is_a_product_of_probabilities(folder):
    judge = HeldOutJudge.load(folder / "judge.safetensors")
    assert isinstance(judge, Scorer) and judge.held_out and judge.name in HELD_OUT
    image = torch.rand(1, 3, 64, 64)
    every = world.single_captions()
    scores = judge.score(image.expand(len(every), -1, -1, -1), every)
    assert (scores > 0).all() and scores.sum() < 1
    assert torch.allclose(judge.score(image, every[:1]), scores[:1], rtol=1e-4)


def test_bad_input(folder, tmp_path):
    judge = HeldOutJudge.load(folder / "judge.safetensors")
    assert judge.score(torch.zeros(0, 3, 64, 64), []).shape == (0,)
    images = torch.rand(3, 3, 96, 96)
    images[1] = torch.nan
    assert judge.score(images, [CAPTION] * 3).isnan().tolist() == [False, True, False]
    with pytest.raises(BatchError, match="2 pictures for 1 prompts"):
        judge.score(torch.zeros(2, 3, 64, 64), [CAPTION])
    with pytest.raises(world.CaptionError):
        judge.score(torch.zeros(1, 3, 64, 64), ["a cat"])
    with pytest.raises(StorageError, match="does not exist"):
        HeldOutJudge.load(tmp_path / "judge.safetensors")
    save_tensors(tmp_path / "other.safetensors", {"weight": torch.zeros(3)})
    with pytest.raises(StorageError, match="does not hold the held-out judge"):
        HeldOutJudge.load(tmp_path / "other.safetensors")


@shipped
def test_shipped_judge_reads_true_renders():
    images, captions = true_renders(1000, seed=21)
    scores = make_scorer("held_out_judge").score(images, captions)
    assert (scores > 0.5).float().mean() >= 0.99
    assert scores.mean() >= 0.97


@shipped
@pytest.mark.parametrize("change", CHANGES)
def test_shipped_judge_sees_what_changed(change):
    images, captions = changed_renders(change, 300, seed=22)
    assert make_scorer("held_out_judge").score(images, captions).mean() <= 0.05


@shipped
@pytest.mark.parametrize("degradation", DEGRADATIONS)
def test_shipped_judge_accepts_degraded_renders(degradation):
    images, captions = true_renders(300, seed=23)
    assert make_scorer("held_out_judge").score(DEGRADATIONS[degradation](images), captions).mean() >= 0.85


@shipped
def test_shipped_judge_takes_noise_for_no_scene():
    images = torch.rand(20, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    assert make_scorer("held_out_judge").score(images, [CAPTION] * 20).max() < 0.1
