"""A real ComfyUI server with the pack in it under two names, and graphs run over its HTTP API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from torch import Tensor

from mixgrpo.backend.places import read_state

ROOT = Path(__file__).parents[2]
# twice, once under a name that is no Python name; ComfyUI serves no web files from a name that a URL would have to quote
PACK_NAMES = ("comfyui-mixgrpo", "MixGRPO-for-ComfyUI-1.2")
_PARTS = ("__init__.py", "nodes", "backend", "web", "workflows", "requirements.txt", "pyproject.toml")
_START_SECONDS = 300


def copy_pack(folder: Path, weights: Path) -> Path:
    """Copy what ComfyUI needs of the project, with the starter's ``weights``, into ``folder``, where nothing can be written."""
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "weights")
    for part in _PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignore)
        else:
            shutil.copy(source, folder)
    shutil.copytree(weights, folder / "backend" / "starter" / "weights")
    for entry in (folder, *folder.rglob("*")):
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    return folder


class GraphError(AssertionError):
    """A graph that ComfyUI refused or that failed; the message is ComfyUI's."""


class GraphServer:
    """``main.py --cpu`` on a free loopback port, with a base directory of its own.

    In it are also the data folder of the training backend that a graph may start, and the folder of the user's settings.
    ``python`` runs ComfyUI; the backend always has the tests' own Python.
    """

    def __init__(self, comfyui: Path, base: Path, weights: Path, python: str = sys.executable):
        self.base, self._log_path = base, base / "server.log"
        self.data, self.config = base / "mixgrpo data", base / "mixgrpo config"
        for name in ("models", "custom_nodes", "input", "output", "temp", "user"):
            (base / name).mkdir(parents=True, exist_ok=True)
        self.packs = [copy_pack(base / "custom_nodes" / name, weights) for name in PACK_NAMES]
        self.url = f"http://127.0.0.1:{_free_port()}"
        command = [
            python, "main.py", "--cpu", "--base-directory", str(base), "--port", self.url.rsplit(":", 1)[1],
            "--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:",
            "--preview-method", "latent2rgb",
        ]  # fmt: skip
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(command, cwd=comfyui, env=self._environment(), stdout=log, stderr=subprocess.STDOUT)
        self._wait_until_up()

    def _environment(self) -> dict[str, str]:
        """Nothing of the user's own settings and jobs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MIXGRPO_")}
        ours = {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # so that every new file in the pack is the pack's own doing
            "HF_HUB_OFFLINE": "1",
        }
        return kept | ours | self.places

    @property
    def places(self) -> dict[str, str]:
        """The environment in which a program finds this server's backend and settings."""
        return {"MIXGRPO_DATA": str(self.data), "MIXGRPO_CONFIG": str(self.config), "MIXGRPO_PYTHON": sys.executable}

    @property
    def log(self) -> str:
        """Everything the server has printed."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def _wait_until_up(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with code {self._process.returncode} while it started:\n{self.log[-3000:]}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.3)
        self.close()
        raise RuntimeError(f"ComfyUI did not answer within {_START_SECONDS} s:\n{self.log[-3000:]}")

    def close(self) -> None:
        """Stop the server, and the backend that its graphs have started."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.stop_backend()

    def stop_backend(self) -> None:
        """Stop the backend of this server's data folder, if there is one; its worker saves and ends with it."""
        state = read_state(self.data)
        try:
            process = psutil.Process(state["pid"]) if state else None
            if process is not None and str(self.data) in process.cmdline():
                process.terminate()
                process.wait(30)
        except psutil.NoSuchProcess:
            return

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """GET, or POST when there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} if data else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def get(self, path: str) -> Any:
        """GET, parsed as JSON."""
        return json.loads(self.fetch(path))

    def queue(self, graph: dict[str, Any]) -> str:
        """Queue a graph in the API format; returns its id.

        Raises:
            GraphError: ComfyUI does not accept it.
        """
        try:
            return json.loads(self.fetch("/prompt", {"prompt": graph, "client_id": uuid.uuid4().hex}))["prompt_id"]
        except urllib.error.HTTPError as refused:
            raise GraphError(refused.read().decode()) from None

    def wait(self, prompt_id: str, seconds: float = 120) -> dict[str, Any]:
        """The history of a graph, once it has finished, failed or been interrupted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            time.sleep(0.05)
        raise GraphError(f"the graph was not done after {seconds} s:\n{self.log[-3000:]}")

    def run(self, graph: dict[str, Any]) -> dict[str, Any]:
        """Run a graph; returns its ``ui`` outputs by node id.

        Raises:
            GraphError: the graph was refused or failed, with the sentence that the user sees.
        """
        return self.result(self.queue(graph))

    def result(self, prompt_id: str) -> dict[str, Any]:
        """What :meth:`run` returns, of a graph that was queued before."""
        history = self.wait(prompt_id)
        for name, message in history["status"]["messages"]:
            if name == "execution_error":
                raise GraphError(f"{message['node_type']}: {message['exception_message'].strip()}")
        return history["outputs"]

    def latent(self, outputs: dict[str, Any], node: str) -> Tensor:
        """What a SaveLatent node of the graph wrote."""
        saved = outputs[node]["latents"][0]
        return load_file(self.base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
