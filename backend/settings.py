"""The user's own settings, ``backends.yaml`` in the configuration folder: remote backends and the backend's Python.

They are there, and nowhere in a workflow or in ComfyUI's folders, because a workflow is a stranger's file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from .places import PlaceError, config_dir, data_dir, private_folder

LOCAL = "local"
ROOT = Path(__file__).resolve().parents[1]
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap.py"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_CHECK_SECONDS = 300


@dataclass(frozen=True)
class Remote:
    """A backend elsewhere. The token is kept out of what is printed."""

    address: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """What ``backends.yaml`` says; all of it is optional."""

    python: Path | None
    remotes: Mapping[str, Remote]


def settings_file() -> Path:
    """Where the settings are."""
    return config_dir() / "backends.yaml"


def load_settings() -> Settings:
    """Read the settings; raises :class:`PlaceError` for a file that others can read or that says something else."""
    file = settings_file()
    try:
        mode = file.stat().st_mode
        fields = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return Settings(None, {})
    except (OSError, ValueError) as error:
        raise PlaceError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # no more of it: its sentence quotes the line, and a token with it
        where = "somewhere" if mark is None else f"at line {mark.line + 1}, column {mark.column + 1}"
        raise PlaceError(f"{file} cannot be read as YAML {where}") from None
    if os.name == "posix" and mode & 0o077:
        raise PlaceError(f"{file} holds tokens and others may read it; run: chmod 600 '{file}'")
    if not isinstance(fields, dict) or not fields.keys() <= {"python", "backends"}:
        raise PlaceError(f"{file} may say python and backends, and nothing else")
    python, backends = fields.get("python"), fields.get("backends") or {}
    if python is not None and not (isinstance(python, str) and Path(python).expanduser().is_absolute()):
        raise PlaceError(f"{file}: python must be an absolute path")
    if not isinstance(backends, dict):
        raise PlaceError(f"{file}: backends maps names to an address and a token")
    remotes = {str(name): _remote(file, str(name), value) for name, value in backends.items()}
    return Settings(None if python is None else Path(python).expanduser(), remotes)


def _remote(file: Path, name: str, fields: Any) -> Remote:
    if name == LOCAL or not isinstance(fields, dict) or fields.keys() != {"address", "token"}:
        raise PlaceError(f"{file}: backend {name} must have an address and a token, and a name other than {LOCAL}")
    remote = Remote(str(fields["address"]).rstrip("/"), str(fields["token"]))
    parts = urlsplit(remote.address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PlaceError(f"{file}: backend {name}: the address must look like https://machine.example")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise PlaceError(
            f"{file}: backend {name}: http would send the token readable by everyone on the way; use https, or a tunnel to this "
            "machine such as ssh -L"
        )
    return remote


def chosen_python() -> Path | None:
    """The Python that the user chose for the backend, else the folder's ``.venv``; None when there is neither.

    Raises:
        PlaceError: the chosen one does not exist, or the settings cannot be read.
    """
    chosen = os.environ.get("MIXGRPO_PYTHON") or load_settings().python
    if chosen:
        if not Path(chosen).is_file():
            raise PlaceError(f"the backend's Python {chosen} does not exist; correct MIXGRPO_PYTHON or {settings_file()}")
        return Path(chosen)
    own = ROOT / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return own if own.is_file() else None


def own_environment() -> str:
    """What to do when no Python can train: the command that gives the backend an environment of its own."""
    command = "py -m venv .venv && .venv\\Scripts\\python" if os.name == "nt" else "python3 -m venv .venv && .venv/bin/python"
    return f'Give the backend an environment of its own: in {ROOT} run {command} -m pip install -e ".[train]"'


def backend_python() -> Path:
    """The Python that runs the backend: the user's choice, else the folder's ``.venv``, else this one if it can train.

    Raises:
        PlaceError: none of them can; the message has the command that makes one.
    """
    chosen = chosen_python()
    if chosen is not None:
        return chosen
    complaint = _checked()
    if complaint:
        raise PlaceError(f"{complaint}. {own_environment()}")
    return Path(sys.executable)


def _checked() -> str:
    """Why this Python cannot train; empty when it can, which is remembered until a package changes: trying takes seconds."""
    memory = data_dir() / "checked.json"
    packages = sorted(f"{package.name} {package.version}" for package in distributions())
    seen = hashlib.sha256("\n".join([sys.executable, sys.version, str(ROOT), *packages]).encode()).hexdigest()
    if memory.is_file() and memory.read_text(encoding="utf-8") == seen:
        return ""
    check = [sys.executable, str(BOOTSTRAP), "check"]
    environment = python_environment(Path(sys.executable))
    try:
        ended = subprocess.run(check, capture_output=True, text=True, env=environment, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{sys.executable} took more than {_CHECK_SECONDS} seconds to import the training packages"
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or [f"{sys.executable} cannot train"])[-1]
    private_folder(memory.parent)
    memory.write_text(seen, encoding="utf-8")
    return ""


def python_environment(python: Path) -> dict[str, str]:
    """The environment variables for the backend's Python, without what belongs to this one."""
    foreign = set() if python == Path(sys.executable) else {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
