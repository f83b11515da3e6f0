"""What a job keeps, and what it says about itself: LoRAs that stay, attempts, layouts."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

import aiohttp
import pytest
from servers import attempts, events, fields

from mixgrpo.backend.client import BackendError
from mixgrpo.backend.files import load_json, save_json

ENDLESS = 100_000


def test_a_job_says_which_loras_there_are_and_that_it_went_on_with_another_layout(finished):
    server, _ = finished
    spec = fields(seed=7, keep_loras_every=1000)
    job = server.ask("submit", spec | {"iterations": 1})
    assert server.wait_for(job["id"], "done")["layout_changes"] == []
    folder = server.run_folder(job["id"])
    (marker,) = (folder / "checkpoints").glob("*.json")
    facts = load_json(marker)
    save_json(marker, facts | {"layout": facts["layout"] | {"threads": 7}})

    server.ask("submit", spec | {"iterations": 7})
    done = server.wait_for(job["id"], "done")
    summary = server.ask("summary", job["id"])
    assert done["loras"] == sorted({1, summary["best"], 6, 7})
    loras = {one["iteration"] for one in server.ask("artifacts", job["id"]) if one["kind"] == "lora"}
    assert loras == set(done["loras"])
    assert done["attempts"] == attempts(folder) == 2
    change = {"iteration": 1, "was": {"threads": 7}, "now": {"threads": facts["layout"]["threads"]}}
    assert done["layout_changes"] == summary["layout_changes"] == [change]
    said = (folder / "worker.log").read_text()
    assert "continued from iteration 1 with another layout (threads 7 -> 1)" in said and "no longer bit-equal" in said
    with pytest.raises(BackendError, match="keeps no LoRA of iteration 5 .*there are: 1, "):
        server.ask("submit", spec | {"iterations": 5})


def test_the_lora_that_somebody_waits_for_is_saved_and_stays(finished):
    server, _ = finished
    spec = fields(seed=8, keep_loras_every=ENDLESS, checkpoint_every=3)
    job = server.ask("submit", spec | {"iterations": ENDLESS})
    reached = server.wait_for_iteration(job["id"], 1)["iteration"]
    wanted = 3 * (reached // 3) + 19  # no multiple of checkpoint_every
    assert server.ask("submit", spec | {"iterations": wanted})["iterations"] == ENDLESS
    server.wait_for_iteration(job["id"], wanted + 6)
    server.ask("pause", job["id"])
    paused = server.wait_for(job["id"], "paused")
    assert wanted in paused["loras"] and len(paused["loras"]) <= 5
    assert [event for event in events(server.run_folder(job["id"])) if event["event"] == "removed"]
    assert server.ask("submit", spec | {"iterations": wanted})["state"] == "done"


@pytest.fixture
def large(idle):
    """A file among a job's LoRAs that no socket's buffers can hold, and its checksum."""
    server, job = idle
    file = server.run_folder(job["id"]) / "lora" / "large_000900.safetensors"
    file.write_bytes(secrets.token_bytes(32 * 2**20))
    yield file, hashlib.sha256(file.read_bytes()).hexdigest()
    file.unlink(missing_ok=True)


def test_a_lora_that_is_removed_meanwhile_still_arrives_whole(idle, large):
    server, job = idle
    file, digest = large

    async def download():
        url = f"{server.backend.address}/v1/jobs/{job['id']}/artifacts/lora/{file.name}"
        headers = {"Authorization": f"Bearer {server.backend.token}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
            begun = await answer.content.readexactly(1000)
            file.unlink()
            return begun + await answer.content.read()

    assert hashlib.sha256(asyncio.run(download())).hexdigest() == digest


def test_a_lora_that_was_removed_is_no_artifact_any_more(idle, large, tmp_path):
    server, job = idle
    artifact = next(one for one in server.ask("artifacts", job["id"]) if one["name"] == large[0].name)
    large[0].unlink()
    with pytest.raises(BackendError, match="ask for the job's artifacts") as caught:
        server.ask("download", job["id"], artifact, tmp_path / "lora")
    assert caught.value.kind == "UnknownFile" and list(tmp_path.iterdir()) == []
