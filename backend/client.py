"""What nodes and the command line use to talk to a backend, and to start one on this machine.

Runs inside ComfyUI with nothing beyond what ComfyUI 0.3.75 requires. No session is kept: ComfyUI runs every prompt in an
event loop of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from .errors import MixGRPOError
from .files import StorageError, sha256_of
from .places import API, LORA_BYTES, data_dir, private_folder, read_state
from .settings import BOOTSTRAP, LOCAL, backend_python, load_settings, python_environment, settings_file
from .transfer import TransferBroken, transfer

SETTLED = frozenset({"paused", "cancelled", "failed", "done"})
"""The states in which a job does not go on by itself."""
START_SECONDS = 120.0
_ANSWER_SECONDS = 20.0
_T = TypeVar("_T")
_started: list[subprocess.Popen[bytes]] = []  # their standard input must stay open as long as this process lives


class BackendError(MixGRPOError):
    """The backend refused; ``kind`` is the type of its refusal (UnknownJob, SpecError, JobConflict, …)."""

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


class BackendUnreachable(MixGRPOError):
    """No backend answers there, or none could be started."""


class JobFailed(MixGRPOError):
    """A job's worker failed; the message is its own last words."""


@dataclass(frozen=True)
class Backend:
    """A backend that can be asked. Jobs are mappings with ``id``, ``state``, ``iteration``, ``iterations``, ``loras``, …"""

    address: str
    token: str = field(repr=False)

    async def server(self) -> dict[str, Any]:
        """Who answers: process id, version of the interface, folder."""
        return await self._json("GET", "/v1/server")

    async def submit(self, spec: dict[str, Any], detached: bool = False) -> dict[str, Any]:
        """Submit a job's fields; returns the job: attached to, finished, continued or new."""
        return await self._json("POST", "/v1/jobs", json={"spec": spec, "detached": detached})

    async def upload_lora(self, path: Path) -> str:
        """Send a LoRA file, unless it is there, and return its SHA-256, which is a job's ``lora.start_from``.

        Raises:
            StorageError: the file cannot be read, or is larger than a backend takes.
            BackendError: of kind BadLora, when it is no safetensors file.
        """
        digest = await asyncio.to_thread(sha256_of, path)
        try:
            await self._json("GET", f"/v1/loras/{digest}")
            return digest
        except BackendError as error:
            if error.kind != "UnknownLora":
                raise
        size = path.stat().st_size
        if size > LORA_BYTES:
            raise StorageError(f"{path} has {size} bytes, a backend takes LoRA files of up to {LORA_BYTES}; use a smaller rank")
        with open(path, "rb") as file:
            headers = {"Content-Type": "application/octet-stream"}
            sent = await self._json("POST", "/v1/loras", seconds=None, data=file, headers=headers)
        if sent["sha256"] != digest:
            raise BackendUnreachable(f"{path} arrived damaged at {self.address}; try again")
        return digest

    async def jobs(self) -> list[dict[str, Any]]:
        """All jobs, the newest first."""
        return (await self._json("GET", "/v1/jobs"))["jobs"]

    async def job(self, job_id: str) -> dict[str, Any]:
        """One job with its ``spec``."""
        return await self._json("GET", _path(job_id))

    async def pause(self, job_id: str) -> dict[str, Any]:
        """Ask a job to pause; returns at once, the state is then ``pausing``."""
        return await self._json("POST", _path(job_id, "pause"))

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Ask a job to end; returns at once, the state is then ``cancelling``."""
        return await self._json("POST", _path(job_id, "cancel"))

    async def summary(self, job_id: str) -> dict[str, Any]:
        """The job with its ``curve`` (``iteration``, ``reward``, ``scores``), ``seconds``, ``seconds_left``, ``best``."""
        return await self._json("GET", _path(job_id, "summary"))

    async def events(self, job_id: str, after: int = 0, state: str | None = None, wait: float = 0.0) -> dict[str, Any]:
        """``events`` after an offset, ``next`` to ask from, and the ``job``.

        Returns as soon as there is an event or the state is another than ``state``, at the latest after ``wait`` seconds (30).
        """
        query = {"after": str(after), "wait": f"{wait:g}"} | ({} if state is None else {"state": state})
        return await self._json("GET", _path(job_id, "events"), _ANSWER_SECONDS + wait, params=query)

    async def follow(self, job_id: str, after: int = 0, wait: float = 10.0) -> AsyncIterator[dict[str, Any]]:
        """What :meth:`events` returns, at least every ``wait`` seconds, the last time when the job is settled."""
        state = None
        while True:
            news = await self.events(job_id, after, state, wait)
            yield news
            if news["job"]["state"] in SETTLED and news["next"] == after:
                return
            after, state = news["next"], news["job"]["state"]

    async def finish(self, job_id: str) -> dict[str, Any]:
        """Wait until the job is settled and return it; raises :class:`JobFailed` with the worker's last words."""
        job: dict[str, Any] = {}
        async for news in self.follow(job_id):
            job = news["job"]
        if job["state"] == "failed":
            raise JobFailed(job["error"])
        return job

    async def artifacts(self, job_id: str) -> list[dict[str, Any]]:
        """The files a job offers: ``kind`` (lora, samples), ``name``, ``iteration``, ``size``, ``sha256``."""
        return (await self._json("GET", _path(job_id, "artifacts")))["artifacts"]

    async def download(self, job_id: str, artifact: dict[str, Any], destination: Path) -> Path:
        """Bring an artifact to ``destination``; it is there only when its checksum is right.

        A transfer that breaks is continued where it broke, or begun again when the file has changed since.

        Raises:
            BackendError: of kind UnknownFile, when there is no such file any more.
            BackendUnreachable: several tries in a row brought next to nothing.
            StorageError: ``destination`` cannot be written.
        """
        url = self.address + _path(job_id, "artifacts", artifact["kind"], artifact["name"])
        try:
            async with self._session(None) as session:

                def ask(headers: dict[str, str]) -> Any:
                    return session.get(url, headers=headers, allow_redirects=False)

                return await transfer(ask, _require, artifact["sha256"], destination)
        except TransferBroken as error:
            raise BackendUnreachable(
                f"{artifact['name']} does not arrive from {self.address} ({error}); try again, the job is safe there"
            ) from error

    async def _json(
        self, method: str, path: str, seconds: float | None = _ANSWER_SECONDS, **options: Any
    ) -> dict[str, Any]:
        """Ask within so many seconds; without a number only silence counts, since sending a file may take its time."""
        try:
            async with (
                self._session(seconds) as session,
                session.request(method, self.address + path, allow_redirects=False, **options) as answer,
            ):
                await _require(answer)
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, MixGRPOError):
                raise
            raise self._unreachable(error) from error

    def _session(self, seconds: float | None) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(
            total=seconds, sock_connect=_ANSWER_SECONDS, sock_read=None if seconds else _ANSWER_SECONDS
        )
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.token}"}, timeout=timeout)

    def _unreachable(self, error: Exception) -> BackendUnreachable:
        cause = str(error) or type(error).__name__
        return BackendUnreachable(f"the backend at {self.address} does not answer ({cause}); jobs and checkpoints are safe there")


def _path(job_id: str, *parts: str) -> str:
    return "/".join(["/v1/jobs", quote(job_id, safe=""), *(quote(part, safe="") for part in parts)])


async def _require(answer: aiohttp.ClientResponse) -> None:
    """Raise the backend's own refusal."""
    if answer.status < 300:
        return
    try:
        error = (await answer.json())["error"]
        kind, message = str(error["type"]), str(error["message"])
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        kind, message = "HTTPError", f"the answer was {answer.status} {answer.reason}; is this a MixGRPO backend?"
    raise BackendError(message, kind)


async def connect(alias: str = LOCAL, start: bool = True) -> Backend:
    """The backend of an alias: ``local`` is this machine's, found or (with ``start``) started; others are the user's settings'.

    Raises:
        BackendUnreachable: there is none, and none could be started.
        PlaceError: the settings or the backend's Python cannot be used.
    """
    if alias != LOCAL:
        remotes = load_settings().remotes
        if alias not in remotes:
            known = ", ".join([LOCAL, *sorted(remotes)])
            raise BackendUnreachable(f"there is no backend called {alias[:64]!r}; known: {known} ({settings_file()} names more)")
        return Backend(remotes[alias].address, remotes[alias].token)
    folder = data_dir()
    found = await _running(folder)
    if found is not None:
        return found
    if not start:
        raise BackendUnreachable(f"no backend serves {folder}; start one with `mixgrpo serve`")
    return await _start(private_folder(folder))


async def _running(folder: Path) -> Backend | None:
    """The backend that serves a data folder, if it answers: the note in the folder may be a dead one's."""
    state = read_state(folder)
    if state is None:
        return None
    backend = Backend(state["address"], state["token"])
    try:
        about = await backend.server()
    except (BackendUnreachable, BackendError):
        return None
    if about["pid"] != state["pid"]:
        return None
    if about["api"] != API:
        raise BackendUnreachable(
            f"the backend that serves {folder} is of another version (started from {about['folder']}); stop it (process "
            f"{about['pid']}), its jobs are continued by the next one"
        )
    return backend


class _Log:
    """The server's log, and what one start added to it."""

    def __init__(self, folder: Path):
        self.path = folder / "server.log"
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def open(self) -> Any:
        return open(self.path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))

    def last_line(self) -> str:
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


async def _apart(work: Callable[[], _T]) -> _T:
    """Like ``asyncio.to_thread``, but neither an interrupt nor the loop's end waits for ``work``, which may take a minute."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_result(value)

    def run() -> None:
        try:
            settled = (result.set_result, work())
        except Exception as error:  # whatever it is, it is raised where the result is awaited
            settled = (result.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=run, daemon=True).start()
    return await result


async def _start(folder: Path) -> Backend:
    """Start a backend that ends some time after this process; of several started at once, one gets the folder's lock."""
    python = await _apart(backend_python)
    log = _Log(folder)
    command = [str(python), str(BOOTSTRAP), "serve", "--data", str(folder), "--with-parent"]
    detached: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {"creationflags": _NO_WINDOW}
    try:
        with log.open() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=python_environment(python),
                **detached,
            )
    except OSError as error:
        raise BackendUnreachable(f"cannot start the backend with {python}: {error}") from error
    _started[:] = [other for other in _started if other.poll() is None] + [process]
    deadline = time.monotonic() + START_SECONDS
    ended_at: float | None = None
    while time.monotonic() < deadline:
        found = await _running(folder)
        if found is not None:
            return found
        if process.poll() is not None:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() > ended_at + 5:  # another one may have been quicker, and about to answer
                break
        await asyncio.sleep(0.1)
    raise BackendUnreachable(f"the backend did not start: {log.last_line()} (all of it: {log.path})")


_NO_WINDOW = 0x08000000 | 0x00000200  # Windows: no console window, and Ctrl-C in ComfyUI's console does not reach it
