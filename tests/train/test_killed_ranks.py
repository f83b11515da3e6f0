"""``mixgrpo train --ranks 2`` with one of its processes killed: the others end by themselves, and the run can go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from training_jobs import ENVIRONMENT, fields
from waiting import until

from mixgrpo.backend.files import save_json
from mixgrpo.backend.train.run_folder import RunFolder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
PATIENCE = 400.0
SECONDS = 60.0
"""As documented: the ranks notice it between two phases, PyTorch's launcher gives them 30 s."""


def named(folder: Path) -> list[psutil.Process]:
    """All processes that have the folder among their arguments and are not just dead."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def trains(run: RunFolder, attempt: int) -> bool:
    """Whether an attempt has begun and finished an iteration."""
    return any((event["event"], event["attempt"]) == ("iteration", attempt) for event in run.events())


@pytest.fixture
def command(tmp_path):
    """The command to train in ``tmp_path / "run"``; whatever of it is left is ended with the test."""
    job = tmp_path / "job.json"
    save_json(job, fields(prompts_per_iteration=2, iterations=100_000, checkpoint_every=5))
    folder = tmp_path / "run"
    yield [sys.executable, "-m", "mixgrpo.backend.cli", "train", str(job), "--out", str(folder), "--ranks", "2"]
    for process in named(folder):
        process.kill()


def test_nothing_is_left_when_a_rank_the_launcher_or_the_command_is_killed(command, tmp_path):
    folder, run = tmp_path / "run", RunFolder(tmp_path / "run")
    for attempt, victim in enumerate(("command", "launcher", "rank 0"), 1):
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            until(partial(trains, run, attempt), f"an iteration of attempt {attempt}", PATIENCE)
            (launcher,) = psutil.Process(process.pid).children()
            ranks = sorted(launcher.children(), key=lambda rank: int(rank.environ()["RANK"]))
            assert len(ranks) == 2
            {"command": process, "launcher": launcher, "rank 0": ranks[0]}[victim].kill()
            killed = time.monotonic()
            until(lambda: not named(folder), f"the end of all after the end of the {victim}", SECONDS)
            if victim != "command":
                said = process.communicate(timeout=SECONDS)[0].decode()
                assert process.returncode == 1 and "the same command continues from the last one" in said.replace("\n", " ")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        print(f"{victim}: {time.monotonic() - killed:.1f} s")
        run.lock()  # nobody has it
        run.unlock()
    trained = [event["iteration"] for event in run.iterations()]
    assert trained == list(range(1, len(trained) + 1))
    stopped = [(event["attempt"], event["iteration"]) for event in run.events() if event["event"] == "paused"]
    assert [attempt for attempt, _ in stopped] == [1, 2], "what could be saved was"
    begun = {event["attempt"]: event["from_iteration"] for event in run.events() if event["event"] == "start"}
    assert [begun[attempt + 1] for attempt, _ in stopped] == [iteration for _, iteration in stopped]
