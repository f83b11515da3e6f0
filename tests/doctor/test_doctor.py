"""mixgrpo doctor: a sound machine has no faults, and everything that can be wrong is found, with a way out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from mixgrpo.backend.doctor import checks, pythons
from mixgrpo.backend.doctor.findings import Finding, as_json, fault
from mixgrpo.backend.models.weights import STARTER, damaged_files

NO_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "diffusers"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
"""
Usage = namedtuple("Usage", "total used free")


def doctor(*options, **environment):
    """Run the command as a person does."""
    script = [sys.executable, "-m", "mixgrpo.backend.cli", "doctor", *map(str, options)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    return subprocess.run(script, capture_output=True, text=True, env=variables, timeout=300, check=False)


def found(findings, level="fault"):
    """The messages of one level, all of them with what to do."""
    assert all(one.remedy for one in findings if one.level == "fault")
    return [one.message for one in findings if one.level == level]


def test_a_sound_machine_has_no_faults_and_json_says_the_same(places):
    shown, as_data = doctor(), doctor("--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    answer = json.loads(as_data.stdout)
    assert as_data.returncode == 0 and answer["ok"] and answer["faults"] == 0
    topics = {one["topic"] for one in answer["findings"]}
    assert topics == {"project", "python", "packages", "device", "memory", "disk", "settings", "backend", "model"}
    for one in answer["findings"]:
        if one["topic"] not in ("memory", "disk"):  # which change from one moment to the next
            assert one["message"] in shown.stdout
    (packages,) = (one for one in answer["findings"] if one["topic"] == "packages")
    import torch

    assert torch.__version__.startswith(packages["facts"]["versions"]["torch"])
    assert shown.stdout.splitlines()[-1] == "no faults"


def test_it_works_without_pytorch_and_diffusers_and_says_so(places):
    (places / "sitecustomize.py").write_text(NO_TORCH)
    ended = doctor(PYTHONPATH=str(places))
    assert ended.returncode == 1 and "Traceback" not in ended.stdout + ended.stderr
    for name in ("torch", "diffusers"):
        (line,) = (line for line in ended.stdout.splitlines() if line.startswith(f"fault  packages  {name} "))
        assert f"is installed and cannot be imported: No module named '{name}'" in line
    assert 'pip install -e ".[train]"' in ended.stdout and "the starter model is there" in ended.stdout
    assert "unknown, because PyTorch cannot be imported" in ended.stdout


def test_a_python_without_packages_cannot_train(places, bare_python, monkeypatch):
    monkeypatch.setenv("MIXGRPO_PYTHON", str(bare_python))
    messages = found(pythons.python_findings())
    assert {message.split()[0] for message in messages} == set(pythons.NEEDED)
    assert "torch is not installed, so this Python cannot train" in messages


def test_a_python_that_does_not_exist_or_is_none_is_a_fault(places, monkeypatch):
    monkeypatch.setenv("MIXGRPO_PYTHON", str(places / "nowhere"))
    assert "does not exist" in found(pythons.python_findings())[0]
    fake = places / "fake"
    fake.write_text("#!/bin/sh\necho 'no snake' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("MIXGRPO_PYTHON", str(fake))
    if os.name == "posix":
        assert found(pythons.python_findings()) == [f"{fake} ended with code 3 and said no snake"]


def about(**changes):
    """What a Python that can train says of itself."""
    versions = dict.fromkeys(pythons.NEEDED, "999.0")
    said = {"versions": versions, "errors": {}, "devices": [], "graphics_cards": [], "python": "3.12.1", "platform": "x"}
    return said | changes


def test_versions_that_are_too_old_are_faults():
    old = about()
    old["versions"]["diffusers"] = "0.34.9"
    assert found(pythons._packages(old)) == ["diffusers is 0.34.9, training needs 0.35 or newer"]
    for enough in ("0.35.0.dev0", "0.35", "1.0+cu128"):
        old["versions"]["diffusers"] = enough
        assert not found(pythons._packages(old)), enough
    assert "but training needs 3.11 or newer" in pythons._python(STARTER, about(python="3.10.14")).message


def card(**changes):
    return {"kind": "cuda", "index": 0, "name": "GPU", "free": 2**30, "total": 2**31, "bfloat16": True} | changes


@pytest.mark.parametrize(
    ("said", "level", "message"),
    [
        ({"devices": [card()]}, "ok", "cuda:0 GPU: 1 GiB of 2 GiB free"),
        ({"devices": [card(bfloat16=False)]}, "ok", "cuda:0 GPU: 1 GiB of 2 GiB free, no fast bfloat16"),
        ({"devices": [card(error="out of memory")]}, "fault", "cuda:0 GPU cannot be used: out of memory"),
        ({"graphics_cards": ["H200"]}, "fault", "the driver knows H200, but PyTorch cannot use it and would train on the CPU"),
        ({}, "note", "no CUDA device: training runs on the CPU, which is enough for the starter model"),
        ({"devices": None}, "note", "unknown, because PyTorch cannot be imported"),
    ],
)  # fmt: skip
def test_devices(said, level, message):
    (finding,) = pythons._devices(about(**said))
    assert (finding.level, finding.message) == (level, message)


def test_little_memory_and_little_room_are_faults(places, monkeypatch):
    assert checks.memory_findings()[0].level == "ok" and checks.disk_findings()[0].level in ("ok", "note")
    monkeypatch.setattr(checks, "total_memory", lambda: 2**30)
    assert "too little" in found(checks.memory_findings())[0]
    for free, level in ((2**29, "fault"), (2**32, "note"), (2**36, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: Usage(2**40, 0, free))
        assert checks.disk_findings()[0].level == level


def test_a_data_folder_that_cannot_be_made_is_a_fault(places, monkeypatch):
    (places / "file").write_text("in the way")
    monkeypatch.setenv("MIXGRPO_DATA", str(places / "file" / "data"))
    assert found(checks.disk_findings()) == [f"the data folder {places / 'file' / 'data'} cannot be written"]


def test_settings_that_others_may_read_are_a_fault(places):
    file = places / "config" / "backends.yaml"
    assert checks.settings_findings()[0].facts["mode"] is None
    file.write_text("backends: {far: {address: 'https://a.example', token: hidden-token}}")
    file.chmod(0o600)
    (finding,) = checks.settings_findings()
    assert (finding.level, finding.facts["mode"], finding.facts["backends"]) == ("ok", "600", ["far"])
    if os.name == "posix":
        file.chmod(0o644)
        assert "chmod 600" in found(checks.settings_findings())[0]


def test_the_starters_files_are_the_published_ones_or_the_doctor_says_which_are_not(tmp_path, monkeypatch):
    assert damaged_files() == ([], [])
    published = {file.relative_to(STARTER).as_posix() for file in STARTER.rglob("*.safetensors")}
    assert set(json.loads((STARTER / "sha256.json").read_text())) == published
    shutil.copytree(STARTER, tmp_path / "weights")
    (tmp_path / "weights" / "judge.safetensors").unlink()
    with open(tmp_path / "weights" / "vae" / "starter_vae.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"x")
    damage = damaged_files(tmp_path / "weights")
    assert damage == (["judge.safetensors"], ["vae/starter_vae.safetensors"])
    monkeypatch.setattr(checks, "damaged_files", lambda: damage)
    messages = found(checks.starter_findings())
    assert len(messages) == 2 and "judge.safetensors" in messages[0] and "starter_vae.safetensors" in messages[1]


def test_a_fault_without_a_way_out_cannot_be_said():
    with pytest.raises(ValueError, match="must say what to do"):
        fault("disk", "full", "")
    counts = json.loads(as_json([Finding("a", "note", "x"), fault("b", "y", "z")]))
    assert (counts["ok"], counts["faults"], counts["notes"]) == (False, 1, 1)
