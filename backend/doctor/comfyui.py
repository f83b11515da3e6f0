"""Looking at a ComfyUI from outside: its version, the packages of its Python, and how often the pack is in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..settings import ROOT
from .checks import project_version
from .findings import Finding, fault, note, ok
from .pythons import PythonError, ask_python, release

_OLDEST = "0.3.75"
_PACKAGES = ("torch", "transformers", "huggingface_hub", "safetensors", "aiohttp", "pydantic", "PIL", "numpy", "yaml")
_PYTHONS = (
    ".venv/bin/python",
    "venv/bin/python",
    ".venv/Scripts/python.exe",
    "venv/Scripts/python.exe",
    "../python_embeded/python.exe",  # spelt so in ComfyUI's portable package
    "../python_embedded/python.exe",
)


def comfyui_findings(folder: Path, python: Path | None = None) -> list[Finding]:
    """A ComfyUI's folder; ``python`` is its interpreter where it is not in the folder."""
    folder = folder.expanduser().absolute()
    if not (folder / "main.py").is_file() or not (folder / "comfy").is_dir():
        remedy = "give the folder that holds ComfyUI's main.py"
        return [fault("comfyui", f"{folder} is no ComfyUI", remedy, folder=str(folder))]
    return [_version(folder), *_packs(folder), *_packages(folder, python)]


def _version(folder: Path) -> Finding:
    file = folder / "comfyui_version.py"
    match = re.search(r"__version__\s*=\s*[\"']([\d.]+)", file.read_text(encoding="utf-8")) if file.is_file() else None
    if match is None:
        said = f"ComfyUI in {folder} does not say its version, as very old ones do"
        return fault("comfyui", said, f"update ComfyUI to {_OLDEST} or newer", version=None)
    found = match.group(1)
    if release(found) < release(_OLDEST):
        said = f"ComfyUI {found} in {folder} is older than {_OLDEST}"
        return fault("comfyui", said, f"update ComfyUI to {_OLDEST} or newer", version=found)
    return ok("comfyui", f"ComfyUI {found} in {folder}", version=found)


def _packs(folder: Path) -> list[Finding]:
    """ComfyUI loads every folder below custom_nodes, of whatever name, but for those that end in .disabled."""
    packs: dict[Path, str] = {}
    custom = folder / "custom_nodes"
    for place in sorted(custom.iterdir()) if custom.is_dir() else []:
        if not place.name.endswith(".disabled") and (place / "nodes" / "extension.py").is_file():
            packs |= {place: version} if (version := project_version(place)) else {}
    names = ", ".join(f"{place.name} ({version})" for place, version in packs.items())
    facts = {"packs": [str(place) for place in packs]}
    if len(packs) > 1:
        remedy = "keep one of these folders and move the others out of custom_nodes"
        return [fault("comfyui", f"the pack is installed {len(packs)} times, in {names}", remedy, **facts)]
    if not packs:
        return [note("comfyui", f"the pack is not in {custom}", f"put or link {ROOT} there to have its nodes", **facts)]
    (place,) = packs
    if place.resolve() != ROOT:
        said = f"ComfyUI's pack is another copy than this one: {place}, not {ROOT}"
        return [note("comfyui", said, "run the doctor of that copy to examine its environment", **facts)]
    return [ok("comfyui", f"the pack is installed once, as {names}", **facts)]


def _packages(folder: Path, python: Path | None) -> list[Finding]:
    """ComfyUI's Python and the pair of packages that training packages would break in it."""
    if python is None:
        python = next((place for name in _PYTHONS if (place := folder / name).is_file()), None)
    if python is None:
        said = "ComfyUI's Python is not in its folder, so its packages were not looked at"
        return [note("comfyui", said, "name it with --comfyui-python to have them looked at")]
    try:
        about = ask_python(Path(os.path.abspath(python)), _PACKAGES)  # not resolved: a virtual environment is its link
    except PythonError as error:
        return [fault("comfyui", f"ComfyUI's Python: {error}", "name the right one with --comfyui-python")]
    versions, errors = about["versions"], about["errors"]
    transformers, hub = versions["transformers"], versions["huggingface_hub"]
    pair = f"transformers {transformers or 'missing'} and huggingface_hub {hub or 'missing'}"
    facts = {"python": str(python), "versions": versions, "errors": errors}
    if transformers and hub and release(transformers) < (5,) and release(hub) >= (1,):
        remedy = f'in ComfyUI\'s Python run: {python} -m pip install "huggingface_hub<1"'
        return [fault("comfyui", f"{pair} refuse each other, so ComfyUI cannot read text encoders", remedy, **facts)]
    remedy = f"in {folder} run: {python} -m pip install -r requirements.txt"
    found = [fault("comfyui", f"ComfyUI's Python cannot import {name}: {error}", remedy) for name, error in errors.items()]
    if transformers and release(transformers) < (5,):
        said = f"ComfyUI's Python has {pair}, which the training packages would break: leave them out of it"
        return [*found, note("comfyui", said, "give the backend its own environment, as README.md says", **facts)]
    return found or [ok("comfyui", f"ComfyUI's Python {about['python']} has {pair}", **facts)]
