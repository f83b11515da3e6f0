"""The HTTP interface: who may ask, what can be asked, and how refusals are said."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import MixGRPOError
from ..files import StorageError, known_sha256
from ..specs import SpecError
from ..specs.job import parse_job
from ..train.run_folder import RunError
from .loras import BadLora, LoraTooLarge, UnknownLora
from .runs import UnknownFile, job_id
from .store import Job, UnknownJob
from .supervisor import JobConflict, Supervisor

_MEBIBYTE = 2**20
_LONGEST_WAIT = 30.0
_POLL = 0.1
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class Forbidden(MixGRPOError):
    """A request from where none is expected."""


class BadToken(MixGRPOError):
    """A request without the token, or with another."""


class BadRequest(MixGRPOError):
    """A request that cannot be understood."""


_STATUS: dict[type[MixGRPOError], int] = {
    BadRequest: 400,
    BadLora: 400,
    SpecError: 400,
    BadToken: 401,
    Forbidden: 403,
    UnknownJob: 404,
    UnknownFile: 404,
    UnknownLora: 404,
    JobConflict: 409,
    RunError: 409,
    LoraTooLarge: 413,
    StorageError: 507,
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Activity:
    """When somebody last asked for something; a request that waits counts all the time."""

    def __init__(self) -> None:
        self._open, self._last = 0, time.monotonic()

    def __enter__(self) -> None:
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        self._last = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last answered request; 0 while one is open."""
        return 0.0 if self._open else time.monotonic() - self._last


def make_app(
    supervisor: Supervisor, token: str, hosts: frozenset[str], activity: Activity, about: dict[str, Any]
) -> web.Application:
    """The application.

    Args:
        token: what every request must bear.
        hosts: names under which the server may be addressed, without ports (a tunnel has another); else a web page could
            reach it under a name of its own that it lets point here.
        activity: told of every request that bears the token.
        about: what ``GET /v1/server`` says.
    """
    api = Api(supervisor, about)
    app = web.Application(middlewares=[_refusals, _guard(token, hosts, activity)], client_max_size=4 * _MEBIBYTE)
    app.router.add_get("/v1/server", api.server)
    app.router.add_post("/v1/loras", api.receive_lora)
    app.router.add_get("/v1/loras/{sha256}", api.lora)
    app.router.add_post("/v1/jobs", api.submit)
    app.router.add_get("/v1/jobs", api.jobs)
    app.router.add_get("/v1/jobs/{id}", api.job)
    app.router.add_post("/v1/jobs/{id}/pause", api.pause)
    app.router.add_post("/v1/jobs/{id}/cancel", api.cancel)
    app.router.add_get("/v1/jobs/{id}/events", api.events)
    app.router.add_get("/v1/jobs/{id}/summary", api.summary)
    app.router.add_get("/v1/jobs/{id}/artifacts", api.artifacts)
    app.router.add_get("/v1/jobs/{id}/artifacts/{kind}/{name}", api.artifact)
    return app


@web.middleware
async def _refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every refusal as JSON: its type, and the sentence."""
    try:
        return await handler(request)
    except MixGRPOError as error:
        status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
        return _refusal(status, type(error).__name__, str(error))
    except web.HTTPException as error:
        return _refusal(error.status, "HTTPError", f"{request.method} {request.path[:200]}: {error.reason}")


def _refusal(status: int, kind: str, message: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.json_response({"error": {"type": kind, "message": message}}, status=status, headers=headers)


def _guard(token: str, hosts: frozenset[str], activity: Activity) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        name = _host_name(request.headers.get("Host", ""))
        if name not in hosts:
            raise Forbidden(f"this backend is not called {name[:100]!r}; start it with --allow-host to add a name")
        if "Origin" in request.headers:
            raise Forbidden("this request comes from a web page; the backend answers programs only")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            raise BadToken(
                "the token is missing or wrong; local programs find it by themselves, a remote one belongs in backends.yaml"
            )
        with activity:
            return await handler(request)

    return guard


def _host_name(host: str) -> str:
    """The name in a Host header without the port; empty when there is none or it makes no sense."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


class Api:
    """What can be asked; every method answers one route."""

    def __init__(self, supervisor: Supervisor, about: dict[str, Any]):
        self._supervisor, self._about = supervisor, about

    async def server(self, request: web.Request) -> web.Response:
        """Who answers here."""
        return web.json_response(self._about)

    async def receive_lora(self, request: web.Request) -> web.Response:
        """Take in the file of a LoRA that jobs can start from."""
        if request.content_type != "application/octet-stream":
            raise BadRequest("send the LoRA file's bytes, with Content-Type: application/octet-stream")
        loras = self._supervisor.loras
        loras.check_size(request.content_length or 0)
        return web.json_response({"sha256": await loras.receive(request.content.iter_chunked(_MEBIBYTE))})

    async def lora(self, request: web.Request) -> web.Response:
        """Whether a LoRA file is here."""
        file = self._supervisor.loras.find(request.match_info["sha256"])
        return web.json_response({"sha256": file.stem, "size": file.stat().st_size})

    async def submit(self, request: web.Request) -> web.Response:
        """Take a job in; the answer is the job, which may be finished already."""
        body = await _json_object(request)
        if not body.keys() <= {"spec", "detached"} or "spec" not in body:
            raise BadRequest("a submission has the fields spec and, if wanted, detached")
        if not isinstance(body.get("detached", False), bool):
            raise BadRequest("detached must be true or false")
        spec = parse_job(body["spec"])
        await asyncio.to_thread(self._supervisor.check_base_model, spec)
        job = self._supervisor.submit(spec, body.get("detached", False))
        return web.json_response(self._show(job))

    async def jobs(self, request: web.Request) -> web.Response:
        """All jobs, the newest first."""
        return web.json_response({"jobs": [self._show(job) for job in self._supervisor.store.all()]})

    async def job(self, request: web.Request) -> web.Response:
        """One job, with its spec."""
        job = self._find(request)
        return web.json_response(self._show(job) | {"spec": job.spec})

    async def pause(self, request: web.Request) -> web.Response:
        """Ask for a pause; the answer does not wait for it."""
        return web.json_response(self._show(self._supervisor.pause(self._find(request).id)))

    async def cancel(self, request: web.Request) -> web.Response:
        """Ask for the end; the answer does not wait for it."""
        return web.json_response(self._show(self._supervisor.cancel(self._find(request).id)))

    async def events(self, request: web.Request) -> web.Response:
        """Events after an offset; waits until there is one, or the state is another than the one given."""
        job = self._find(request)
        after = int(_number(request, "after", 0, 2**62))
        deadline = time.monotonic() + _number(request, "wait", 0, _LONGEST_WAIT)
        known = request.query.get("state", job.state)
        while True:
            job = self._supervisor.store.get(job.id)
            events, offset = self._supervisor.run(job.id).events_after(after)
            if offset != after or job.state != known or time.monotonic() >= deadline:
                return web.json_response({"events": events, "next": offset, "job": self._show(job)})
            await asyncio.sleep(_POLL)

    async def summary(self, request: web.Request) -> web.Response:
        """Curves, seconds, LoRAs."""
        job = self._find(request)
        run = self._supervisor.run(job.id)
        run.refresh()
        return web.json_response(self._show(job) | run.summary(job.spec))

    async def artifacts(self, request: web.Request) -> web.Response:
        """Every file on offer with size and checksum."""
        run = self._supervisor.run(self._find(request).id)
        return web.json_response({"artifacts": await asyncio.to_thread(run.artifacts)})

    async def artifact(self, request: web.Request) -> web.StreamResponse:
        """One file; of a LoRA also a range."""
        run = self._supervisor.run(self._find(request).id)
        kind, name = request.match_info["kind"], request.match_info["name"]
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        if kind == "samples":
            sheet = await asyncio.to_thread(run.sheet, name)
            headers["X-Checksum-SHA256"] = hashlib.sha256(sheet).hexdigest()
            return web.Response(body=sheet, content_type="image/png", headers=headers)
        file = run.file(kind, name)
        try:
            headers["X-Checksum-SHA256"] = await asyncio.to_thread(known_sha256, file)
        except StorageError:
            run.file(kind, name)  # refuses when retention has removed it meanwhile
            raise
        return web.FileResponse(file, headers=headers)

    def _find(self, request: web.Request) -> Job:
        return self._supervisor.store.get(job_id(request.match_info["id"]))

    def _show(self, job: Job) -> dict[str, Any]:
        """A job as clients see it; ``loras`` are the iterations there is a LoRA of, which may become fewer."""
        run = self._supervisor.run(job.id)
        run.refresh()
        return {
            "id": job.id,
            "name": job.spec["name"],
            "state": job.state,
            "iteration": run.history.iteration,
            "iterations": job.iterations,
            "loras": sorted(run.loras()),
            "attempts": run.history.attempts,
            "layout_changes": run.history.layout_changes,
            "detached": job.detached,
            "error": job.error,
            "last_words": job.last_words,
            "created": job.created,
        }


async def _json_object(request: web.Request) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise BadRequest("send JSON, with Content-Type: application/json")
    try:
        body = json.loads(await request.text())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _number(request: web.Request, name: str, least: float, most: float) -> float:
    text = request.query.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise BadRequest(f"{name} must be a number from {least:g} to {most:g} (given: {text[:40]!r})")
    return value
