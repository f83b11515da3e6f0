"""Kills the worker and the server of a small job at random moments and counts what that cost.

    python tests/benchmarks/kills.py [--kills 50] [--seed 0]

The last line is one JSON object: ``kills``; ``lost``, saved iterations that are gone and iterations trained twice beyond
``checkpoint_every``; ``corrupt`` files; ``orphans``, processes still there when they should have ended; ``equal``, whether all
numbers and the LoRA are those of a run that nobody has touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from PIL import Image

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "server")]

from servers import BOOTSTRAP, ENVIRONMENT, Server, fields, lora_bytes, numbers  # noqa: E402
from waiting import until  # noqa: E402

from mixgrpo.backend.errors import MixGRPOError  # noqa: E402
from mixgrpo.backend.files import load_json, load_tensors, save_json, sha256_of  # noqa: E402
from mixgrpo.backend.specs.job import parse_job  # noqa: E402
from mixgrpo.backend.train.history import History  # noqa: E402

EVERY = 5
"""The job's ``checkpoint_every``."""
ENDLESS = 900_000
PATIENCE = 180.0
"""Seconds after which a process that should have ended is an orphan; a worker that is just starting ends when it has started."""
JOB = fields(iterations=ENDLESS, checkpoint_every=EVERY, keep_checkpoints=2, keep_loras_every=1)
VICTIMS = ("worker", "server", "both")


@dataclass
class Findings:
    """What the kills have cost so far."""

    missing: set[int] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    orphans: set[int] = field(default_factory=set)
    kills: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """From a kill to the next attempt's start, by victim."""


class Target:
    """A server on a data folder, with a job that always goes on."""

    def __init__(self, data: Path):
        self.data = data
        self.server = Server(data)
        self.id = self.server.ask("submit", JOB)["id"]
        self.folder = self.server.run_folder(self.id)

    def events(self) -> list[dict]:
        return _whole_events(self.folder)

    def attempts(self) -> int:
        return sum(event["event"] == "start" for event in self.events())

    def trains(self, beyond: int) -> bool:
        """Whether an attempt after that many has begun."""
        return self.goes_on() and self.attempts() > beyond

    def goes_on(self) -> bool:
        """True; a job that has failed, since it was killed before a new checkpoint, is submitted again."""
        if self.server.ask("job", self.id)["state"] == "failed":
            self.server.ask("submit", JOB)
        return True

    def kill(self, victim: str, found: Findings) -> int:
        """Kill a process or both, and have a server again; returns the number of attempts until then."""
        if victim != "server":
            until(lambda: self.goes_on() and self.server.workers(), "a worker to kill")
        workers = self.server.workers()
        if victim != "server":
            for worker in workers:
                worker.kill()
        if victim != "worker":
            self.server.kill()
            self.server.stop()
        _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
        found.orphans.update(process.pid for process in alive)
        found.kills[victim] += 1
        attempts = self.attempts()
        if victim != "worker":
            self.server = Server(self.data)
        return attempts

    def finish(self) -> int:
        """Train a little farther, to the end; returns the last iteration."""
        self.server.ask("pause", self.id)
        self.server.wait_for(self.id, "paused", "failed")
        last = self.server.ask("job", self.id)["iteration"] + EVERY + 1
        self.server.ask("submit", JOB | {"iterations": last})
        self.server.wait_for(self.id, "done")
        return last


def _whole_events(folder: Path) -> list[dict]:
    """Events so far; the log may end in half a line, and there may be none yet."""
    try:
        text = (folder / "events.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    lines = []
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # cut short by a kill, which every reader passes over
    return lines


def look(target: Target, found: Findings) -> None:
    """Check all files as they are, whether or not somebody writes at the moment."""
    saved = {event["iteration"] for event in target.events() if event["event"] == "saved"}
    loras = {int(file.stem[-6:]) for file in (target.folder / "lora").glob("*.safetensors")}
    found.missing |= saved - loras
    newest = max((int(file.stem[-6:]) for file in (target.folder / "checkpoints").glob("*.json")), default=0)
    found.missing |= {iteration for iteration in saved if iteration > newest}
    for file in _files(target.folder):
        try:
            _read(file)
        except (MixGRPOError, OSError, ValueError, SyntaxError) as error:
            if file.exists():
                found.corrupt.add(f"{file.name}: {error}")
    with sqlite3.connect(target.data / "jobs.sqlite", timeout=PATIENCE) as database:
        if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            found.corrupt.add("jobs.sqlite")


def _files(folder: Path) -> list[Path]:
    """All files below a folder whose files come and go meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def _read(file: Path) -> None:
    """Read a file to its end; raises what its format says to damage. Files with hidden names are not there yet."""
    if not file.is_file() or any(part.startswith(".") for part in file.relative_to(file.parents[1]).parts):
        return
    if file.suffix == ".safetensors":
        load_tensors(file)
    elif file.suffix == ".json":
        facts = load_json(file)
        tensors = file.with_suffix(".safetensors")
        if "sha256" in facts and sha256_of(tensors) != facts["sha256"] and file.exists():
            raise ValueError(f"it does not describe {tensors.name}")
    elif file.suffix == ".png":
        with Image.open(file) as picture:
            picture.load()


def repeated(folder: Path) -> list[int]:
    """How many iterations each attempt after the first has trained again."""
    history, again = History(), []
    for event in _whole_events(folder):
        if event["event"] == "start" and history.attempts:
            again.append(history.iteration - event["from_iteration"])
        history.take(event)
    return again


def untouched(folder: Path, iterations: int) -> Path:
    """The same job to the same iteration, in a process that nobody kills."""
    spec = parse_job(JOB | {"iterations": iterations, "checkpoint_every": ENDLESS})
    save_json(folder / "spec.json", spec.model_dump(mode="json"))
    command = [sys.executable, str(BOOTSTRAP), "worker", str(folder)]
    subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return folder


def _left(data: Path) -> list[int]:
    """Processes that still work in the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(str(data) in word for word in process.cmdline()[1:]):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def measure(data: Path, kills: int, seed: int) -> dict[str, object]:
    """Kill so many times, finish the job, compare; returns the JSON object."""
    moments, found, target = random.Random(seed), Findings(), Target(data / "served")
    try:
        attempts, killed, victim = 0, time.monotonic(), "start"
        for number in range(kills):
            if moments.random() < 0.6:  # while it trains; else while it starts, or waits for its predecessor's end
                until(lambda attempts=attempts: target.trains(attempts), "training")
                found.seconds[victim].append(time.monotonic() - killed)
            if number % 5 == 4:  # now and then it gets somewhere
                until(lambda attempts=attempts: target.trains(attempts), "training")
                target.server.wait_for_iteration(target.id, target.server.ask("job", target.id)["iteration"] + EVERY + 1)
            time.sleep(moments.uniform(0, 2))
            victim, killed = VICTIMS[number % len(VICTIMS)], time.monotonic()
            attempts = target.kill(victim, found)
            look(target, found)
        until(lambda: target.trains(attempts), "training after the last kill")
        last = target.finish()
        look(target, found)
        found.corrupt |= {f"{file.name}: left behind" for file in _files(target.folder) if file.suffix == ".part"}
    finally:
        target.server.stop()
    found.orphans.update(_left(target.data))
    straight = untouched(data / "untouched", last)
    again = repeated(target.folder)
    equal = numbers(target.folder) == numbers(straight) and lora_bytes(target.folder, last) == lora_bytes(straight, last)
    _tell(found, again, last)
    return {
        "kills": sum(found.kills.values()),
        "lost": len(found.missing) + sum(max(0, count - EVERY) for count in again),
        "corrupt": len(found.corrupt),
        "orphans": len(found.orphans),
        "equal": equal,
        "repeated": max(again, default=0),
        "checkpoint_every": EVERY,
        "iterations": last,
        "attempts": len(again) + 1,
    }


def _tell(found: Findings, again: list[int], last: int) -> None:
    print(f"{'killed':<10}{'times':>6}{'seconds until training':>25}")
    for victim in VICTIMS:
        seconds = found.seconds[victim]
        print(f"{victim:<10}{found.kills[victim]:>6}" + (f"{min(seconds):>17.1f} to {max(seconds):.1f}" if seconds else ""))
    mean = sum(again) / max(1, len(again))
    print(f"{last} iterations, {len(again) + 1} attempts; trained again: {mean:.1f} an attempt, {max(again, default=0)} at most")
    for line in sorted(found.corrupt):
        print(f"corrupt: {line}")
    if found.missing:
        print(f"announced as saved and gone: {sorted(found.missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        print(json.dumps(measure(Path(folder), given.kills, given.seed)), flush=True)


if __name__ == "__main__":
    main()
