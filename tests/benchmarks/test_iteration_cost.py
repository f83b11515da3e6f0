"""The benchmarks of an iteration's cost and of learning run, and count what the closed form says; times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent


def result(script: str, *options: str) -> dict:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_rows_of_an_iteration():
    found = result("iteration.py", "--threads", "1")  # two threads that share a core wait for each other
    assert found["rows"] == {"mixgrpo": 0.3719, "mixgrpo_flash": 0.2823, "mixgrpo_flash_star": 0.2699}
    assert set(found) == {"rows", "time", "other_share", "seconds", "decode_seconds"}
    assert 0 < found["other_share"] < 1 and found["decode_seconds"] > 0


def test_learning_spends_its_budget():
    found = result("learning.py")
    assert found["mixgrpo"]["iterations"] == found["permuted"]["iterations"] == [1]
    assert found["full_sde"]["gain"] == found["full_sde"]["gains"][0]
