"""The command line as a person uses it: real processes, real files."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mixgrpo.backend.files import load_metadata
from mixgrpo.backend.specs import load_job

ROOT = Path(__file__).parents[1]
CAPTION = "a red circle left of a blue square on a white background"


def mixgrpo(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed console script."""
    script = Path(sys.executable).with_name("mixgrpo")
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        [script, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=800, env=environment, check=False
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of two iterations and few pictures."""
    folder = tmp_path_factory.mktemp("demo")
    ended = mixgrpo("demo", "--out", "out", "--iterations", 2, "--pairs", 24, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "out", ended


def test_demo_measures_shows_and_says_where_the_lora_is(demo):
    out, ended = demo
    summary = json.loads((out / "summary.json").read_text())
    held_out = summary["held_out"]
    assert held_out["pairs"] == 24
    assert held_out["difference"] == pytest.approx(held_out["after"] - held_out["before"])
    assert held_out["ci95"][0] <= held_out["difference"] <= held_out["ci95"][1]
    assert 0 <= held_out["judge_before"] <= 1 and 0 <= held_out["single_before"] <= 1
    assert {"judge_after", "single_after"} <= held_out.keys()
    assert summary["replay_max"] <= 1e-5 and summary["seconds"] > 0
    assert Path(summary["lora"]).is_file() and summary["lora"] in ended.stdout
    for picture in ("before_after.png", "curves.png"):
        with Image.open(out / picture) as image:
            assert min(image.size) > 100


def test_sample_draws_the_same_picture_again_and_another_one_with_the_lora(demo, tmp_path):
    lora = json.loads((demo[0] / "summary.json").read_text())["lora"]
    arguments = ["sample", "--prompt", CAPTION, "--count", 2, "--steps", 6]
    for name, extra in (("one.png", []), ("again.png", []), ("lora.png", ["--lora", lora])):
        ended = mixgrpo(*arguments, "--out", name, *extra, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, again, with_lora = ((tmp_path / name).read_bytes() for name in ("one.png", "again.png", "lora.png"))
    assert one == again
    assert one != with_lora


def test_the_example_job_trains_and_the_same_command_again_trains_nothing(tmp_path):
    text = (ROOT / "workflows" / "jobs" / "starter.yaml").read_text().replace("iterations: 20", "iterations: 1")
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("prompts_per_iteration: 4", "prompts_per_iteration: 1"))
    spec = load_job(job)
    assert spec.iterations == 1
    for _ in range(2):
        ended = mixgrpo("train", job, "--out", "run", cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert str(tmp_path / "run" / "lora" / "starter-example_000001.safetensors") in ended.stdout
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("iteration") == 1


def test_a_job_starts_from_a_lora_file_and_says_so_in_its_own(demo, tmp_path):
    lora = Path(json.loads((demo[0] / "summary.json").read_text())["lora"])
    text = (ROOT / "workflows" / "jobs" / "starter.yaml").read_text().replace("iterations: 20", "iterations: 1")
    (tmp_path / "job.yaml").write_text(text.replace("prompts_per_iteration: 4", "prompts_per_iteration: 1"))
    ended = mixgrpo("train", "job.yaml", "--out", "run", "--start-from", lora, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trained = load_metadata(tmp_path / "run" / "lora" / "starter-example_000001.safetensors")
    assert trained["mixgrpo.started_from"] == hashlib.sha256(lora.read_bytes()).hexdigest()
    refused = mixgrpo("train", "job.yaml", "--out", "run", cwd=tmp_path)
    assert refused.returncode == 1 and "lora.start_from was" in refused.stdout, refused.stdout


def test_the_example_comparison_measures_and_shows(tmp_path):
    text = (ROOT / "workflows" / "jobs" / "compare.yaml").read_text()
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("seeds: 3", "seeds: 1").replace("group_size: 4", "group_size: 2"))
    ended = mixgrpo("compare", job, "--out", "out", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    labels = [row["label"] for row in table["table"]]
    assert labels == [entry["label"] for entry in table["settings"]["entries"]] and all(label in ended.stdout for label in labels)
    assert {row["nfe"] for row in table["table"]} == {16} and all(0 <= row["reward_mean"] <= 1 for row in table["table"])
    assert len((tmp_path / "out" / "table.csv").read_text().splitlines()) == 1 + len(labels)
    for picture in ("grid.png", "chart.png"):
        with Image.open(tmp_path / "out" / picture) as image:
            assert min(image.size) > 200


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["train", ROOT / "workflows" / "jobs" / "starter.yaml", "--start-from", "missing.safetensors"], "missing.safetensors"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["compare", "missing.yaml"], "missing.yaml"),
        (["sample", "--prompt", CAPTION, "--lora", "missing.safetensors"], "missing.safetensors"),
        (["sample", "--prompt", CAPTION, "--steps", "4", "--lora", "pickle.pt"], "pickle"),
    ],
)
def test_a_refusal_is_one_sentence_without_a_traceback(tmp_path, arguments, cause):
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04.")
    ended = mixgrpo(*arguments, cwd=tmp_path)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    assert cause in ended.stdout and ended.stdout.startswith("error ")
