import pytest
import torch
import torch.distributed as dist

from tests.rl.joined import alone


@pytest.fixture(autouse=True)
def _one_thread():
    """Keep sums in one order, and leave the other cores to whoever runs beside us."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def group():
    """Be the only rank of a group, in all tests of a module."""
    with alone():
        yield


@pytest.fixture
def _leave_group():
    """Leave the group after a test that ends with an error in it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
