"""The benchmark of kills, with few of them: nothing is lost, damaged, left running or different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 5


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
def test_a_few_kills_cost_nothing():
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, str(script), "--kills", str(KILLS), "--seed", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    none = {"lost": 0, "corrupt": 0, "orphans": 0}
    assert found | none | {"kills": KILLS, "equal": True} == found, ended.stdout
    assert found["repeated"] <= found["checkpoint_every"] and found["attempts"] > 1
