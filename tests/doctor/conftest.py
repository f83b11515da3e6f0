"""Fixtures: settings and data of the test alone, and Pythons that have nothing."""

from __future__ import annotations

import os
import venv
from pathlib import Path

import pytest


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose ``data`` and ``config`` are this project's for the test."""
    for name in ("data", "config"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"MIXGRPO_{name.upper()}", str(tmp_path / name))
    monkeypatch.delenv("MIXGRPO_PYTHON", raising=False)
    return tmp_path


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python without any package."""
    venv.create(tmp_path / "bare", symlinks=os.name != "nt")
    return tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
