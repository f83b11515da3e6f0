"""Asking a Python what it has, and judging whether it can train and on what."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from ..errors import MixGRPOError
from ..machine import size
from ..places import PlaceError
from ..server.check import NEEDED
from ..settings import BOOTSTRAP, ROOT, chosen_python, own_environment, python_environment, settings_file
from .findings import Finding, fault, note, ok

_SECONDS = 300
_SHOWN = ("torch", "diffusers", "transformers", "peft")


class PythonError(MixGRPOError):
    """A Python that does not answer."""


def ask_python(python: Path, packages: tuple[str, ...]) -> dict[str, Any]:
    """What ``about.py`` prints when that Python runs it; raises :class:`PythonError` when it does not."""
    command = [str(python), str(BOOTSTRAP), "about", *packages]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=python_environment(python), timeout=_SECONDS, check=False
        )
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PythonError(f"{python} does not run ({error})") from error
    except (ValueError, IndexError):
        said = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
        raise PythonError(f"{python} ended with code {ended.returncode} and said {said[:300]}") from None


def python_findings() -> list[Finding]:
    """The Python that would run the backend: versions, whether it can train, its devices."""
    try:
        python = chosen_python() or Path(sys.executable)
        about = ask_python(python, NEEDED)
    except PlaceError as error:
        return [fault("python", str(error), f"correct or unset MIXGRPO_PYTHON, or python in {settings_file()}")]
    except PythonError as error:
        return [fault("python", str(error), own_environment())]
    return [_python(python, about), *_packages(about), *_devices(about)]


def _python(python: Path, about: dict[str, Any]) -> Finding:
    said = f"the backend runs with Python {about['python']} ({python})"
    facts = {"version": about["python"], "executable": str(python), "platform": about["platform"]}
    if release(about["python"]) < (3, 11):
        return fault("python", f"{said}, but training needs 3.11 or newer", own_environment(), **facts)
    return ok("python", said, **facts)


def _packages(about: dict[str, Any]) -> list[Finding]:
    versions, errors, least = about["versions"], about["errors"], _least_versions()
    facts = {"versions": versions, "errors": errors}
    shown = ", ".join(f"{name} {versions[name] or 'missing'}" for name in _SHOWN)
    found = [ok("packages", shown, **facts)] if not errors else [note("packages", shown, **facts)]
    for name, error in errors.items():
        if versions[name] is None:
            found.append(fault("packages", f"{name} is not installed, so this Python cannot train", own_environment()))
        else:
            remedy = f"the versions do not go together, or the installation is damaged. {own_environment()}"
            found.append(fault("packages", f"{name} {versions[name]} is installed and cannot be imported: {error}", remedy))
    for name, wanted in least.items():
        version = versions.get(name)
        if version is not None and name not in errors and release(version) < release(wanted):
            found.append(fault("packages", f"{name} is {version}, training needs {wanted} or newer", own_environment()))
    if not any(finding.level == "fault" for finding in found):
        found[0] = ok("packages", f"{shown}: this Python can train", **facts)
    return found


def _devices(about: dict[str, Any]) -> list[Finding]:
    """What the trainer would use: the first CUDA devices, one a rank, else the CPU."""
    if about["devices"] is None:
        return [note("device", "unknown, because PyTorch cannot be imported", cards=about["graphics_cards"])]
    found, cards = [], [device for device in about["devices"] if device["kind"] == "cuda"]
    for card in cards:
        name = f"cuda:{card['index']} {card['name']}"
        if "error" in card:
            remedy = "another program may hold all its memory: end that, or hide the GPU with CUDA_VISIBLE_DEVICES="
            found.append(fault("device", f"{name} cannot be used: {card['error']}", remedy, **card))
        else:
            half = "" if card["bfloat16"] else ", no fast bfloat16"
            memory = f"{size(card['free'])} of {size(card['total'])} free"
            found.append(ok("device", f"{name}: {memory}{half}", **card))
    if not cards and about["graphics_cards"]:
        found.append(
            fault(
                "device",
                f"the driver knows {about['graphics_cards'][0]}, but PyTorch cannot use it and would train on the CPU",
                "install a PyTorch built for CUDA (pytorch.org says which), and leave CUDA_VISIBLE_DEVICES unset",
                cards=about["graphics_cards"],
            )
        )
    elif not cards:
        found.append(note("device", "no CUDA device: training runs on the CPU, which is enough for the starter model"))
    if any(device["kind"] == "mps" for device in about["devices"]):
        found.append(note("device", "an Apple GPU (MPS) is there, which training does not use"))
    return found


def _least_versions() -> dict[str, str]:
    """By package the oldest version that training is made for, from the project's own requirements."""
    try:
        with open(ROOT / "pyproject.toml", "rb") as file:
            lines = tomllib.load(file)["project"]["optional-dependencies"]["train"]
    except OSError:  # installed as a wheel
        try:
            lines = [line for line in requires("mixgrpo") or [] if 'extra == "train"' in line]
        except PackageNotFoundError:
            return {}
    wanted = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return {match.group(1): match.group(2) for match in wanted if match}


def release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with, without zeros at the end: 2.14.0+cu128 is (2, 14)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
