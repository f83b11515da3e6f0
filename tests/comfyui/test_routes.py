"""What the page may ask of a backend through ComfyUI's server: the answers, and what is refused."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from aiohttp import web
from graph_server import GraphServer

from mixgrpo.backend.client import SETTLED, Backend
from mixgrpo.nodes.routes import ROUTES, register_routes

NO_JOB = "0123456789abcdef"
SECRET = "a-secret-that-no-answer-may-hold"


def ask(server: GraphServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict]:
    """Status and parsed answer of one of our routes; NaN in it is an error, as it is in a page."""
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(server.url + "/mixgrpo" + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        status, text = refused.code, refused.read().decode()
    assert SECRET not in text
    return status, json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def refusal(server: GraphServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    status, answer = ask(server, path, method, **headers)
    assert set(answer) == {"error"} and set(answer["error"]) == {"type", "message"}
    return status, answer["error"]["type"], answer["error"]["message"]


def small_job(**changes) -> dict:
    """The fields of a job whose iterations take well under a second."""
    return {
        "name": "routes",
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


def settled(server: GraphServer, job: str) -> dict:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        status, summary = ask(server, f"/local/jobs/{job}/summary")
        assert status == 200, summary
        if summary["state"] in SETTLED:
            return summary
        time.sleep(0.2)
    raise AssertionError("the job did not settle within 240 s")


@pytest.fixture
def settings(server: GraphServer, backend: Backend) -> Iterator[None]:
    """Settings with the backend once more under another name, and one where nobody answers."""
    file = server.config / "backends.yaml"
    server.config.mkdir(exist_ok=True)
    names = {
        "gpu": (backend.address, backend.token),
        "asleep": ("http://127.0.0.1:9", SECRET),
        "stranger": (backend.address, SECRET),
    }
    lines = [f'  {name}: {{address: "{address}", token: "{token}"}}\n' for name, (address, token) in names.items()]
    file.write_text("backends:\n" + "".join(lines))
    file.chmod(0o600)
    yield
    file.unlink()


def test_a_job_is_shown_paused_and_cancelled(server: GraphServer, backend: Backend, settings):
    job = asyncio.run(backend.submit(small_job(iterations=500)))["id"]
    status, answer = ask(server, "/local/jobs")
    assert status == 200 and answer["jobs"][0]["id"] == job and answer["jobs"][0]["name"] == "routes"
    assert ask(server, f"/local/jobs/{job}/pause", "POST")[0] == 200
    assert settled(server, job)["state"] == "paused"

    asyncio.run(backend.submit(small_job(iterations=501)))
    status, answer = ask(server, f"/gpu/jobs/{job}/cancel", "POST")
    assert status == 200 and answer["iterations"] == 501
    assert settled(server, job)["state"] == "cancelled"


def test_a_summary_has_the_curve_and_nothing_of_the_machine(server: GraphServer, backend: Backend):
    job = asyncio.run(backend.submit(small_job(seed=1)))["id"]
    summary = settled(server, job)
    assert set(summary) == {
        "id", "name", "state", "iteration", "iterations", "loras", "error", "created", "curve", "seconds", "seconds_left", "best",
    }  # fmt: skip
    assert summary["state"] == "done" and summary["curve"]["iteration"] == [1, 2] and summary["loras"] == [1, 2]
    assert len(summary["curve"]["reward"]) == 2 and set(summary["curve"]["scores"]) == {"jpeg_compressibility"}
    text = json.dumps([summary, ask(server, "/local/jobs")[1]])
    assert backend.token not in text and backend.address.removeprefix("http://") not in text and str(server.base) not in text


def test_what_does_not_exist_is_refused(server: GraphServer, settings):
    assert refusal(server, f"/local/jobs/{NO_JOB}/summary")[:2] == (404, "UnknownJob")
    for job in ("x", NO_JOB.upper(), NO_JOB + "0", "..%2F..%2Fserver"):
        status, kind, message = refusal(server, f"/local/jobs/{job}/summary")
        assert (status, kind) == (404, "UnknownJob") and "no job's id" in message
    status, kind, message = refusal(server, "/nobody/jobs")
    assert (status, kind) == (404, "UnknownBackend") and message.endswith("known: local, asleep, gpu, stranger")


def test_a_backend_that_does_not_answer_or_trust_is_said_without_its_address(server: GraphServer, settings):
    status, kind, message = refusal(server, "/asleep/jobs")
    assert (status, kind) == (502, "BackendUnreachable") and "asleep" in message and "127.0.0.1" not in message
    status, kind, message = refusal(server, "/stranger/jobs")
    assert (status, kind) == (502, "BadToken") and "stranger" in message


def test_settings_that_cannot_be_read_are_not_quoted(server: GraphServer, settings):
    (server.config / "backends.yaml").write_text(f'backends: {{gpu: {{token: "{SECRET}" address: x}}}}')
    assert refusal(server, "/local/jobs")[:2] == (500, "PlaceError")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_form_on_a_foreign_page_can_stop_nothing(server: GraphServer, backend: Backend, kind, action):
    assert refusal(server, f"/local/jobs/{NO_JOB}/{action}", "POST", Content_Type=kind)[:2] == (415, "BadRequest")
    request = urllib.request.Request(f"{server.url}/mixgrpo/local/jobs/{NO_JOB}/{action}", method="GET")
    with pytest.raises(urllib.error.HTTPError, match="404"):  # nor can the address of a picture
        urllib.request.urlopen(request, timeout=60)


def test_every_path_is_there_once_and_under_api(server: GraphServer, backend: Backend):
    """Two copies of the pack are installed; a path registered twice keeps ComfyUI from starting."""
    assert json.loads(server.fetch("/api/mixgrpo/local/jobs")).keys() == {"jobs"}


def test_paths_that_another_copy_has_registered_are_left_alone(monkeypatch):
    table = web.RouteTableDef()
    instance = SimpleNamespace(routes=table)
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=instance)))
    register_routes()
    handlers = [route.handler for route in table]
    assert len(handlers) == len(ROUTES) == 4
    register_routes()
    assert [route.handler for route in table] == handlers
    router = web.UrlDispatcher()
    router.add_routes(table)


def test_without_a_server_nothing_is_registered(monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    register_routes()
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace()))
    register_routes()
