import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_cpu_thread():
    """On the CPU with one thread, as the processes that the tests start, whatever this machine has.

    One thread also because waking a second one costs more than it brings.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        yield
    torch.set_num_threads(threads)
