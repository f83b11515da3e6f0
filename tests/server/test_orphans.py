"""What is killed with SIGKILL leaves nothing running: real processes of a graph's host, its server and its worker."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import BOOTSTRAP, ENVIRONMENT, attempts, fields
from waiting import until

from mixgrpo.backend.places import read_state

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")

HOST = """
import asyncio, json, sys, time
from pathlib import Path
from mixgrpo.backend import client

client.BOOTSTRAP = Path(sys.argv[1])

async def main():
    backend = await client.connect()
    print((await backend.submit(json.loads(sys.argv[2])))["id"], flush=True)

asyncio.run(main())
time.sleep(100_000)
"""
"""Does with a backend what ComfyUI's process does: starts it, submits a job, and lives on."""

IMPATIENT = f"""
import runpy, sys
sys.argv[0] = {str(BOOTSTRAP)!r}
if sys.argv[1] == "serve":
    sys.argv += ["--idle", "1"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The bootstrap script with a second instead of the sixty after which a server gives up waiting for questions."""


class Host:
    """A process like ComfyUI's that has had a backend started, which trains."""

    def __init__(self, folder: Path):
        self.data = folder / "data"
        script = folder / "bootstrap.py"
        script.write_text(IMPATIENT)
        job = json.dumps(fields(iterations=100_000, checkpoint_every=100_000))
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(script), job],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT | {"MIXGRPO_DATA": str(self.data), "MIXGRPO_PYTHON": sys.executable},
        )
        self.job = self.process.stdout.readline().decode().strip()
        until(lambda: "iteration" in self.events(), "the first iteration")
        (self.server,) = [process for process in self.alive() if process.pid == read_state(self.data)["pid"]]
        (self.worker,) = [process for process in self.alive() if "worker" in process.cmdline()]

    def events(self) -> list[str]:
        file = self.data / "runs" / self.job / "events.jsonl"
        return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []

    def alive(self) -> list[psutil.Process]:
        """Every process that works in the data folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.data) in word for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def state(self) -> str:
        with sqlite3.connect(self.data / "jobs.sqlite") as database:
            return database.execute("SELECT state FROM jobs").fetchone()[0]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    made.process.stdout.close()
    for process in made.alive():
        process.kill()


def test_nothing_is_left_of_a_host_that_is_killed_and_its_job_is_paused(host):
    host.process.kill()
    until(lambda: not host.alive(), "the end of server and worker")
    assert host.state() == "paused" and host.events()[-1] == "paused"
    assert not (host.data / "server.json").exists()


def test_nothing_is_left_of_a_server_that_is_killed(host):
    """The worker pauses by itself; the host, which has nothing to ask, starts no other."""
    host.server.kill()
    until(lambda: not host.alive(), "the end of the worker")
    assert host.events()[-1] == "paused" and host.process.poll() is None


def test_nothing_is_left_when_all_are_killed_at_once(host):
    for process in (host.process, host.server, host.worker):
        process.kill()
    until(lambda: not host.alive(), "the end of all", 10)
    assert host.events()[-1] in ("iteration", "start")


def test_a_worker_that_is_killed_before_its_first_checkpoint_leaves_a_failed_job_and_no_process(host):
    host.worker.kill()
    until(lambda: host.state() == "failed", "the end of the job")
    assert [process.pid for process in host.alive()] == [host.server.pid]
    assert attempts(host.data / "runs" / host.job) == 1
    host.process.kill()
    until(lambda: not host.alive(), "the end of the server")
