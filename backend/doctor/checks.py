"""What the doctor looks at without PyTorch: the project, memory, disk, settings, backends, the starter's files."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ..client import Backend, BackendError, BackendUnreachable
from ..files import StorageError
from ..machine import free_memory, size, total_memory
from ..models.weights import STARTER, damaged_files
from ..places import API, PlaceError, data_dir, read_state
from ..settings import LOCAL, ROOT, load_settings, settings_file
from .findings import Finding, fault, note, ok

_LEAST_MEMORY, _LEAST_DISK, _LITTLE_DISK = 2 * 2**30, 2**30, 10 * 2**30
_BACKEND_SECONDS = 30


def project_findings() -> list[Finding]:
    """This project's version and folder."""
    found = project_version(ROOT)
    if found is None:
        try:
            found = version("mixgrpo")
        except PackageNotFoundError:
            found = "of unknown version"
    return [ok("project", f"MixGRPO {found} in {ROOT}", version=found, folder=str(ROOT))]


def project_version(folder: Path) -> str | None:
    """The version that a folder's pyproject.toml says; None for anything that is not this project."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    return project.get("version") if project.get("name") == "mixgrpo" else None


def memory_findings() -> list[Finding]:
    """Main memory."""
    total, free = total_memory(), free_memory()
    facts = {"total": total, "free": free}
    if total is None:
        return [note("memory", "this system does not say how much memory it has", **facts)]
    said = f"{size(total)} of main memory" + ("" if free is None else f", {size(free)} free")
    if total < _LEAST_MEMORY:
        remedy = f"use a machine (or a container limit) with at least {size(_LEAST_MEMORY)}"
        return [fault("memory", f"{said}, too little for PyTorch and the smallest model", remedy, **facts)]
    return [ok("memory", said, **facts)]


def disk_findings() -> list[Finding]:
    """The data folder: can it be written, how much room is there."""
    folder = data_dir()
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path(folder.anchor))
    usage = shutil.disk_usage(there)
    facts = {"folder": str(folder), "free": usage.free, "total": usage.total}
    said = f"{size(usage.free)} of {size(usage.total)} free for jobs and runs in {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = "make it writable for you, or choose another folder with MIXGRPO_DATA"
        return [fault("disk", f"the data folder {folder} cannot be written", remedy, **facts)]
    if usage.free < _LEAST_DISK:
        remedy = "free some space, or choose a folder on another disk with MIXGRPO_DATA"
        return [fault("disk", f"only {said}", remedy, **facts)]
    if usage.free < _LITTLE_DISK:
        return [note("disk", f"{said}, which a large model's checkpoints may fill", **facts)]
    return [ok("disk", said, **facts)]


def settings_findings() -> list[Finding]:
    """The user's own settings."""
    file = settings_file()
    try:
        settings = load_settings()
    except PlaceError as error:
        return [fault("settings", str(error), f"correct {file}, whose form backend/server/README.md shows")]
    if not file.exists():
        return [ok("settings", f"none ({file} does not exist, and need not)", file=str(file), mode=None)]
    mode = f"{stat.S_IMODE(file.stat().st_mode):o}"
    python = "no python" if settings.python is None else f"python {settings.python}"
    said = f"{file} (mode {mode}): {python}, backends: {', '.join(sorted(settings.remotes)) or 'none'}"
    return [ok("settings", said, file=str(file), mode=mode, backends=sorted(settings.remotes))]


def backend_findings() -> list[Finding]:
    """This machine's backend and every one of the settings: does it answer, is the token right, is it of this version?"""
    try:
        remotes = load_settings().remotes
    except PlaceError:  # which the settings' own finding says
        remotes = {}
    state = read_state(data_dir())
    found = [note("backend", f"{LOCAL}: none runs; ComfyUI starts it when a job needs it", alias=LOCAL)]
    if state is not None:
        found = [_ask(LOCAL, Backend(state["address"], state["token"]))]
        if found[0].facts["state"] == "unreachable":
            said = f"{LOCAL}: the last one (process {state['pid']}) has ended without saying so; ComfyUI starts the next one"
            found = [note("backend", said, alias=LOCAL)]
    return found + [_ask(alias, Backend(remote.address, remote.token)) for alias, remote in sorted(remotes.items())]


def _ask(alias: str, backend: Backend) -> Finding:
    where = f"{alias} at {_shown(backend.address)}"

    async def ask() -> dict:
        return await asyncio.wait_for(backend.server(), _BACKEND_SECONDS)

    def wrong(state: str, said: str, remedy: str) -> Finding:
        return fault("backend", f"{where}: {said}", remedy, alias=alias, address=_shown(backend.address), state=state)

    try:
        about = asyncio.run(ask())
    except (BackendUnreachable, TimeoutError) as error:
        cause = re.search(r"\((.*)\)", str(error).replace(backend.address, _shown(backend.address)))
        remedy = "start `mixgrpo serve` there, open the tunnel, or correct the address in backends.yaml"
        return wrong("unreachable", f"does not answer ({cause.group(1) if cause else 'no answer in time'})", remedy)
    except BackendError as error:
        if error.kind == "BadToken":
            remedy = f"copy token from server.json in that machine's data folder into {settings_file()}"
            return wrong("bad token", "answers, but the token is wrong", remedy)
        if error.kind == "Forbidden":
            remedy = f"start that server with --allow-host {urlsplit(backend.address).hostname}"
            return wrong("forbidden", "answers, but not under this name", remedy)
        return wrong("not a backend", f"answers, but is no MixGRPO backend ({error})", "correct the address in backends.yaml")
    if about.get("api") != API:
        remedy = "bring this project to the same version on both machines, then restart the server there"
        return wrong("other version", f"speaks version {about.get('api')} of the interface, this project {API}", remedy)
    facts = {"alias": alias, "address": _shown(backend.address), "state": "ok", "folder": about.get("folder")}
    return ok("backend", f"{where}: answers, the token is right", **facts)


def _shown(address: str) -> str:
    """An address without a password that may be in it."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def starter_findings() -> list[Finding]:
    """The starter model's files: are they there, and the published ones?"""
    remedy = f"fetch the project again (git checkout -- {STARTER.relative_to(ROOT).as_posix()})"
    try:
        missing, changed = damaged_files()
    except StorageError as error:
        return [fault("model", f"the starter's list of files is not there: {error}", remedy)]
    found = []
    if missing:
        found.append(fault("model", f"the starter lacks {', '.join(missing)}", remedy, missing=missing))
    if changed:
        said = f"these files of the starter are not the published ones: {', '.join(changed)}"
        found.append(fault("model", said, remedy, changed=changed))
    return found or [ok("model", f"the starter model is there and undamaged ({STARTER})", folder=str(STARTER))]
