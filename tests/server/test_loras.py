"""LoRA files that jobs start from: sent once, kept by their content, put into the run folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from servers import fields
from test_access import refusal, request
from waiting import until

from mixgrpo.backend.client import Backend, BackendError, JobFailed
from mixgrpo.backend.files import StorageError, load_metadata, sha256_of
from mixgrpo.backend.server import supervisor
from mixgrpo.backend.server.loras import LoraFiles, LoraTooLarge
from mixgrpo.backend.server.store import JobStore
from mixgrpo.backend.server.supervisor import Supervisor
from mixgrpo.backend.specs.job import parse_job

BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def lora(finished):
    """The LoRA of the finished job."""
    server, job = finished
    return server.run_folder(job["id"]) / "lora" / "small_000002.safetensors"


def safetensors(names=("a",)):
    """The smallest safetensors file with these tensors of one float."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


def kept(server):
    return sorted(file.name for file in (server.data / "loras").iterdir())


def test_a_job_starts_from_a_lora_that_was_sent(start, finished, lora, tmp_path):
    server = start()
    digest = server.ask("upload_lora", lora)
    assert digest == hashlib.sha256(lora.read_bytes()).hexdigest()
    assert (server.data / "loras" / f"{digest}.safetensors").read_bytes() == lora.read_bytes()
    stamp = (server.data / "loras" / f"{digest}.safetensors").stat().st_mtime_ns
    renamed = tmp_path / "other name.safetensors"
    renamed.write_bytes(lora.read_bytes())
    assert server.ask("upload_lora", renamed) == digest
    assert kept(server) == [f"{digest}.safetensors"]
    assert (server.data / "loras" / f"{digest}.safetensors").stat().st_mtime_ns == stamp

    job = server.ask("submit", fields(iterations=1, lora={"rank": 2, "alpha": 4, "start_from": digest}))
    assert job["id"] != finished[1]["id"]
    server.wait_for(job["id"], "done")
    folder = server.run_folder(job["id"])
    assert (folder / "start.safetensors").read_bytes() == lora.read_bytes()
    assert load_metadata(folder / "lora" / "small_000001.safetensors")["mixgrpo.started_from"] == digest
    (server.data / "loras" / f"{digest}.safetensors").unlink()
    further = server.ask("submit", fields(iterations=2, lora={"rank": 2, "alpha": 4, "start_from": digest}))
    assert server.wait_for(further["id"], "done")["id"] == job["id"]  # a run that has begun needs it no more


def test_a_job_whose_lora_is_not_here_is_refused_by_its_name(finished):
    server, _ = finished
    with pytest.raises(BackendError, match="no LoRA 'abab.*send the file first") as caught:
        server.ask("submit", fields(lora={"rank": 2, "alpha": 4, "start_from": "ab" * 32}))
    assert caught.value.kind == "UnknownLora"


def test_a_lora_that_does_not_fit_fails_with_what_to_set(finished, lora):
    server, _ = finished
    digest = server.ask("upload_lora", lora)
    job = server.ask("submit", fields(lora={"rank": 3, "alpha": 4, "start_from": digest}))
    with pytest.raises(JobFailed, match="has rank 2, but lora.rank is 3; set lora.rank to 2"):
        server.ask("finish", job["id"])


def test_a_job_cancelled_while_its_lora_is_copied_is_not_started(tmp_path, monkeypatch, lora):
    loras = LoraFiles(tmp_path / "loras")
    (tmp_path / "loras" / f"{sha256_of(lora)}.safetensors").write_bytes(lora.read_bytes())
    queue = Supervisor(JobStore(tmp_path / "jobs.sqlite"), tmp_path / "runs", loras)
    copying, copied = threading.Event(), threading.Event()
    monkeypatch.setattr(supervisor, "_put_start", lambda *_: (copying.set(), copied.wait(30)))
    monkeypatch.setattr(supervisor, "_start_worker", None)

    async def cancel_meanwhile():
        job = queue.submit(parse_job(fields(lora={"rank": 2, "alpha": 4, "start_from": sha256_of(lora)})), detached=False)
        serving = asyncio.create_task(queue.serve())
        await asyncio.to_thread(copying.wait, 30)
        states = [queue.cancel(job.id).state]
        copied.set()
        await asyncio.sleep(0.2)
        assert not serving.done() and serving.cancel()
        return [*states, queue.store.get(job.id).state]

    assert asyncio.run(cancel_meanwhile()) == ["cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"Content-Type": "application/json"}, b"{}", (400, "BadRequest")),
        (BYTES, b"", (400, "BadLora")),
        (BYTES, b"\x80\x04.pickle", (400, "BadLora")),
        (BYTES, safetensors()[:-1], (400, "BadLora")),
        (BYTES, safetensors() + b"more", (400, "BadLora")),
        (BYTES | {"Authorization": "Bearer wrong"}, safetensors(), (401, "BadToken")),
        (BYTES | {"Origin": "http://127.0.0.1:8188"}, safetensors(), (403, "Forbidden")),
    ],
)
def test_what_is_no_lora_file_leaves_nothing_behind(finished, headers, body, expected):
    server, _ = finished
    before = kept(server)
    assert refusal(request(server, "POST", "/v1/loras", headers, body)) == expected
    assert kept(server) == before


@pytest.mark.parametrize("digest", ["a" * 64, "A" * 64, "..%2fserver.json", "a" * 63, "%2e%2e"])
def test_what_nobody_sent_is_not_there(finished, digest):
    assert request(finished[0], "GET", f"/v1/loras/{digest}")[0] == 404


def test_a_file_too_large_is_refused_before_it_is_sent(finished, monkeypatch, tmp_path):
    server, _ = finished
    address = urlsplit(server.state["address"])
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"POST /v1/loras HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {server.state['token']}\r\n"
        connection.sendall(f"{head}Content-Length: {2**31 + 1}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    monkeypatch.setattr("mixgrpo.backend.client.LORA_BYTES", 100)
    other = tmp_path / "other.safetensors"
    other.write_bytes(safetensors([f"n{number}" for number in range(9)]))
    with pytest.raises(StorageError, match="a backend takes LoRA files of up to 100"):
        server.ask("upload_lora", other)
    with pytest.raises(StorageError, match="cannot read .*nowhere"):
        server.ask("upload_lora", tmp_path / "nowhere")


def test_a_sender_who_breaks_off_leaves_nothing_behind(finished):
    server, _ = finished
    before = kept(server)
    address = urlsplit(server.state["address"])
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"POST /v1/loras HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {server.state['token']}\r\n"
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b"x" * 5000)
        until(lambda: len(kept(server)) > len(before), "the beginning of the file")
    until(lambda: kept(server) == before, "the end of what was begun")
    assert server.ask("jobs")


def test_a_stream_without_a_length_ends_at_the_limit(tmp_path):
    (tmp_path / ".dead.part").touch()
    files, content = LoraFiles(tmp_path, limit=200), safetensors()

    async def blocks(count):
        for _ in range(count):
            yield b"x" * 100

    async def whole():
        yield content[:10]
        yield content[10:]

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LoraTooLarge, match="up to 200 bytes"):
        asyncio.run(files.receive(blocks(10**9)))
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert asyncio.run(files.receive(whole())) == hashlib.sha256(content).hexdigest()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [content]


def test_a_slow_upload_is_not_cut_off(monkeypatch, tmp_path):
    """Only silence counts: sending may take longer than an answer."""
    monkeypatch.setattr("mixgrpo.backend.client._ANSWER_SECONDS", 1.0)
    file = tmp_path / "slow.safetensors"
    file.write_bytes(bytes(16 * 2**20))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = "404 Not Found", {"error": {"type": "UnknownLora", "message": ""}}
        if head.startswith(b"POST"):
            for _ in range(16):
                await reader.readexactly(2**20)
                await asyncio.sleep(0.15)
            status, body = "200 OK", {"sha256": digest}
        text = json.dumps(body)
        writer.write(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()

    async def upload():
        async with await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**16) as slow:
            host, port = slow.sockets[0].getsockname()
            started = time.monotonic()
            return await Backend(f"http://{host}:{port}", "t").upload_lora(file), time.monotonic() - started

    sent, seconds = asyncio.run(upload())
    assert sent == digest and seconds > 2
