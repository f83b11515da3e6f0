"""The pack in ComfyUI's page: it breaks nothing there, its displays show what happens, and every template runs."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MINUTE, NAMES, ComfyPage, Opener, chromium, running_browser
from graph_server import PACK_NAMES, ROOT, GraphServer
from playwright.sync_api import Browser, expect
from train_graphs import SHORT

CAPTION = "a red circle left of a blue square on a white background"
TEMPLATES = sorted(file.stem for file in (ROOT / "workflows").glob("*.json"))
SEEDS = itertools.count(1)  # a job with another seed is another job
STATUS, COUNT = ".mixgrpo-status:visible", ".mixgrpo-count:visible"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = chromium()
    if executable is None:
        lacking = f"there is no browser to test with ({', '.join(NAMES)}); install one, for example: apt-get install chromium"
        pytest.fail(lacking, pytrace=False) if os.environ.get("CI") == "true" else pytest.skip(lacking)
    with running_browser(executable) as running:
        yield running


@pytest.fixture(scope="module")
def usual(browser: Browser, server: GraphServer) -> set[str]:
    """What ComfyUI's own page complains of when no script of the pack is in it."""
    bare = ComfyPage(browser, server, with_pack=False)
    assert bare.page.evaluate("app.extensions.filter(extension => extension.name.startsWith('mixgrpo')).length") == 0
    bare.close()
    return bare.complaints


@pytest.fixture
def open_page(browser: Browser, server: GraphServer, usual: set[str]) -> Iterator[Opener]:
    """Open pages; when the test has ended, no page may have complained of more than ComfyUI's own does."""
    pages: list[ComfyPage] = []

    def open_page(theme: str = "dark", vue: bool = False) -> ComfyPage:
        pages.append(ComfyPage(browser, server, **{"Comfy.ColorPalette": theme, "Comfy.VueNodes.Enabled": vue}))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
    server.fetch("/queue", {"clear": True})  # what a failed test has left running would keep the next one waiting
    server.fetch("/interrupt", {})
    assert set().union(*(page.complaints for page in pages)) - usual == set()


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def training(**widgets) -> dict:
    """A graph that trains; an iteration takes a tenth of a second or so."""
    settings = {"prompts": CAPTION, "name": "browser", "iterations": 3, "group_size": 2, "prompts_per_iteration": 1}
    settings["seed"] = next(SEEDS)
    links = {"model_ref": ["1", 3], "rewards": ["2", 0], "sampling": ["3", 0], "optimizer": ["5", 0]}
    return {
        "1": node("MixGRPO_StarterModel"),
        "2": node("MixGRPO_JpegCompressibility", weight=0.1),
        "3": node("MixGRPO_SamplingSettings", steps=4, window_size=1),
        "4": node("MixGRPO_TrainStep", **links | settings | widgets),
        "5": node("MixGRPO_OptimizerSettings", updates_per_rollout=1),
    }


def sampling() -> dict:
    """A graph that samples a group and scores it."""
    links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0]}
    return {
        "1": node("MixGRPO_StarterModel"),
        "2": node("CLIPTextEncode", clip=["1", 1], text=CAPTION),
        "3": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "4": node("MixGRPO_Sampler", seed=next(SEEDS), steps=6, window_start=1, window_size=2, group_size=3, **links),
        "5": node("VAEDecode", samples=["4", 0], vae=["1", 2]),
        "6": node("MixGRPO_SceneAccuracy", partial=True),
        "7": node("MixGRPO_ScoreImages", images=["5", 0], rewards=["6", 0], prompts=CAPTION),
        "8": node("PreviewImage", images=["7", 0]),
    }


def comparing() -> dict:
    """A graph that compares two samplers by a reward."""
    links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0], "vae": ["1", 2]}
    return {
        "1": node("MixGRPO_StarterModel"),
        "2": node("CLIPTextEncode", clip=["1", 1], text=CAPTION),
        "3": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "4": node("MixGRPO_CompareEntry", label="plain <b>", steps=4, window_size=0),
        "5": node("MixGRPO_CompareEntry", label="window", steps=6, window_size=2, entries=["4", 0]),
        "6": node("MixGRPO_JpegCompressibility"),
        "7": node("MixGRPO_CompareSamplers", entries=["5", 0], rewards=["6", 0], prompt=CAPTION, seed=next(SEEDS), seeds=2,
                  group_size=2, reference_steps=0, **links),
    }  # fmt: skip


def questions(page: ComfyPage) -> int:
    return sum("/mixgrpo/" in path and "/summary" in path for path in page.requests)


def test_both_copies_are_loaded_and_one_registers(open_page: Opener):
    page = open_page()
    for pack in PACK_NAMES:
        assert f"/extensions/{pack}/mixgrpo_train.js" in page.requests
    names = page.page.evaluate("app.extensions.map(extension => extension.name).filter(name => name.startsWith('mixgrpo'))")
    assert sorted(names) == ["mixgrpo.results", "mixgrpo.trainStep"]
    assert page.page.locator("link[data-mixgrpo]").count() == 1
    shown = page.page.evaluate(
        """async url => {
            const { figure, duration } = await import(url + "/dom.mjs");
            const { runningMean } = await import(url + "/charts.mjs");
            const figures = [0, 0.12345, -3.5512, 123.4, 1e-5, 1e7, null, NaN].map(figure);
            return [figures, [0, 59.4, 59.6, 3000, 7200, 7500].map(duration), runningMean([1, null, 3, 5], 2)];
        }""",
        f"/extensions/{PACK_NAMES[0]}/parts",
    )
    assert shown[0] == ["0.000", "0.123", "−3.55", "123", "1.0e−5", "1.0e+7", "–", "–"]
    assert shown[1] == ["1 s", "59 s", "1 min", "50 min", "2 h", "2 h 5 min"]
    assert shown[2] == [1, 1, 3, 4]


@pytest.mark.parametrize(("theme", "vue"), [("dark", False), ("light", False), ("light", True)])
def test_a_job_is_shown_from_run_to_lora(open_page: Opener, tmp_path: Path, theme, vue):
    """With wait off the graph ends at once; the display asks until the job is done, then the node fetches the LoRA."""
    page = open_page(theme, vue)
    page.load(training(wait=False, iterations=3, name="shown"))
    page.show("MixGRPO_TrainStep")
    expect(page.page.locator(STATUS)).to_have_text("Nothing trained yet: run this node")
    saved = page.page.evaluate("app.graph.serialize().nodes.find(node => node.id === 4).widgets_values")
    assert "browser" not in saved and all(not isinstance(value, dict) for value in saved)
    sent = page.page.evaluate("app.graphToPrompt().then(prompt => prompt.output['4'].inputs)")
    assert "mixgrpo_training" not in sent and sent["iterations"] == 3

    page.run()
    assert page.ended() == "execution_success"
    expect(page.page.locator(STATUS)).to_contain_text("done · reward", timeout=2 * MINUTE)
    expect(page.page.locator(COUNT)).to_have_text("3 / 3")
    lora = page.page.locator(".mixgrpo-lora:visible")
    expect(lora).to_have_text("LoRA of iteration 3: run again to fetch it")
    page.page.wait_for_timeout(2500)
    before = questions(page)
    page.page.wait_for_timeout(3000)
    assert questions(page) == before, "a job that is done is asked about no more"

    page.reload()  # nobody has touched the page since Run, and still its draft of the workflow knows the job
    page.show("MixGRPO_TrainStep")
    expect(page.page.locator(STATUS)).to_contain_text("done · reward")
    expect(lora).to_have_text("LoRA of iteration 3: run again to fetch it")

    page.run()
    assert page.ended() == "execution_success"
    expect(lora).to_have_text(re.compile(r"shown_\w{8}_000003\.safetensors"))
    assert page.page.locator(".mixgrpo-chart:visible polyline.mixgrpo-mean").count() == 1
    for name in ("Pause", "Cancel"):
        expect(page.page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    lora.click()
    assert page.page.evaluate("navigator.clipboard.readText()") == page.properties("MixGRPO_TrainStep")["mixgrpo_lora"]
    page.page.screenshot(path=tmp_path / "trained.png")


def test_pause_reload_and_cancel(open_page: Opener, tmp_path: Path):
    page = open_page()
    page.load(training(iterations=5000, checkpoint_every=5000))
    page.show("MixGRPO_TrainStep")
    page.run()
    expect(page.page.locator(STATUS)).to_contain_text("training · reward", timeout=2 * MINUTE)
    page.until("() => document.querySelectorAll('polyline.mixgrpo-raw').length")
    page.page.screenshot(path=tmp_path / "training.png")
    asked = questions(page)
    page.page.wait_for_timeout(3000)
    assert questions(page) == asked, "while events come nothing is asked"

    page.reload()  # the graph still runs; the page learns of the job by asking
    expect(page.page.locator(STATUS)).to_contain_text("training · reward", timeout=MINUTE)
    page.page.get_by_role("button", name="Pause", exact=True).click()
    assert page.page.locator(STATUS).inner_text() != ""
    expect(page.page.locator(STATUS)).to_contain_text("paused · reward", timeout=2 * MINUTE)
    page.page.keyboard.press("Escape")  # the graph that waited for the job has failed, and ComfyUI says so in a dialog
    iterations = int(page.page.locator(COUNT).inner_text().split("/")[0])
    assert 0 < iterations < 5000
    page.reload()
    expect(page.page.locator(STATUS)).to_contain_text("paused · reward")
    expect(page.page.locator(COUNT)).to_have_text(f"{iterations} / 5000")
    expect(page.page.get_by_role("button", name="Pause", exact=True)).to_be_disabled()

    page.run()
    expect(page.page.locator(STATUS)).to_contain_text("training · reward", timeout=2 * MINUTE)
    page.page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.page.locator(STATUS)).to_contain_text("cancelled", timeout=2 * MINUTE)
    page.ended()


def test_a_node_that_is_gone_asks_nothing(open_page: Opener):
    page = open_page()
    page.load(training(wait=False, iterations=5000, checkpoint_every=5000))
    page.show("MixGRPO_TrainStep")
    page.run()
    page.ended()
    expect(page.page.locator(STATUS)).to_contain_text("training", timeout=2 * MINUTE)
    page.page.get_by_role("button", name="Cancel", exact=True).click()
    page.page.evaluate("app.graph.remove(app.graph.getNodeById(4))")
    page.page.wait_for_timeout(300)
    before = questions(page)
    page.page.wait_for_timeout(3000)
    assert questions(page) == before and page.page.locator(".mixgrpo-bar").count() == 0


def test_inside_a_subgraph(open_page: Opener):
    page = open_page()
    page.load(training(iterations=60, checkpoint_every=60, name="inside"))  # long enough to be looked at on a fast machine
    page.page.evaluate(
        """() => {
            const { subgraph, node } = app.graph.convertToSubgraph(new Set([app.graph.getNodeById(4)]));
            app.canvas.openSubgraph(subgraph, node);
            Object.assign(app.canvas.ds, { scale: 1, offset: [400, 100] });
            subgraph.nodes[0].pos = [0, 0];
            app.canvas.setDirty(true, true);
        }"""
    )
    page.run()
    # by events, before it has ended
    expect(page.page.locator(COUNT)).to_have_text(re.compile(r"^[1-5]?\d / 60$"), timeout=2 * MINUTE)
    assert page.ended() == "execution_success"
    expect(page.page.locator(STATUS)).to_contain_text("done · reward")


def test_scores_and_steps_are_shown(open_page: Opener, tmp_path: Path):
    page = open_page()
    page.load(sampling())
    page.show("MixGRPO_Sampler")
    page.run()
    assert page.ended() == "execution_success"
    expect(page.page.locator(STATUS)).to_contain_text("6 steps · 6 calls, 14 rows · stochastic: 1–2 · std")
    shade = page.page.locator(".mixgrpo-chart:visible rect.mixgrpo-window")
    chart = page.page.locator(".mixgrpo-axes:visible").bounding_box()
    assert shade.bounding_box()["width"] == pytest.approx(chart["width"] * 2 / 6, rel=0.05)
    page.page.screenshot(path=tmp_path / "sampler.png")
    page.show("MixGRPO_ScoreImages")
    rows = page.page.locator(".mixgrpo tbody tr:visible")
    expect(rows).to_have_count(3)
    assert page.page.locator(".mixgrpo th:visible").all_inner_texts() == ["image", "score", "scene accuracy"]
    assert sorted(row.split()[0] for row in rows.all_inner_texts()) == ["0", "1", "2"]
    page.page.screenshot(path=tmp_path / "scores.png")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_opens_by_clicks_and_runs(open_page: Opener, tmp_path: Path, name):
    """The page reads the file as comfy-cli does, and runs it; a training is shortened then."""
    page = open_page()
    page.page.get_by_role("button", name="Templates").first.click()
    page.page.get_by_text(PACK_NAMES[0], exact=True).click()
    page.page.get_by_test_id(f"template-workflow-{name}").first.click()
    page.until("name => app.extensionManager.workflow.activeWorkflow?.filename === name", name)
    page.page.wait_for_timeout(500)
    page.page.screenshot(path=tmp_path / "opened.png")
    stored = json.loads((Path(__file__).parent / "workflows_api" / f"{name}.json").read_text(encoding="utf-8"))
    sent = page.page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")
    for entry in sent.values():
        if entry["class_type"] == "PreviewAny":
            entry["inputs"].pop("preview", None)  # the page's own widget, which the node does not have
    assert {id: (entry["class_type"], entry["inputs"]) for id, entry in sent.items()} == {
        id: (entry["class_type"], entry["inputs"]) for id, entry in stored.items()
    }
    page.page.evaluate(
        """short => {
            for (const node of app.graph.nodes.filter(node => node.comfyClass === "MixGRPO_TrainStep"))
                for (const widget of node.widgets) if (widget.name in short) widget.value = short[widget.name];
        }""",
        SHORT,
    )
    page.run()
    assert page.ended(minutes=10) == "execution_success"
    page.page.screenshot(path=tmp_path / "ended.png")


@pytest.mark.parametrize("vue", [False, True])
def test_compared_samplers_are_a_table_on_the_node(open_page: Opener, vue):
    page = open_page(vue=vue)
    page.load(comparing())
    page.show("MixGRPO_CompareSamplers")
    assert page.page.locator(".mixgrpo-compared:visible").count() == 0
    page.run()
    assert page.ended() == "execution_success"
    table = page.page.locator(".mixgrpo-compared")
    expect(table.locator("th")).to_have_text(["sampler", "NFE", "rows", "seconds", "diversity", "reward", "to first"])
    plain, window = (table.locator(f"tbody tr:nth-child({row}) td").all_inner_texts() for row in (1, 2))
    assert plain[:3] == ["plain <b>", "4", "4"] and window[:3] == ["window", "6", str(1 + 2 * 5)]
    assert plain[6] == "–" and "±" in plain[5] and "±" in window[6]
