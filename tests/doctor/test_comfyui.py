"""The doctor's look at a ComfyUI: its version, the packages that refuse each other, the pack installed twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mixgrpo.backend.doctor.comfyui import comfyui_findings
from mixgrpo.backend.settings import ROOT


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """The parts of a ComfyUI that are looked at, with this pack in it."""
    folder = tmp_path / "ComfyUI"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text('__version__ = "0.3.75"\n')
    (folder / "custom_nodes").mkdir()
    (folder / "custom_nodes" / "mixgrpo").symlink_to(ROOT, target_is_directory=True)
    return folder


def levels(findings):
    return [(one.level, one.message) for one in findings]


def installed(python: Path, **versions: str) -> None:
    """Make packages known to a Python: their names and versions, and a module each that can be imported."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for name, version in versions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (site / f"{name}.py").touch()


def test_a_folder_that_is_no_comfyui(tmp_path):
    (finding,) = comfyui_findings(tmp_path)
    assert finding.level == "fault" and "is no ComfyUI" in finding.message


@pytest.mark.parametrize(("version", "level"), [("0.3.74", "fault"), ("0.3.75", "ok"), ("0.4", "ok"), (None, "fault")])
def test_the_version_is_new_enough_or_a_fault(comfyui, version, level):
    file = comfyui / "comfyui_version.py"
    file.unlink() if version is None else file.write_text(f"__version__ = '{version}'\n")
    assert comfyui_findings(comfyui)[0].level == level


def test_the_pack_is_there_once(comfyui):
    packs = comfyui / "custom_nodes"
    assert comfyui_findings(comfyui)[1].level == "ok"
    copy = packs / "mixgrpo-main"
    (copy / "nodes").mkdir(parents=True)
    (copy / "nodes" / "extension.py").touch()
    shutil.copy(ROOT / "pyproject.toml", copy)
    twice = comfyui_findings(comfyui)[1]
    assert twice.level == "fault" and "installed 2 times, in mixgrpo (0.1.0), mixgrpo-main (0.1.0)" in twice.message
    copy.rename(packs / "mixgrpo-main.disabled")
    assert comfyui_findings(comfyui)[1].level == "ok"
    (packs / "mixgrpo").unlink()
    assert comfyui_findings(comfyui)[1].level == "note"
    (packs / "mixgrpo-main.disabled").rename(copy)
    assert "another copy" in comfyui_findings(comfyui)[1].message


def test_packages_that_refuse_each_other_are_a_fault(comfyui, bare_python):
    other = {name: "1.0" for name in ("safetensors", "aiohttp", "pydantic", "PIL", "numpy", "yaml")}
    installed(bare_python, **other, transformers="4.57.3", huggingface_hub="1.2.0")
    (fault,) = comfyui_findings(comfyui, bare_python)[2:]
    assert fault.level == "fault" and "transformers 4.57.3 and huggingface_hub 1.2.0 refuse each other" in fault.message
    assert f'{bare_python} -m pip install "huggingface_hub<1"' in fault.remedy


@pytest.mark.parametrize(("transformers", "hub", "level"), [("4.57.3", "0.36.0", "note"), ("5.1.0", "1.2.0", "ok")])
def test_packages_that_go_together(comfyui, bare_python, transformers, hub, level):
    other = {name: "1.0" for name in ("safetensors", "aiohttp", "pydantic", "PIL", "numpy", "yaml")}
    installed(bare_python, **other, transformers=transformers, huggingface_hub=hub)
    findings = comfyui_findings(comfyui, bare_python)[2:]
    assert levels(findings)[0] == ("fault", "ComfyUI's Python cannot import torch: No module named 'torch'")
    assert [one.level for one in findings[1:]] == (["note"] if level == "note" else [])


def test_its_python_is_found_in_its_folder(comfyui, bare_python):
    assert "not in its folder" in comfyui_findings(comfyui)[2].message
    bare_python.parents[1].rename(comfyui / "venv")
    assert any("cannot import torch" in one.message for one in comfyui_findings(comfyui))
