"""What a Python has: run by the doctor in the Python in question, which may be ComfyUI's, so it needs the standard library only.

    python backend/bootstrap.py about PACKAGE …

prints one line of JSON: the versions of the packages, why importing one failed, and what PyTorch can compute on.
"""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_DISTRIBUTIONS = {"yaml": "PyYAML"}


def main(arguments: list[str]) -> None:
    """Print what there is of the packages that ``arguments`` name, as they are imported."""
    errors = {name: _import_error(name) for name in arguments}
    about = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in arguments},
        "errors": {name: error for name, error in errors.items() if error},
        "devices": _devices() if errors.get("torch", "unasked") is None else None,
        "graphics_cards": _graphics_cards(),
    }
    print(json.dumps(about))


def _version(name: str) -> str | None:
    try:
        return version(_DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    """Why a package cannot be imported; only importing finds versions that clash."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:  # transformers' own, and a missing library
        return " ".join(str(error).split())[:300] or type(error).__name__
    return None


def _devices() -> list[dict[str, Any]]:
    """What PyTorch can compute on besides the CPU."""
    import torch

    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device: dict[str, Any] = {"kind": "cuda", "index": index, "name": torch.cuda.get_device_name(index)}
        try:
            free, total = torch.cuda.mem_get_info(index)
            device |= {"free": free, "total": total, "bfloat16": torch.cuda.get_device_capability(index) >= (8, 0)}
        except RuntimeError as error:
            device["error"] = " ".join(str(error).split())[:300]
        devices.append(device)
    if torch.backends.mps.is_available():
        devices.append({"kind": "mps", "index": 0, "name": "Apple GPU"})
    return devices


def _graphics_cards() -> list[str]:
    """The NVIDIA cards that the driver knows of, whatever PyTorch can do with them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []
