"""The sampler benchmark runs, counts right, and ends with one JSON object. No time is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "sampler.py"


def test_the_sampler_benchmark_in_its_quick_mode(comfyui: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COMFYUI_PATH": str(comfyui)}
    command = [sys.executable, str(SCRIPT), "--quick", "--threads", "1", "--clock", "cpu"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    *table, last = run.stdout.strip().splitlines()
    summary = json.loads(last)
    assert {"node_over_euler_time", "shared_prefix_time", "shared_prefix_predicted", "machine", "load_before"} <= set(summary)
    assert [result["model"] for result in summary["models"]] == ["starter", "SD3, 2 layers x 128, 16 image tokens"]
    for result in [summary, *summary["models"]]:
        assert result["rows"] == {"euler": 200, "node": 200, "shared": 109}
        assert 0 < result["shared_prefix_predicted"] < 1
    for result in summary["models"]:
        assert result["shared_prefix_predicted"] == pytest.approx((13 * result["t1"] + 12 * result["t8"]) / (25 * result["t8"]))
        assert any(line == result["model"] for line in table)
