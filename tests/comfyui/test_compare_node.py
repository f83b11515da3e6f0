"""Compare Samplers in this process: the command line's numbers, counts by hook, foreign samplers, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from starter_graph import CAPTION, empty

from mixgrpo.backend.flow.plan import SamplingMode
from mixgrpo.backend.lab.compare import compare
from mixgrpo.backend.lab.results import conclude
from mixgrpo.backend.lab.run import ModelHost
from mixgrpo.backend.lab.spec import parse_compare
from mixgrpo.backend.models.base import RowCounter
from mixgrpo.backend.starter.load import load_starter

FLASH = SamplingMode(solver="heun", solver_after="dpmpp_2m", ratio=0.5)
EXACT = ("steps", "nfe", "rows", "failed")
CLOSE = ("rmse", "diversity", "reward_mean", "reward_low", "reward_high", "difference_mean", "difference_low", "difference_high")


@pytest.fixture(autouse=True)
def output(comfy, tmp_path, monkeypatch):
    """ComfyUI's output and temporary folders."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    return tmp_path / "output"


def entry(label: str, before=None, mode=None, sampler=None, sigmas=None, **widgets):
    from mixgrpo.nodes.compare_entry import CompareEntry

    settings = {"steps": 6, "schedule": "shift", "shift": 3.0, "eta": 0.7, "window_start": 1, "window_size": 2} | widgets
    more = {} if mode is None else {"mode": mode}
    return CompareEntry.execute(label, **settings, **more, sampler=sampler, sigmas=sigmas, entries=before).result[0]


def stock(comfy, graph, name: str, steps: int) -> dict:
    """One of ComfyUI's samplers, with the model's own table."""
    sigmas = comfy.samplers.calculate_sigmas(graph.model.get_model_object("model_sampling"), "simple", steps)
    return {"sampler": comfy.samplers.sampler_object(name), "sigmas": sigmas}


def run(graph, entries, model=None, latent=None, **widgets):
    from mixgrpo.nodes.compare import CompareSamplers

    settings = {"seed": 5, "seeds": 2, "group_size": 3, "cfg": 2.0, "reference_steps": 20, "equal_nfe": False} | widgets
    return CompareSamplers.execute(
        model or graph.model, graph.encode[CAPTION], graph.encode[""], latent or empty(1), graph.vae,
        entries, **settings,
    )  # fmt: skip


def scene_accuracy():
    from mixgrpo.nodes.rewards import SceneAccuracy

    return SceneAccuracy.execute(1.0, True).result[0]


def test_the_command_line_has_the_same_numbers(graph):
    entries = entry("euler", window_size=0)
    entries = entry("window", entries)
    entries = entry("flash", entries, FLASH, steps=9)
    output = run(graph, entries, rewards=scene_accuracy(), prompt=CAPTION)
    window = {"start": 1, "size": 2}
    mode = {"solver": "heun", "solver_after": "dpmpp_2m", "ratio": 0.5}
    spec = parse_compare({
        "entries": [
            {"label": "euler", "steps": 6, "window": {"start": 1, "size": 0}},
            {"label": "window", "steps": 6, "window": window},
            {"label": "flash", "steps": 9, "window": window, "mode": mode},
        ],
        "prompts": [CAPTION], "seed": 5, "seeds": 2, "group_size": 3, "guidance": 2.0, "reference_steps": 20,
        "rewards": [{"scorer": "scene_accuracy", "options": {"partial": True}}],
    })  # fmt: skip
    model, built = load_starter(folder=graph.folder), spec.built_entries()
    host = ModelHost(model, spec, built)
    results = compare(built, spec.cases(), host, reference_steps=20)
    pictures = [model.decode(result.latents.flatten(0, 1)).unflatten(0, (2, 3)) for result in results]
    ours = conclude({}, results, pictures, spec.cases(), spec.rewards).rows
    theirs = output.ui["mixgrpo_compare"]
    assert [row["label"] for row in theirs] == ["euler", "window", "flash"]
    for mine, other in zip(ours, theirs, strict=True):
        assert [mine[name] for name in (*EXACT, "sampler")] == [other[name] for name in (*EXACT, "sampler")]
        known = [name for name in CLOSE if mine[name] is not None]
        assert known == [name for name in CLOSE if other[name] is not None] and {*CLOSE[:3]} <= {*known}
        for name in known:
            assert other[name] == pytest.approx(mine[name], abs=1e-5, rel=1e-5), (mine["label"], name)
    flash = built[2].plan
    assert theirs[2]["nfe"] == flash.nfe and theirs[2]["rows"] == flash.rows(3, cfg=True)
    assert theirs[0]["diversity"] == 0 < theirs[1]["diversity"] and 0 < theirs[0]["rmse"] < theirs[1]["rmse"]


def test_a_picture_is_the_samplers_own(comfy, graph):
    from mixgrpo.nodes.sampler import FlowSampler

    grid, images, _, chart = run(graph, entry("window"), seed=40).result
    sampled = FlowSampler.execute(
        graph.model, graph.encode[CAPTION], graph.encode[""], empty(1), 41, 6, "shift", 3.0, 2.0,
        3, True, 0.7, 1, 2,
    ).result[0]["samples"]  # fmt: skip
    assert images.shape == (6, 64, 64, 3)
    assert torch.allclose(images[3:], graph.vae.decode(sampled).cpu(), atol=1e-5)
    for picture in (grid, chart):
        assert picture.ndim == 4 and picture.shape[0] == 1 and picture.shape[3] == 3 and 0 <= picture.min() <= picture.max() <= 1


def test_foreign_samplers_are_counted_by_what_they_call(comfy, graph):
    entries = None
    for name in ("euler", "heun", "euler_ancestral"):
        entries = entry(name, entries, **stock(comfy, graph, name, 6))
    counter = RowCounter(graph.model.model.diffusion_model)
    rows = run(graph, entries, seeds=1, reference_steps=0, cfg=2.0).ui["mixgrpo_compare"]
    counter.close()
    assert [row["nfe"] for row in rows] == [6, 11, 6]
    assert [row["rows"] for row in rows] == [6 * 3 * 2, 11 * 3 * 2, 6 * 3 * 2]
    assert counter.take() == {"other": sum(row["rows"] for row in rows) + rows[0]["rows"]}, "one draw warms up"
    assert [row["sampler"] for row in rows] == [f"{name} (SAMPLER)" for name in ("euler", "heun", "euler_ancestral")]
    assert max(rows[0]["diversity"], rows[1]["diversity"]) < 1e-5 < 0.01 < rows[2]["diversity"]  # rows of a batch may round apart
    assert all(row["rmse"] is None and row["reward_mean"] is None for row in rows)


def test_ksampler_draws_the_same_picture(comfy, graph):
    images = run(graph, entry("euler", **stock(comfy, graph, "euler", 6)), seeds=1, group_size=1).result[1]
    latent = torch.zeros(1, 16, 8, 8)
    theirs = comfy.sample.sample(
        graph.model, comfy.sample.prepare_noise(latent, 5), 6, 2.0, "euler", "simple", graph.encode[CAPTION], graph.encode[""],
        latent, seed=5, disable_pbar=True,
    )  # fmt: skip
    assert torch.allclose(images, graph.vae.decode(theirs).cpu(), atol=1e-5)


def test_a_part_of_a_table_has_a_reference_from_where_it_begins(comfy, graph):
    """From sigma 0.6 with a picture in the latent: with many steps Euler meets its reference, which noise alone would not."""
    latent = {"samples": torch.rand(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))}
    whole = stock(comfy, graph, "euler", 60)
    tail = whole["sigmas"][whole["sigmas"] < 0.7]
    entries = entry("tail", entry("whole", **whole), sampler=whole["sampler"], sigmas=tail)
    rows = run(graph, entries, latent=latent, seeds=1, group_size=1, reference_steps=120).ui["mixgrpo_compare"]
    assert max(row["rmse"] for row in rows) < 0.03


def test_a_mask_keeps_its_region(graph):
    picture = torch.rand(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    latent = {"samples": picture, "noise_mask": torch.zeros(1, 1, 8, 8)}
    images = run(graph, entry("a"), latent=latent, seeds=1, group_size=1).result[1]
    assert torch.allclose(images, graph.vae.decode(picture).cpu(), atol=1e-4)


def test_equal_nfe_is_known_before_or_after_the_first_seed(comfy, graph):
    from mixgrpo.backend.lab.entries import LabError

    entries = entry("heun", entry("euler", window_size=0), SamplingMode(solver="heun"), steps=6, window_size=0)
    counter = RowCounter(graph.model.model.diffusion_model)
    with pytest.raises(LabError, match="'heun' costs 11 function evaluations a sample and 'euler' costs 6.*no number of steps"):
        run(graph, entries, equal_nfe=True)
    assert counter.take() == {}, "something was drawn"
    with pytest.raises(LabError, match="'stock' costs 11 .* 'euler' costs 6.*sigmas of another length"):
        run(graph, entry("stock", entry("euler"), **stock(comfy, graph, "heun", 6)), equal_nfe=True, reference_steps=0)
    counter.close()
    run(graph, entry("stock", entry("euler"), **stock(comfy, graph, "euler", 6)), equal_nfe=True, reference_steps=0)


def test_results_are_kept_and_never_overwritten(graph, output):
    for number in (1, 2):
        result = run(graph, entry("a"), seeds=1, reference_steps=5)
        folder = output / "mixgrpo" / f"compare_{number:05d}"
        assert sorted(file.name for file in folder.iterdir()) == ["chart.png", "grid.png", "table.csv", "table.json"]
        kept = json.loads((folder / "table.json").read_text())
        assert kept == json.loads(result.result[2]) and kept["table"] == result.ui["mixgrpo_compare"]
        assert kept["settings"]["entries"][0]["schedule"] == "shift"
    assert result.ui["images"]
    json.dumps(result.ui, allow_nan=False)


def test_progress_counts_all_steps_and_interrupt_stops(comfy, graph, monkeypatch):
    import comfy.model_management
    import comfy.utils

    seen, shown = [], []

    class Bar:
        def __init__(self, total):
            self.total = total
            seen.append(total)

        def update_absolute(self, value, total=None, preview=None):
            seen.append(value)
            shown.append(preview)
            if value == 30:
                comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils, "ProgressBar", Bar)
    entries = entry("flash", entry("a"), FLASH, steps=9)
    run(graph, entries, seeds=1, reference_steps=5)
    total = 5 + 6 + 6 + 6  # reference, the draw that warms up, each entry: of flash's 9 steps 6 are taken
    assert seen[0] == total == seen[-1] and sorted(seen[1:]) == seen[1:]
    assert shown[-1][1].height > 128, "the page shows the last preview, not the output"
    for running in (entries, entry("stock", **stock(comfy, graph, "euler", 6))):
        seen.clear()
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            run(graph, running, seeds=9, reference_steps=5)
        assert seen[-1] == 30


def test_nothing_given_is_changed(graph):
    latent = empty(1)
    options, wrappers = str(graph.model.model_options), str(graph.model.wrappers)
    before = entry("a")
    run(graph, entry("b", before), latent=latent, seeds=1)
    assert len(before) == 1 and str(graph.model.model_options) == options and str(graph.model.wrappers) == wrappers
    assert not latent["samples"].any()


def refusals(comfy, graph) -> dict:
    """Name -> (function, the sentence)."""
    import comfy.model_sampling

    class Discrete(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
        pass

    eps = graph.model.clone()
    eps.add_object_patch("model_sampling", Discrete(eps.model.model_config))
    one, euler = entry("one"), stock(comfy, graph, "euler", 6)

    def twice(model, x, sigmas, extra_args=None, callback=None, disable=None):
        return x * float("nan")

    broken = {"sampler": comfy.samplers.KSAMPLER(twice), "sigmas": euler["sigmas"]}
    return {
        "not a flow": (lambda: run(graph, one, eps), "this MODEL is none"),
        "same label": (lambda: run(graph, entry("one", one)), "the label 'one' stands for two samplers"),
        "no label": (lambda: entry("  "), "label: must be 1 to 60 characters"),
        "no sigmas": (lambda: entry("a", sampler=euler["sampler"]), "the entry 'a' has sampler but no sigmas; connect both"),
        "no sampler": (lambda: entry("a", sigmas=euler["sigmas"]), "has sigmas but no sampler"),
        "window": (lambda: run(graph, entry("a", one, window_size=6)), "the entry 'a': a window of 6 from step 1 does not fit"),
        "eta": (lambda: run(graph, entry("a", one, eta=9.0)), "the entry 'a': eta 9.0 is too large"),
        "sigmas": (lambda: run(graph, entry("a", **euler | {"sigmas": torch.tensor([1.0, 1.0, 0.0])})), "'a': sigmas must fall"),
        "schedule": (lambda: run(graph, entry("a", schedule="karras")), "there is no schedule 'karras'"),
        "batch": (lambda: run(graph, one, latent=empty(3)), "from one latent, but there are 3"),
        "memory": (lambda: run(graph, one, seeds=4096, group_size=64), "12.0 GiB of decoded pictures, above the 2 GiB"),
        "no prompt": (lambda: run(graph, one, rewards=scene_accuracy()), "there is no prompt to score"),
        "prompt": (lambda: run(graph, one, rewards=scene_accuracy(), prompt="a cat"), "'a cat' is not a caption"),
        "NaN": (lambda: run(graph, entry("a", one, **broken)), "'a' drew NaN or infinity in sample 0 of seed 5"),
    }  # fmt: skip


NAMES = (
    "not a flow", "same label", "no label", "no sigmas", "no sampler", "window", "eta", "sigmas", "schedule", "batch", "memory",
    "no prompt", "prompt", "NaN",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_work_is_refused_in_one_sentence(comfy, graph, name):
    from mixgrpo.backend.errors import MixGRPOError

    cause, sentence = refusals(comfy, graph)[name]
    with pytest.raises(MixGRPOError, match=sentence) as refused:
        cause()
    assert "\n" not in str(refused.value)


class Frames:
    """A VAE of videos: every latent frame is one frame of a single colour."""

    def spacial_compression_decode(self) -> int:
        return 8

    def temporal_compression_decode(self) -> int:
        return 1

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        colour = latents[:, :3].sigmoid().mean((-2, -1), keepdim=True)
        return colour.repeat_interleave(16, -2).repeat_interleave(16, -1).movedim(1, -1)


def test_videos_are_shown_by_their_first_frame(comfy):
    from tiny_flow import prompt, tiny_model

    from mixgrpo.nodes.compare import CompareSamplers

    model, latent = tiny_model(comfy, dimensions=3), {"samples": torch.zeros(1, 16, 5, 4, 4)}
    output = CompareSamplers.execute(
        model, prompt(0.3), prompt(-0.5), latent, Frames(), entry("window", entry("euler", window_size=0)), 0, 2, 3, 1.0, 9, False
    )
    grid, images, *_ = output.result
    assert images.shape == (2 * 2 * 3 * 5, 16, 16, 3)
    assert [row["nfe"] for row in output.ui["mixgrpo_compare"]] == [6, 6]
    last = images.unflatten(0, (2, 2, 3, 5))[1, 1, 0, 0, 0, 0]
    assert torch.allclose(grid[0, -40, -40], last, atol=1e-2), "the last column's last row is the first frame of the last seed"


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def test_a_graph_compares_its_own_samplers_with_ours(server):
    settings = {"steps": 6, "schedule": "shift", "shift": 3.0, "eta": 0.7, "window_start": 1}
    outputs = server.run({
        "starter": node("MixGRPO_StarterModel"),
        "positive": node("CLIPTextEncode", clip=["starter", 1], text=CAPTION),
        "negative": node("CLIPTextEncode", clip=["starter", 1], text=""),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "sigmas": node("MixGRPO_Sigmas", steps=6, schedule="shift", shift=3.0),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "stock": node(
            "MixGRPO_CompareEntry", label="stock", sampler=["euler", 0], sigmas=["sigmas", 0], window_size=2, **settings,
        ),
        "plain": node("MixGRPO_CompareEntry", label="ours, plain", entries=["stock", 0], window_size=0, **settings),
        "window": node("MixGRPO_CompareEntry", label="window", entries=["plain", 0], window_size=2, **settings),
        "reward": node("MixGRPO_SceneAccuracy", weight=1.0, partial=True),
        "compare": node(
            "MixGRPO_CompareSamplers", model=["starter", 0], positive=["positive", 0], negative=["negative", 0],
            latent_image=["latent", 0], vae=["starter", 2], entries=["window", 0], seed=3, seeds=2, group_size=2, cfg=1.0,
            reference_steps=20, equal_nfe=True, rewards=["reward", 0], prompt=CAPTION,
        ),
        "all": node("PreviewImage", images=["compare", 1]),
        "chart": node("PreviewImage", images=["compare", 3]),
    })  # fmt: skip
    stock, plain, window = outputs["compare"]["mixgrpo_compare"]
    assert stock["rmse"] == pytest.approx(plain["rmse"], rel=1e-5) and stock["reward_mean"] == pytest.approx(plain["reward_mean"])
    assert (stock["rows"], plain["rows"], window["rows"]) == (12, 6, 2 + 2 * 4) and window["diversity"] > 0
    assert len(outputs["compare"]["images"]) == len(outputs["chart"]["images"]) == 1 and len(outputs["all"]["images"]) == 12
    folder = max((server.base / "output" / "mixgrpo").glob("compare_*"))
    assert json.loads((folder / "table.json").read_text())["table"] == [stock, plain, window]
