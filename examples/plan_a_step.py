"""Plan one step from known routes on two nodes; print the gain of each part of the plan, and reasons for replicas."""

import numpy as np

from relibra import Budget, cluster_preset, explain_plan, plan_step, validate_plan
from relibra.planning.analysis.levers import lever_gaps
from relibra.routing.micro_batches import schedule_samples
from relibra.routing.synthetic import TraceShape, domain_trace

shape = TraceShape(rows_per_sample=[128] * 64, num_layers=2, num_experts=32, top_k=4)
trace = domain_trace(shape, np.random.default_rng(0))  # or read_trace("runs/demo/traces/step-00000")
cluster = cluster_preset("h100x8", num_ranks=8, ranks_per_node=4)
demand = schedule_samples(trace, rank_tokens=128, num_ranks=8)  # a trainer has its own schedule: Demand.with_schedule

plan = plan_step(demand, cluster, Budget(slots=1), "relibra_paper_tokens")  # without a name: the least seconds
validate_plan(plan, cluster.topology, demand)
for lever, skew in lever_gaps(plan, demand):
    print(f"{lever:<17} {skew:.3f}")
for replica in explain_plan(plan, demand, layer=1).replicas[:2]:
    print(replica)

# Output:
# static            1.279
# schedule          1.279
# homes             1.068
# replicas          1.013
# cross-node copies 1.013
# bound             1.004
# expert 23: 66 of 278 token-slots on rank 1; home rank 3 at 1.14 x mean
# expert 28: 32 of 158 token-slots on rank 0; home rank 2 at 1.07 x mean
