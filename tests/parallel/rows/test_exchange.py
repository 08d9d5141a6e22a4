"""Exchanges in which no row leaves its rank run no collective."""

import torch
import torch.distributed as dist

from relibra.parallel.rows.exchange import AllToAll, exchange
from relibra.planning.traffic.rank_tables import Place


def test_rows_that_stay_run_no_collective():
    without_backend = dist.ProcessGroup(0, 2)  # any collective on it raises
    sizes = AllToAll(send_R=[3, 0], receive_R=[3, 0], group=without_backend, place=Place(0, 0, 0), all_stay=True)
    rows_XH = torch.arange(6.0).reshape(3, 2).requires_grad_()
    exchange(exchange(rows_XH, sizes), sizes.back).sum().backward()
    assert rows_XH.grad is not None
    assert (rows_XH.grad == 1).all()
