"""Where this project keeps things outside its own folder, and what a running backend says about itself there.

The same folders as platformdirs would name, which ComfyUI's Python need not have.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from .errors import MixGRPOError

API = 1
"""Version of the interface between client and server; they may come from two copies of this project."""
LORA_BYTES = 2 * 2**30
"""The largest LoRA file that a client sends and a server takes."""
_NAME = "mixgrpo"


class PlaceError(MixGRPOError):
    """A file of the user's settings, or a folder for data, that cannot be used."""


def config_dir() -> Path:
    """The folder of the user's settings; ``MIXGRPO_CONFIG`` names another."""
    return _place("MIXGRPO_CONFIG", "XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """The folder of jobs and runs; ``MIXGRPO_DATA`` names another."""
    return _place("MIXGRPO_DATA", "XDG_DATA_HOME", ".local/share")


def _place(variable: str, xdg: str, fallback: str) -> Path:
    chosen = os.environ.get(variable, "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / _NAME / _NAME
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / _NAME
    return Path(os.environ.get(xdg, "").strip() or Path.home() / fallback) / _NAME


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can look into, and return it; a folder that exists is left as it is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PlaceError(f"cannot use {folder} as a data folder: {error}; choose another with MIXGRPO_DATA") from error
    return folder


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Say in ``server.json``, which only its owner can read, how to reach the backend that owns the data folder."""
    temporary = folder / f".server.{secrets.token_hex(4)}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(temporary, folder / "server.json")


def read_state(folder: Path) -> dict[str, Any] | None:
    """What the last backend wrote there; it may no longer run. None when there is nothing readable."""
    try:
        state = json.loads((folder / "server.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and {"address", "token", "pid"} <= state.keys() else None


def remove_state(folder: Path) -> None:
    """Take the note away, when the backend stops."""
    (folder / "server.json").unlink(missing_ok=True)
