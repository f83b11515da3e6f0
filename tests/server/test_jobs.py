"""Jobs from submission to LoRA, with real workers: train to N, pause, cancel, and what dies on the way."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time

import psutil
import pytest
from filelock import FileLock
from PIL import Image
from servers import BOOTSTRAP, ENVIRONMENT, attempts, events, fields, lora_bytes, numbers
from waiting import until

from mixgrpo.backend.client import BackendError, JobFailed
from mixgrpo.backend.files import load_json, save_json
from mixgrpo.backend.models.weights import base_model_hash
from mixgrpo.backend.specs import ModelSpec
from mixgrpo.backend.specs.job import parse_job

ENDLESS = 100_000


def test_the_same_n_again_is_there_at_once_and_a_larger_one_continues(finished, uninterrupted):
    server, job = finished
    folder = server.run_folder(job["id"])
    before = attempts(folder)
    for again in (fields(), fields(name="other", checkpoint_every=7), fields(iterations=1)):
        started = time.monotonic()
        same = server.ask("submit", again)
        assert (same["id"], same["state"]) == (job["id"], "done")
        assert time.monotonic() - started < 2
        assert asyncio.run(server.backend.finish(job["id"]))["iterations"] == again["iterations"]
    assert attempts(folder) == before
    server.ask("submit", fields(iterations=3))
    assert server.wait_for(job["id"], "done")["loras"][:3] == [1, 2, 3]
    assert [event["from_iteration"] for event in events(folder) if event["event"] == "start"][-1] == 2
    assert numbers(folder) == numbers(uninterrupted)[:3]
    assert lora_bytes(folder, 3) == lora_bytes(uninterrupted, 3)
    curve = server.ask("summary", job["id"])["curve"]
    assert curve["iteration"] == [1, 2, 3] and curve["reward"] == curve["scores"]["jpeg_compressibility"]


def test_an_iteration_that_was_passed_and_not_kept_is_refused(finished):
    server, job = finished
    lora = server.run_folder(job["id"]) / "lora" / "small_000001.safetensors"
    hidden = lora.rename(lora.with_suffix(".hidden"))
    try:
        with pytest.raises(BackendError, match="keeps no LoRA of iteration 1 .*2") as caught:
            server.ask("submit", fields(iterations=1))
    finally:
        hidden.rename(lora)
    assert caught.value.kind == "JobConflict"


def test_a_job_trained_on_other_base_weights_is_not_given_back_as_if_nothing_had_changed(finished):
    server, job = finished
    marker = sorted((server.run_folder(job["id"]) / "checkpoints").glob("*.json"))[-1]
    facts = load_json(marker)
    assert facts["base_model"] == base_model_hash(ModelSpec())
    try:
        save_json(marker, facts | {"base_model": "c0ffee" * 10 + "beef"})
        for again in (fields(), fields(iterations=9)):
            with pytest.raises(BackendError, match="c0ffeec0ffee, now .*; put those back, or change the job") as caught:
                server.ask("submit", again)
            assert caught.value.kind == "JobConflict" and facts["base_model"][:12] in str(caught.value)
        assert server.ask("job", job["id"])["iterations"] != 9
        marker.write_text("[]")
        assert server.ask("submit", fields())["state"] == "done"
    finally:
        save_json(marker, facts)
    assert server.ask("submit", fields())["state"] == "done"


def test_a_worker_that_fails_leaves_its_own_last_words(finished):
    server, _ = finished
    job = server.ask("submit", fields(rewards=[{"scorer": "beauty_of_the_day"}]))
    with pytest.raises(JobFailed, match="beauty_of_the_day"):
        server.ask("finish", job["id"])
    failed = server.ask("job", job["id"])
    assert failed["state"] == "failed" and failed["error"] in failed["last_words"]


def test_a_run_folder_in_use_is_refused(finished):
    server, _ = finished
    spec = fields(seed=99)
    folder = server.run_folder(parse_job(spec).identity())
    folder.mkdir()
    with FileLock(folder / ".lock"), pytest.raises(BackendError, match="in use") as caught:
        server.ask("submit", spec)
    assert caught.value.kind == "RunError"


def test_pause_is_answered_at_once_and_the_job_continues_bit_for_bit(start, uninterrupted):
    server = start()
    job = server.ask("submit", fields(iterations=ENDLESS, checkpoint_every=ENDLESS))
    server.wait_for_iteration(job["id"], 1)
    attached = server.ask("submit", fields(iterations=5))
    assert (attached["id"], attached["state"], attached["iterations"]) == (job["id"], "running", ENDLESS)
    seen = server.ask("job", job["id"])["iteration"]
    started = time.monotonic()
    assert server.ask("pause", job["id"])["state"] == "pausing"
    assert time.monotonic() - started < 2
    paused = server.wait_for(job["id"], "paused")
    reached = paused["iteration"]
    folder = server.run_folder(job["id"])
    assert seen <= reached <= seen + 2 and paused["loras"] == [reached]
    assert [path.stem for path in (folder / "checkpoints").glob("*.json")] == [f"iteration_{reached:06d}"]
    assert not (folder / "control").exists()
    resumed = server.ask("submit", fields(iterations=reached + 2))
    assert resumed["state"] in ("queued", "running")
    server.wait_for(job["id"], "done")
    assert attempts(folder) == 2
    assert numbers(folder) == numbers(uninterrupted)[: reached + 2]
    assert lora_bytes(folder, reached + 2) == lora_bytes(uninterrupted, reached + 2)


def test_sheets_can_be_watched_while_they_come_and_go(start, tmp_path):
    server = start()
    job = server.ask("submit", fields(iterations=ENDLESS, checkpoint_every=ENDLESS))
    seen, gone = set(), 0

    def sheets():
        return [one for one in server.ask("artifacts", job["id"]) if one["kind"] == "samples"]

    def watch():
        nonlocal gone
        for sheet in sheets():
            try:
                with Image.open(server.ask("download", job["id"], sheet, tmp_path / sheet["name"])) as picture:
                    picture.load()
                seen.add(sheet["iteration"])
            except BackendError as error:
                assert error.kind == "UnknownFile"
                gone += 1
        return len(seen) >= 4

    until(watch, "four sheets")
    assert len(sheets()) <= 2 and gone <= len(seen)
    server.ask("cancel", job["id"])
    server.wait_for(job["id"], "cancelled")


def test_a_killed_worker_is_replaced_only_when_it_got_further(start, uninterrupted):
    server = start()
    job = server.ask("submit", fields(iterations=ENDLESS, checkpoint_every=ENDLESS))
    folder = server.run_folder(job["id"])
    server.wait_for_iteration(job["id"], 1)
    server.workers()[0].kill()
    failed = server.wait_for(job["id"], "failed")
    assert "SIGKILL" in failed["error"] and "iteration" in failed["error"].rsplit("last words", 1)[1]

    server.ask("submit", fields(iterations=ENDLESS))
    until(lambda: server.ask("job", job["id"])["loras"], "the first LoRA")
    server.workers()[0].kill()
    until(lambda: attempts(folder) == 3, "a third worker")
    reached = events(folder)[-1].get("from_iteration") or server.ask("job", job["id"])["iteration"]
    server.wait_for_iteration(job["id"], reached + 1)
    assert server.ask("cancel", job["id"])["state"] == "cancelling"
    server.wait_for(job["id"], "cancelled")
    assert server.workers() == []
    trained = numbers(folder)
    assert len(trained) > 1 and trained == numbers(uninterrupted)[: len(trained)]


def test_a_killed_server_is_succeeded_by_one_that_continues(start, uninterrupted):
    server = start()
    job = server.ask("submit", fields(iterations=ENDLESS, checkpoint_every=ENDLESS))
    other = server.ask("submit", fields(seed=1))
    assert other["state"] == "queued" and server.ask("cancel", other["id"])["state"] == "cancelled"
    folder = server.run_folder(job["id"])
    second = [sys.executable, BOOTSTRAP, "serve", "--data", server.data]
    refused = subprocess.run(second, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert refused.returncode == 1 and "another backend serves" in refused.stderr
    server.wait_for_iteration(job["id"], 1)
    worker = server.workers()[0]
    server.kill()

    successor = start()
    assert successor.ask("job", job["id"])["state"] in ("running", "queued")
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running()
    until(lambda: attempts(folder) == 2, "a second worker")
    starts = [event for event in events(folder) if event["event"] == "start"]
    paused = [event for event in events(folder) if event["event"] == "paused"]
    assert starts[1]["from_iteration"] == paused[0]["iteration"] >= 1
    successor.ask("pause", job["id"])
    successor.wait_for(job["id"], "paused")
    trained = numbers(folder)
    assert trained == numbers(uninterrupted)[: len(trained)]
    assert successor.ask("cancel", job["id"])["state"] == "cancelled"
    assert [one["state"] for one in successor.ask("jobs")] == ["cancelled", "cancelled"]


def test_a_server_without_parent_pauses_what_is_attached_and_ends_after_what_is_detached(start):
    server = start("--idle", 0.5, parent=True)
    attached = server.ask("submit", fields(iterations=ENDLESS))
    detached = server.ask("submit", fields(seed=1, iterations=1), detached=True)
    server.wait_for_iteration(attached["id"], 1)
    time.sleep(1.5)
    assert server.process.poll() is None
    server.process.stdin.close()
    until(lambda: server.process.poll() is not None, "the end of the server")
    assert server.process.returncode == 0
    assert not (server.data / "server.json").exists()
    with sqlite3.connect(server.data / "jobs.sqlite") as database:
        states = dict(database.execute("SELECT id, state FROM jobs").fetchall())
    assert states == {attached["id"]: "paused", detached["id"]: "done"}


def test_an_idle_server_ends_with_its_parent(start):
    server = start("--idle", 0.2, parent=True)
    server.process.stdin.close()
    assert server.process.wait(30) == 0
