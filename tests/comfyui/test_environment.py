"""The pack in an environment as ComfyUI 0.3.75's users have it: transformers 4.57, which refuses the huggingface_hub of today.

What the trainer needs would break that environment, so nothing of it may be installed there, and nothing of it may be needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from graph_server import ROOT, GraphServer
from starter_files import SHIPPED, STARTERS, write_random_starter
from train_graphs import CAPTION, drawing, node

OLD = "transformers==4.57.3"
_LIST = "import json; from importlib.metadata import distributions as d; print(json.dumps([(e.name, e.version) for e in d()]))"
_FIRST = "import huggingface_hub, transformers; print(transformers.__version__, huggingface_hub.__version__)"


class Environment:
    """A virtual environment of its own packages over those that the tests run with, which it sees but cannot change."""

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=os.name != "nt")
        self.python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
        site = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        outer = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (site / "outer.pth").write_text("\n".join(outer) + "\n", encoding="utf-8")

    def ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def install(self, *what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        result = subprocess.run([*pip, "install", "--quiet", "--no-compile", *what], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    def packages(self) -> list[list[str]]:
        """(name, version) of everything that can be seen, the environment's own first."""
        return json.loads(self.ask(_LIST))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment") / "old")
    made.install(OLD)
    transformers, hub = made.ask(_FIRST).split()
    assert transformers == "4.57.3" and int(hub.split(".")[0]) < 1
    return made


def test_the_requirements_move_nothing(environment: Environment):
    before = environment.packages()
    environment.install("-r", "requirements.txt")
    assert environment.packages() == before, "requirements.txt installs into ComfyUI's environment"


@pytest.fixture(scope="module")
def old_server(environment: Environment, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphServer]:
    weights = SHIPPED if "shipped" in STARTERS else write_random_starter(tmp_path_factory.mktemp("starter"))
    running = GraphServer(comfyui, tmp_path_factory.mktemp("old-comfyui") / "base", weights, environment.python)
    yield running
    running.close()


def test_the_pack_loads_and_draws(old_server: GraphServer):
    packs = [line for line in old_server.log.splitlines() if any(str(pack) in line for pack in old_server.packs)]
    assert len(packs) == len(old_server.packs) and not [line for line in packs if "IMPORT FAILED" in line], packs
    assert "MixGRPO_TrainStep" in old_server.get("/object_info")
    drawn = old_server.run({
        "starter": node("MixGRPO_StarterModel"),
        **drawing(["starter", 0]),
        "decoded": node("VAEDecode", samples=["picture", 0], vae=["starter", 2]),
        "reward": node("MixGRPO_SceneAccuracy", weight=1.0, partial=True),
        "row": node("MixGRPO_PictureRows", images=["decoded", 0], label="old", rewards=["reward", 0], prompts=CAPTION),
        "grid": node("PreviewImage", images=["row", 1]),
    })  # fmt: skip
    assert old_server.latent(drawn, "picture_saved").isfinite().all()
    assert drawn["row"]["mixgrpo_rows"][0]["pictures"] == 1
