"""The pack in a running ComfyUI: it loads, harms nothing, and graphs that mix its nodes with stock ones do what they should."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from graph_server import PACK_NAMES, GraphError, GraphServer, copy_pack

CAPTION = "a red circle left of a blue square on a white background"
NODES = set(json.loads((Path(__file__).parent / "object_info.json").read_text(encoding="utf-8")))
NOT_COMFYUIS = {"diffusers", "peft", "accelerate", "typer", "rich", "matplotlib", "platformdirs"}


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def starter_graph(prompt: str = CAPTION, **more: dict) -> dict:
    """Starter, prompts and an empty latent of 64x64 pixels, plus ``more``."""
    return {
        "starter": node("MixGRPO_StarterModel"),
        "positive": node("CLIPTextEncode", clip=["starter", 1], text=prompt),
        "negative": node("CLIPTextEncode", clip=["starter", 1], text=""),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        **more,
    }


def sampler(**widgets) -> dict:
    settings = {"seed": 5, "steps": 8, "schedule": "shift", "shift": 3.0, "cfg": 2.0, "group_size": 4, "shared_noise": True,
                "eta": 0.7, "window_start": 1, "window_size": 3}  # fmt: skip
    links = {"model": ["starter", 0], "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0]}
    return node("MixGRPO_Sampler", **links | settings | widgets)


def save(link: list) -> dict:
    return node("SaveLatent", samples=link, filename_prefix="latents/test")


def files(server: GraphServer) -> list[Path]:
    return [file for pack in server.packs for file in sorted(pack.rglob("*"))]


def test_every_node_is_there_and_explains_itself(server: GraphServer):
    info = {name: entry for name, entry in server.get("/object_info").items() if name.startswith("MixGRPO_")}
    assert set(info) == NODES
    for name, entry in info.items():
        assert entry["category"] == "MixGRPO" and entry["description"] and entry["display_name"], name
        inputs = {**entry["input"].get("required", {}), **entry["input"].get("optional", {})}
        for input_name, (_, *options) in inputs.items():
            assert options and options[0].get("tooltip"), f"{name}.{input_name} has no tooltip"
        assert all(entry["output_tooltips"]), name
        # only the plain name: aiohttp's static routes do not find folders whose names need quoting, whoever's pack it is
        page = server.fetch(f"/extensions/{PACK_NAMES[0]}/docs/{name}.md").decode()
        untold = [input_name for input_name in inputs if f"**{input_name}**" not in page]
        assert not untold, f"the help page of {name} does not mention {untold}"


def test_loading_prints_nothing_of_its_own(server: GraphServer):
    start, _ = server.log.split("Starting server", 1)
    lines = [line for line in start.splitlines() if "mixgrpo" in line.lower().replace("/mixgrpo/comfyui-", "")]
    for pack in server.packs:
        (line,) = (line for line in lines if str(pack) in line)
        assert re.match(r" *\d+\.\d seconds: ", line), line  # ComfyUI's own line; a failed import has more words in it
    assert len(lines) == len(server.packs), lines


@pytest.fixture
def odd_pack(tmp_path: Path) -> Path:
    """A copy of the pack, without weights, under a name that is no Python name."""
    (tmp_path / "weights").mkdir()
    return copy_pack(tmp_path / "Ein Päckchen 1.2", tmp_path / "weights")


def test_importing_reaches_for_nothing(comfy, odd_pack: Path, monkeypatch, capfd):
    """As ComfyUI imports it, by path: no network, no file written, nothing printed, no package that ComfyUI does not require."""
    import comfy_api.latest  # noqa: F401 (ComfyUI's own, imported before any pack)

    def no_network(*args, **options):
        raise AssertionError("the pack opened a connection while it was imported")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = sorted(odd_pack.rglob("*"))
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] in NOT_COMFYUIS}
    for name in {*hidden, *NOT_COMFYUIS}:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    capfd.readouterr()

    name = str(odd_pack).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, odd_pack / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert not [other for other in sys.modules if other.startswith(f"{name}.")], "importing the package imports its rooms"
    nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
    assert {entry.GET_SCHEMA().node_id for entry in nodes} == NODES
    assert capfd.readouterr() == ("", "") and sorted(odd_pack.rglob("*")) == before
    for other in [other for other in sys.modules if other.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, other)


def test_sample_score_and_rank(server: GraphServer):
    before = files(server)
    outputs = server.run(starter_graph(
        sampler=sampler(),
        decode=node("VAEDecode", samples=["sampler", 0], vae=["starter", 2]),
        plain=node("MixGRPO_JpegCompressibility", weight=0.1),
        reward=node("MixGRPO_SceneAccuracy", weight=1.0, partial=True, rewards=["plain", 0]),
        score=node("MixGRPO_ScoreImages", images=["decode", 0], rewards=["reward", 0], prompts=CAPTION),
        ranked=node("PreviewImage", images=["score", 0]),
        best=node("PreviewImage", images=["score", 2]),
        drawn=node("MixGRPO_PictureRows", images=["decode", 0], label="as drawn"),
        rows=node("MixGRPO_PictureRows", images=["score", 0], label="ranked", rows=["drawn", 0], rewards=["reward", 0],
                  prompts=CAPTION),
        grid=node("PreviewImage", images=["rows", 1]),
    ))  # fmt: skip
    summary, rows = outputs["sampler"]["mixgrpo_sampler"][0], outputs["score"]["mixgrpo_scores"]
    assert len(summary["sigmas"]) == 9 and summary["window"] == [1, 3] and summary["unseen"] == []
    assert torch.tensor(summary["log_probs"]).shape == (3, 4) and len(summary["std"]) == 3
    assert sorted(row["image"] for row in rows) == [0, 1, 2, 3]
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    for row in rows:
        assert row["score"] == pytest.approx(0.1 * row["jpeg_compressibility"] + row["scene_accuracy"], abs=1e-6)
    assert len(outputs["ranked"]["images"]) == 4 and len(outputs["best"]["images"]) == 1
    means = [(row["label"], row["pictures"], row["mean"]) for row in outputs["rows"]["mixgrpo_rows"]]
    assert means == [("as drawn", 4, None), ("ranked", 4, pytest.approx(sum(scores) / 4))]
    assert len(outputs["grid"]["images"]) == 1
    assert files(server) == before, "a graph wrote into the pack's folder"


def test_the_graphs_three_ways_to_sample_agree(server: GraphServer):
    """All in one, as SAMPLER for SamplerCustomAdvanced, and with eta 0 ComfyUI's KSampler."""
    links = {"model": ["starter", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
    groups = {"group_size": 4, "shared_noise": False, "window_start": 1, "window_size": 3}
    outputs = server.run(starter_graph(
        four=node("EmptySD3LatentImage", width=64, height=64, batch_size=4),
        one=sampler(shared_noise=False),
        save_one=save(["one", 0]),
        object=node("MixGRPO_SamplerObject", eta=0.7, **groups),
        sigmas=node("MixGRPO_Sigmas", steps=8, schedule="shift", shift=3.0),
        noise=node("RandomNoise", noise_seed=5),
        guider=node("CFGGuider", cfg=2.0, **links),
        advanced=node("SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["object", 0],
                      sigmas=["sigmas", 0], latent_image=["four", 0]),
        save_advanced=save(["advanced", 0]),
        still=sampler(shared_noise=False, eta=0.0),
        save_still=save(["still", 0]),
        stock=node("KSampler", seed=5, steps=8, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=1.0,
                   latent_image=["four", 0], **links),
        save_stock=save(["stock", 0]),
    ))  # fmt: skip
    one, advanced, still, stock = (server.latent(outputs, f"save_{name}") for name in ("one", "advanced", "still", "stock"))
    assert torch.equal(one, advanced) and torch.equal(still, stock)
    assert (one - stock).norm() > 0.01 * stock.norm()


def test_a_run_is_repeated_only_when_a_setting_changes(server: GraphServer):
    def run(**widgets) -> tuple[list[str], dict]:
        history = server.wait(server.queue(starter_graph(sampler=sampler(seed=77, **widgets), save=save(["sampler", 0]))))
        return next(message["nodes"] for name, message in history["status"]["messages"] if name == "execution_cached"), history

    run()
    cached, history = run()
    assert "sampler" in cached and history["status"]["status_str"] == "success"
    assert "sampler" not in run(window_start=2)[0]


REFUSALS = {
    "not a flow": (
        {"eps": node("ModelSamplingDiscrete", model=["starter", 0], sampling="eps", zsnr=False)}, {"model": ["eps", 0]},
        "MixGRPO_Sampler: .*this MODEL is none: its sampling is ModelSamplingDiscrete",
    ),
    "window": ({}, {"window_size": 8}, "MixGRPO_Sampler: .*start \\+ size may be at most 7"),
    "schedule": ({}, {"schedule": "kharas"}, "there is no schedule 'kharas'|value_not_in_list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_graph_that_cannot_work_fails_with_a_sentence(server: GraphServer, name):
    more, widgets, sentence = REFUSALS[name]
    with pytest.raises(GraphError, match=sentence):
        server.run(starter_graph(**more, sampler=sampler(**widgets), save=save(["sampler", 0])))


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("  \n ", "MixGRPO_ScoreImages: .*there is no prompt to score the pictures against"),
        ("a cat", "MixGRPO_ScoreImages: .*'a cat' is not a caption of the starter world"),
        ("\n".join([CAPTION] * 3), "4 pictures cannot be divided among 3 prompts"),
    ],
    ids=["empty", "unknown", "too many"],
)
def test_prompts_that_cannot_be_scored_are_refused(server: GraphServer, prompts, sentence):
    graph = starter_graph(
        pictures=node("EmptyImage", width=64, height=64, batch_size=4, color=0),
        reward=node("MixGRPO_SceneAccuracy", weight=1.0, partial=False),
        score=node("MixGRPO_ScoreImages", images=["pictures", 0], rewards=["reward", 0], prompts=prompts),
        show=node("PreviewImage", images=["score", 0]),
    )
    with pytest.raises(GraphError, match=sentence):
        server.run(graph)


def test_prompt_weights_and_double_rewards_are_refused(server: GraphServer):
    with pytest.raises(GraphError, match=r"CLIPTextEncode: .*write 'a \(red:1.2\) circle' without \(weights:1.2\)"):
        server.run(starter_graph("a (red:1.2) circle", sampler=sampler(), save=save(["sampler", 0])))
    graph = {
        "one": node("MixGRPO_SceneAccuracy", weight=1.0, partial=False),
        "two": node("MixGRPO_SceneAccuracy", weight=1.0, partial=True, rewards=["one", 0]),
        "pictures": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
        "score": node("MixGRPO_ScoreImages", images=["pictures", 0], rewards=["two", 0], prompts=CAPTION),
        "show": node("PreviewImage", images=["score", 0]),
    }
    with pytest.raises(GraphError, match="scene_accuracy is in the chain twice"):
        server.run(graph)


def test_interrupt_stops_within_a_step(server: GraphServer):
    """A run of many steps that would take minutes ends when it is told to."""
    running = server.queue(starter_graph(sampler=sampler(seed=1, steps=1000, group_size=64), save=save(["sampler", 0])))
    while not [job for job in server.get("/queue")["queue_running"] if job[1] == running]:
        time.sleep(0.05)
    server.fetch("/interrupt", {"prompt_id": running})
    history = server.wait(running, seconds=60)
    assert "execution_interrupted" in json.dumps(history["status"]["messages"])
