import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))  # the small jobs


@pytest.fixture(autouse=True)
def one_cpu_thread(monkeypatch):
    """On the CPU with one thread, whatever this machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A data folder of the test's own, and a current folder without runs."""
    monkeypatch.setenv("MIXGRPO_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
