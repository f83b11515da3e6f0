import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """One thread, as the processes that the tests start have, and because waking a second one costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
