import pytest
import torch
from hypothesis import settings

settings.register_profile("flow", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("flow")


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tensors here are tiny: waking a second thread costs more than it brings, ten times more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
