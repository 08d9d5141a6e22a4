import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Keep sums in one order, and leave the other cores to whoever runs beside us."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
