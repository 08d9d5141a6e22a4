"""See what groups of 2 to 16 ranks would lose to the routes of a trace: one that you name, or a made one.

Run: python examples/look_at_a_trace.py [TRACE], such as runs/demo/traces/step-00000
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from relibra import Demand, RelibraError, iterate_trace, write_trace
from relibra.routing.statistics import rank_skew
from relibra.routing.synthetic import TraceShape, domain_trace


def made_trace(folder: Path) -> Path:
    """Write routes of a few domains, each with hot experts of its own."""
    shape = TraceShape(rows_per_sample=[256] * 64, num_layers=4, num_experts=64, top_k=4)
    write_trace(domain_trace(shape, np.random.default_rng(0)), folder / "trace")
    return folder / "trace"


with tempfile.TemporaryDirectory() as folder:
    trace = Path(sys.argv[1]) if len(sys.argv) > 1 else made_trace(Path(folder))
    try:
        demand = Demand.from_traces(iterate_trace(trace))  # holds one piece at a time
    except RelibraError as error:
        sys.exit(str(error))

load_LE = demand.counts_SLE.sum(axis=0)
for ranks in (ranks for ranks in (2, 4, 8, 16) if demand.num_experts % ranks == 0):
    skew = rank_skew(load_LE, ranks).mean()
    print(f"{ranks:2d} ranks: rank skew {skew:.2f}, ranks wait {1 - 1 / skew:.0%} of the expert time")

# Output:
#  2 ranks: rank skew 1.05, ranks wait 5% of the expert time
#  4 ranks: rank skew 1.14, ranks wait 12% of the expert time
#  8 ranks: rank skew 1.21, ranks wait 18% of the expert time
# 16 ranks: rank skew 1.41, ranks wait 29% of the expert time
