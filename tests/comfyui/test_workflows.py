"""The template workflows: ComfyUI offers them, they are laid out well, and they run without a browser."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from cli_runs import comfy_run
from graph_server import PACK_NAMES, ROOT, GraphServer
from PIL import Image, ImageChops
from train_graphs import SHORT

WORKFLOWS = {file.stem: file for file in sorted((ROOT / "workflows").glob("*.json"))}
STORED = Path(__file__).parent / "workflows_api"
UPDATE = "MIXGRPO_UPDATE=1 python -m pytest tests/comfyui/test_workflows.py -k stored"
_TITLE = 30  # pixels above a node's place

Outputs = dict[str, dict[str, Any]]


def load(name: str) -> dict[str, Any]:
    return json.loads(WORKFLOWS[name].read_text(encoding="utf-8"))


def picture(server: GraphServer, shown: dict[str, Any]) -> Image.Image:
    query = "&".join(f"{key}={shown[key]}" for key in ("filename", "subfolder", "type"))
    return Image.open(BytesIO(server.fetch(f"/view?{query}")))


def left_by(outputs: Outputs, workflow: dict[str, Any], title: str) -> dict[str, Any]:
    """What the node with this title, or of this type, left in the history."""
    (node,) = (node for node in workflow["nodes"] if title in (node.get("title"), node["type"]))
    return outputs[str(node["id"])]


def all_rows(outputs: Outputs) -> list[dict[str, Any]]:
    """The rows of the last Labelled Pictures in a chain."""
    return max((entry["mixgrpo_rows"] for entry in outputs.values() if "mixgrpo_rows" in entry), key=len)


def check_sample_window(server: GraphServer, outputs: Outputs, workflow: dict[str, Any]) -> None:
    rows = all_rows(outputs)
    assert [row["pictures"] for row in rows] == [1, 1, 8, 8]
    assert rows[0]["mean"] == rows[1]["mean"], "KSampler and eta 0 drew different pictures"
    assert all(0 <= row["mean"] <= 1 for row in rows)
    (grid,) = left_by(outputs, workflow, "All rows")["images"]
    assert picture(server, grid).width > 8 * 128
    assert len(left_by(outputs, workflow, "Best first")["images"]) == 8
    windows = [entry["mixgrpo_sampler"][0]["window"] for entry in outputs.values() if "mixgrpo_sampler" in entry]
    assert sorted(windows) == [[2, 4], [2, 4], [6, 3]]


def check_train_compare(server: GraphServer, outputs: Outputs, workflow: dict[str, Any]) -> None:
    (summary,) = left_by(outputs, workflow, "MixGRPO_TrainStep")["mixgrpo_train"]
    assert summary["state"] == "done" and summary["iteration"] == summary["lora_iteration"] == SHORT["iterations"]
    assert set(summary["curve"]["scores"]) == {"scene_accuracy", "held_out_judge"}
    assert summary["lora"] in server.get("/models/loras"), "ComfyUI does not list the LoRA"
    assert [(row["label"], row["pictures"]) for row in all_rows(outputs)] == [("before", 16), ("after", 16)]
    (grid,), (kept,) = (left_by(outputs, workflow, title)["images"] for title in ("Before and after", "Keep it"))
    assert kept["type"] == "output" and kept["subfolder"] == "mixgrpo"
    sheet = picture(server, grid)
    row = sheet.height // 2 - 3
    before, after = (sheet.crop((0, top + 26, sheet.width, top + row)) for top in (0, row))  # without their titles
    assert ImageChops.difference(before, after).getbbox(), "the LoRA changes nothing"
    assert picture(server, left_by(outputs, workflow, "Newest training pictures")["images"][0]).width > SHORT["group_size"] * 64


def compared(outputs: Outputs, workflow: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    """The table of a Compare Samplers node, by label, once its grid is there."""
    left = left_by(outputs, workflow, title)
    assert left["images"]
    return {row["label"]: row for row in left["mixgrpo_compare"]}


def check_lab_samplers(server: GraphServer, outputs: Outputs, workflow: dict[str, Any]) -> None:
    table = compared(outputs, workflow, "Compare Samplers: cost and quality")
    solvers, dynamics = [*table][:4], [*table][4:8]
    assert dynamics == ["Flow-SDE", "Dance-SDE", "CPS", "Precise"] and len(table) == 10
    assert {row["nfe"] for row in table.values()} == {11}
    assert all(table[label]["diversity"] == 0 for label in [*solvers, "ComfyUI dpmpp_2m"])
    assert all(table[label]["diversity"] > 0.1 for label in [*dynamics, "ComfyUI euler_ancestral"])
    euler, heun, *multistep = (table[label]["rmse"] for label in solvers)
    assert max(multistep) < 0.8 * min(euler, heun), "the note says that the multistep solvers come closest"
    assert {table[label]["rows"] for label in dynamics} == {2 * (2 + 4 * 9)}, "two prompts; two calls of one row, nine of four"
    grid, chart = (
        left_by(outputs, workflow, title)["images"][0] for title in ("Grid: rows are seeds, columns are samplers", "Chart")
    )
    assert picture(server, grid).width > 10 * 128 and picture(server, chart).width > 1000


def check_lab_window_sweep(server: GraphServer, outputs: Outputs, workflow: dict[str, Any]) -> None:
    for title in ("Compare Samplers: one seed, a group of 8", "Compare Samplers: 6 seeds"):
        none, *windows = compared(outputs, workflow, title).values()
        assert none["diversity"] == 0 and len(windows) == 5
        for name in ("diversity", "rows"):
            values = [row[name] for row in windows]
            assert values == sorted(values, reverse=True) and min(values) > none[name], name
        assert all(0 <= row["reward_mean"] <= 1 for row in (none, *windows))
    (grid,) = left_by(outputs, workflow, "Grid: rows are the samples of a group")["images"]
    assert picture(server, grid).height > 8 * 128
    one_seed = compared(outputs, workflow, "Compare Samplers: one seed, a group of 8")
    (row,) = all_rows(outputs)
    assert row["mean"] == pytest.approx(one_seed[row["label"]]["reward_mean"], abs=1e-6), "not the pictures of that column"
    assert left_by(outputs, workflow, "MixGRPO_TrajectoryPlot")["images"]


def check_lab_flash(server: GraphServer, outputs: Outputs, workflow: dict[str, Any]) -> None:
    names = ("full rollout", "Flash", "Flash*")
    plans = [left_by(outputs, workflow, f"Sampling Plan: {name}")["mixgrpo_plan"][0] for name in names]
    drawn = compared(outputs, workflow, "Compare Samplers: with noise")
    assert [plan["nfe"] for plan in plans] == [drawn[name]["nfe"] for name in names] == [25, 13, 9]
    assert [plan["rows"] for plan in plans] == [drawn[name]["rows"] for name in names]
    assert "13 model calls for a sample" in left_by(outputs, workflow, "Plan: Flash")["text"][0]
    exact = compared(outputs, workflow, "Compare Samplers: without noise")
    for flash, euler in (("Flash", "13 Euler steps"), ("Flash*", "9 Euler steps")):
        assert exact[flash]["nfe"] == exact[euler]["nfe"] and exact[flash]["rmse"] < exact[euler]["rmse"], flash
    assert all(row["reward_mean"] is not None for row in (*drawn.values(), *exact.values()))


CHECKS: dict[str, Callable[[GraphServer, Outputs, dict[str, Any]], None]] = {
    "mixgrpo_lab_flash": check_lab_flash,
    "mixgrpo_lab_samplers": check_lab_samplers,
    "mixgrpo_lab_window_sweep": check_lab_window_sweep,
    "mixgrpo_sample_window": check_sample_window,
    "mixgrpo_train_compare": check_train_compare,
}


def test_comfyui_offers_every_template_with_a_picture(server: GraphServer):
    assert set(CHECKS) == set(WORKFLOWS)
    offered = server.get("/workflow_templates")
    for pack in PACK_NAMES:
        assert sorted(offered[pack]) == sorted(WORKFLOWS), pack
    for name, file in WORKFLOWS.items():
        # only the plain name: aiohttp's static routes do not find folders whose names need quoting
        address = f"/api/workflow_templates/{PACK_NAMES[0]}/{name}"
        assert server.fetch(f"{address}.json") == file.read_bytes()
        thumbnail = server.fetch(f"{address}.jpg")
        assert len(thumbnail) <= 60_000 and Image.open(BytesIO(thumbnail)).format == "JPEG"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_stand_apart_and_inside_their_groups(name):
    workflow = load(name)
    assert any(node["type"] == "MarkdownNote" for node in workflow["nodes"])

    def box(node: dict[str, Any]) -> tuple[float, float, float, float]:
        (x, y), (width, height) = node["pos"], node["size"]
        return x, y - _TITLE, x + width, y + height

    for one, other in combinations(workflow["nodes"], 2):
        (left, top, right, bottom), (left_2, top_2, right_2, bottom_2) = box(one), box(other)
        apart = right < left_2 or right_2 < left or bottom < top_2 or bottom_2 < top
        assert apart, f"{one['type']} {one['id']} overlaps {other['type']} {other['id']}"
    groups = [(x, y, x + width, y + height) for x, y, width, height in (group["bounding"] for group in workflow["groups"])]
    for node in workflow["nodes"]:
        left, top, right, bottom = box(node)
        around = [group for group in groups if group[0] < left and group[1] < top and right < group[2] and bottom < group[3]]
        assert len(around) == (node["type"] != "MarkdownNote"), f"{node['type']} {node['id']} is in {len(around)} groups"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_links_say_the_same_at_both_ends(name):
    workflow = load(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, origin, output, target, slot, kind in workflow["links"]:
        source, sink = nodes[origin]["outputs"][output], nodes[target]["inputs"][slot]
        assert source["type"] == kind and sink["type"] in (kind, "*") and link in source["links"] and sink["link"] == link, link
    entries = [entry["link"] for node in nodes.values() for entry in node["inputs"] if entry["link"] is not None]
    exits = [link for node in nodes.values() for entry in node["outputs"] for link in entry["links"] or ()]
    assert sorted(entries) == sorted(exits) == sorted(link[0] for link in workflow["links"])


@pytest.fixture
def converted(server: GraphServer, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda name: comfy_run(server.url, WORKFLOWS[name], tmp_path, "--print-prompt")["prompt"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_converted_graph_is_the_stored_one(converted, name):
    """A widget that was added, taken away or moved shifts the values of every saved workflow, and shows here."""
    stored, graph = STORED / f"{name}.json", converted(name)
    if os.environ.get("MIXGRPO_UPDATE"):
        stored.write_text(json.dumps(graph, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert graph == json.loads(stored.read_text(encoding="utf-8")), (
        f"{name} converts to another graph than it used to: undo what moved its widgets (append new inputs at the end), or, if "
        f"the workflow itself was changed, rewrite the stored graph with: {UPDATE}"
    )


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_workflow_runs_by_comfy_cli(server: GraphServer, converted, tmp_path: Path, name):
    said = comfy_run(server.url, shortened(name, converted, tmp_path), tmp_path, "--wait")
    history = server.get(f"/history/{said['prompt_id']}")[said["prompt_id"]]
    assert history["status"]["status_str"] == "success"
    CHECKS[name](server, history["outputs"], load(name))


def shortened(name: str, converted: Callable[[str], dict[str, Any]], folder: Path) -> Path:
    """The workflow's own file; of one that trains, its converted graph with a shorter training."""
    if not any(node["type"] == "MixGRPO_TrainStep" for node in load(name)["nodes"]):
        return WORKFLOWS[name]
    graph = converted(name)
    for node in graph.values():
        if node["class_type"] == "MixGRPO_TrainStep":
            node["inputs"] |= SHORT
    file = folder / f"{name}.json"
    file.write_text(json.dumps(graph), encoding="utf-8")
    return file
