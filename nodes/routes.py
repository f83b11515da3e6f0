"""What the page may ask of a backend. ComfyUI's server passes it on, so that the browser never holds a token or an address."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..backend.client import Backend, BackendError, BackendUnreachable, connect
from ..backend.errors import MixGRPOError
from ..backend.places import PlaceError
from ..backend.settings import LOCAL, load_settings

_Ask = Callable[[Backend, str], Awaitable[dict[str, Any]]]
_ID = re.compile(r"[0-9a-f]{16}")
_JOB = ("id", "name", "state", "iteration", "iterations", "loras", "error", "created")
_SUMMARY = (*_JOB, "curve", "seconds", "seconds_left", "best")
_PASSED_ON = {"UnknownJob": 404, "JobConflict": 409, "RunError": 409}
"""The backend's refusals that speak of jobs; its others may name its host."""


class Refusal(MixGRPOError):
    """What the page is told instead of an answer: an HTTP status, a kind, and the sentence."""

    def __init__(self, status: int, kind: str, message: str):
        super().__init__(message)
        self.status, self.kind = status, kind


def register_routes() -> None:
    """Add the routes to ComfyUI's server, when there is one and no other copy of this pack has added them.

    A method and path registered twice would keep ComfyUI from starting. ComfyUI adds the same again under ``/api``.
    """
    server = getattr(sys.modules.get("server"), "PromptServer", None)  # outside a running ComfyUI there is none
    routes = getattr(getattr(server, "instance", None), "routes", None)
    if routes is None:
        return
    taken = {(route.method, route.path) for route in routes if isinstance(route, web.RouteDef)}
    for method, path, handler in ROUTES:
        if (method, path) not in taken:
            routes.route(method, path)(handler)


async def jobs(request: web.Request) -> web.Response:
    """All jobs of a backend, the newest first."""
    return await _answer(request, _jobs)


async def summary(request: web.Request) -> web.Response:
    """A job with its curve."""
    return await _answer(request, lambda backend, job: _picked(backend.summary(job), _SUMMARY))


async def pause(request: web.Request) -> web.Response:
    """Ask a job to pause; the answer does not wait for it."""
    return await _answer(request, lambda backend, job: _picked(backend.pause(job), _JOB))


async def cancel(request: web.Request) -> web.Response:
    """Ask a job to end; the answer does not wait for it."""
    return await _answer(request, lambda backend, job: _picked(backend.cancel(job), _JOB))


_PREFIX = "/mixgrpo/{backend}/jobs"
ROUTES = (
    ("GET", _PREFIX, jobs),
    ("GET", _PREFIX + "/{id}/summary", summary),
    ("POST", _PREFIX + "/{id}/pause", pause),
    ("POST", _PREFIX + "/{id}/cancel", cancel),
)


async def _jobs(backend: Backend, _: str) -> dict[str, Any]:
    return {"jobs": [{key: job[key] for key in _JOB} for job in await backend.jobs()]}


async def _picked(asked: Awaitable[dict[str, Any]], fields: tuple[str, ...]) -> dict[str, Any]:
    job = await asked
    return {key: job[key] for key in fields}


async def _answer(request: web.Request, ask: _Ask) -> web.Response:
    try:
        return _json(await _asked(request, ask))
    except Refusal as refusal:
        return _json({"error": {"type": refusal.kind, "message": str(refusal)}}, refusal.status)


async def _asked(request: web.Request, ask: _Ask) -> dict[str, Any]:
    """Check the request, then ask the backend; every error becomes a :class:`Refusal` that names neither address nor token."""
    alias, job = request.match_info["backend"], request.match_info.get("id", "")
    if request.method == "POST" and request.content_type != "application/json":  # what a form on a foreign page cannot send
        raise Refusal(415, "BadRequest", "send the request with Content-Type: application/json")
    if "id" in request.match_info and not _ID.fullmatch(job):
        raise Refusal(404, "UnknownJob", f"{job[:64]!r} is no job's id; an id has 16 hexadecimal digits")
    _check_alias(alias)
    try:
        return await ask(await connect(alias, start=False), job)
    except BackendUnreachable:
        way_out = "run a train node, or `mixgrpo serve`" if alias == LOCAL else "start it, or its tunnel, again"
        raise Refusal(
            502, "BackendUnreachable", f"the backend {alias} does not answer; its jobs are safe on its disk: {way_out}"
        ) from None
    except BackendError as error:
        status = _PASSED_ON.get(error.kind)
        message = str(error) if status else f"the backend {alias} refused ({error.kind}); `mixgrpo jobs list` says why"
        raise Refusal(status or 502, error.kind, message) from None
    except (KeyError, TypeError):
        raise Refusal(502, "BackendError", f"the backend {alias} is of another version; update it or this pack") from None


def _check_alias(alias: str) -> None:
    try:
        known = [LOCAL, *sorted(load_settings().remotes)]
    except PlaceError:  # its sentence may quote the file, and a token with it
        raise Refusal(500, "PlaceError", "backends.yaml cannot be used; run `mixgrpo jobs list` to see why") from None
    if alias not in known:
        raise Refusal(404, "UnknownBackend", f"there is no backend called {alias[:64]!r}; known: {', '.join(known)}")


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError:  # the page's parser stops at NaN
        return _json({"error": {"type": "BackendError", "message": "the backend's answer holds numbers JSON has not"}}, 502)
    return web.json_response(text=text, status=status)
