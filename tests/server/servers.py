"""Real servers for the tests, and very small jobs for their workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from waiting import until

from mixgrpo.backend.client import Backend
from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.places import read_state
from mixgrpo.backend.train.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "backend" / "bootstrap.py"
"""Seconds that a test waits for what should take a few; the machine may be busy."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MIXGRPO_")} | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of a job whose iterations take well under a second."""
    return {
        "name": "small",
        "prompts": ["a red circle on a white background"],
        "sampling": {"steps": 4, "window": {"size": 1}},
        "group_size": 2,
        "prompts_per_iteration": 1,
        "rewards": [{"scorer": "jpeg_compressibility"}],
        "lora": {"rank": 2, "alpha": 4},
        "optimizer": {"updates_per_rollout": 1},
        "iterations": 2,
        "checkpoint_every": 1,
    } | changes


class Server:
    """A server process on a data folder, and questions to it; ``ask("job", id)`` is ``Backend.job(id)``."""

    def __init__(self, data: Path, *options: object, parent: bool = False):
        self.data = data
        arguments = [sys.executable, BOOTSTRAP, "serve", "--data", data, *options, *(["--with-parent"] if parent else [])]
        stdin = subprocess.PIPE if parent else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )
        until(self._serving, "the server's start")
        self.state = read_state(data)
        self.backend = Backend(self.state["address"], self.state["token"])

    def _serving(self) -> bool:
        assert self.process.poll() is None, self.process.stdout.read().decode()
        state = read_state(self.data)
        return state is not None and state["pid"] == self.process.pid

    def ask(self, question: str, *arguments: Any, **options: Any) -> Any:
        return asyncio.run(getattr(self.backend, question)(*arguments, **options))

    def wait_for(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until the job is in one of the states and return it."""

        def there() -> Any:
            job = self.ask("job", job_id)
            assert job["state"] in states or job["state"] != "failed", job["last_words"]
            return job if job["state"] in states else None

        return until(there, f"state {' or '.join(states)}")

    def wait_for_iteration(self, job_id: str, iteration: int) -> dict[str, Any]:
        """Wait until so many iterations are trained and return the job."""

        def there() -> Any:
            job = self.ask("job", job_id)
            assert job["state"] != "failed", job["last_words"]
            return job if job["iteration"] >= iteration else None

        return until(there, f"iteration {iteration}")

    def run_folder(self, job_id: str) -> Path:
        return self.data / "runs" / job_id

    def workers(self) -> list[psutil.Process]:
        """The worker processes that this server has started."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                found += [child] if "worker" in child.cmdline() else []
            except psutil.NoSuchProcess:  # it has just ended
                continue
        return found

    def kill(self) -> None:
        """End the server as a power cut would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the server as Ctrl-C does, and its workers for certain."""
        if self.process.poll() is None:
            workers = self.workers()
            for worker in workers:
                worker.kill()
            self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()
        if self.process.stdin:
            self.process.stdin.close()


def events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def attempts(folder: Path) -> int:
    """How many workers have trained in a run."""
    return sum(event["event"] == "start" for event in events(folder))


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What an interrupted run must repeat bit for bit."""
    names = ("iteration", "scores", "window", "loss", "gradient_norm", "adapter_hash")
    return [tuple(event[name] for name in names) for event in RunFolder(folder).iterations()]


def lora_bytes(folder: Path, iteration: int, name: str = "small") -> bytes:
    """The exact bits of a run's LoRA."""
    tensors = load_tensors(folder / "lora" / f"{name}_{iteration:06d}.safetensors")
    return b"".join(tensors[key].numpy().tobytes() for key in sorted(tensors))
