"""How often a worker is started again: as long as it gets further, and never for ever."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from servers import fields

from mixgrpo.backend.server import supervisor as supervision
from mixgrpo.backend.server.loras import LoraFiles
from mixgrpo.backend.server.store import ACTIVE, Job, JobStore, State
from mixgrpo.backend.server.supervisor import Supervisor
from mixgrpo.backend.specs.job import parse_job

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers end themselves with SIGKILL")

WORKER = """
import json, os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[2])
plan = json.loads(Path(__file__).with_suffix(".json").read_text())
iterations = json.loads((folder / "spec.json").read_text())["iterations"]

def say(event, **rest):
    with open(folder / "events.jsonl", "a") as log:
        log.write(json.dumps({"event": event, **rest}) + "\\n")

def at(kind, name):
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / name).write_text("{}")

reached = len(list((folder / "checkpoints").glob("*.json")))
with open(Path(__file__).with_suffix(".log"), "a") as log:
    log.write(f"{reached}\\n")
say("start", from_iteration=reached, until=iterations)
for iteration in range(reached + 1, iterations + 1):
    if plan["dies_before"] == iteration:
        os.kill(os.getpid(), signal.SIGKILL)
    at("checkpoints", f"iteration_{iteration:06d}.json")
    if plan["dies_after_each"] and iteration < iterations:
        os.kill(os.getpid(), signal.SIGKILL)
if plan["lora"]:
    at("lora", f"small_{iterations:06d}.safetensors")
say("done", iteration=iterations)
"""


class Workers:
    """Workers that do as they are told, under a real supervisor."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.script = folder, folder / "worker.py"
        self.script.write_text(WORKER)
        monkeypatch.setattr(supervision, "BOOTSTRAP", self.script)

    def run(self, iterations: int, most: int, **plan: object) -> tuple[Job, list[int]]:
        """Submit a job and serve until it is settled; returns it and from where each worker began, ``most`` at most."""
        behaviour = {"dies_before": None, "dies_after_each": False, "lora": True} | plan
        self.script.with_suffix(".json").write_text(json.dumps(behaviour))
        return asyncio.run(self._run(iterations, most))

    def begun(self) -> list[int]:
        log = self.script.with_suffix(".log")
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    async def _run(self, iterations: int, most: int) -> tuple[Job, list[int]]:
        store = JobStore(self.folder / "jobs.sqlite")
        served = Supervisor(store, self.folder / "runs", LoraFiles(self.folder / "loras"))
        job = served.submit(parse_job(fields(iterations=iterations)), detached=False)
        serving = asyncio.create_task(served.serve())
        while (job := store.get(job.id)).state in ACTIVE:
            assert len(self.begun()) <= most, "workers are started for ever"
            assert not serving.done()
            await asyncio.sleep(0.02)
        serving.cancel()
        run = served.run(job.id)
        run.refresh()
        assert run.history.attempts == len(self.begun()), "a restart counts as an attempt"
        store.close()
        return job, self.begun()


@pytest.fixture
def workers(tmp_path, monkeypatch):
    return Workers(tmp_path, monkeypatch)


def test_a_worker_that_dies_at_once_is_not_started_again(workers):
    job, begun = workers.run(5, most=1, dies_before=1)
    assert job.state is State.FAILED and begun == [0]
    assert "ended from outside (SIGKILL; the system does so when memory runs out) before a new checkpoint" in job.error


def test_a_worker_that_dies_after_every_checkpoint_still_gets_there(workers):
    job, begun = workers.run(5, most=5, dies_after_each=True)
    assert job.state is State.DONE and begun == [0, 1, 2, 3, 4]


def test_a_worker_that_always_dies_at_the_same_place_is_given_up_there(workers):
    """Memory runs out at iteration 4, say: one more try from the last checkpoint, then the job has failed."""
    job, begun = workers.run(9, most=2, dies_before=4)
    assert job.state is State.FAILED and begun == [0, 3]
    job, begun = workers.run(9, most=3, dies_before=4)
    assert job.state is State.FAILED and begun == [0, 3, 3], "submitted again it is tried once"
    job, begun = workers.run(9, most=4)
    assert job.state is State.DONE and begun == [0, 3, 3, 3] and job.error is None


def test_a_worker_that_is_done_without_a_lora_is_no_endless_loop(workers):
    job, begun = workers.run(2, most=1, lora=False)
    assert job.state is State.FAILED and begun == [0]
    assert "without the LoRA it was to make" in job.error
