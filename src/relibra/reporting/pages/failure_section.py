"""The section on failures: what share of the load has its expert on another rank too."""

from __future__ import annotations

import numpy as np

from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.fault_coverage import replica_cover, step_cover
from relibra.reporting.data.number_format import percent
from relibra.reporting.html.html import paragraph, section
from relibra.reporting.html.html_bars import Bar, bar_table

MAX_ROWS = 16


def failure_section(step: ComparedStep) -> str:
    """Show the covered share of the load for the failure of each single rank; "" on one rank."""
    before, after = step.plans
    plan = after.plan
    if plan.num_ranks < 2 or not after.demand.load_MLE.any():
        return ""
    before_R, after_R = (step_cover(one.plan, one.demand) for one in step.plans)
    order = np.argsort(after_R, kind="stable")
    worst = int(order[0])
    copies = plan.num_copies / max(1, plan.replica_MLRB.shape[0] * plan.replica_MLRB.shape[1])
    bars = [
        Bar(
            name=f"rank {rank}",
            low=0.0,
            high=float(after_R[rank]),
            mark=float(before_R[rank]),
            kind="whole",
            cells=(percent(float(before_R[rank])), percent(float(after_R[rank]))),
        )
        for rank in sorted(order[:MAX_ROWS].tolist())
    ]
    layer_LR = replica_cover(plan, after.demand)
    least = int(np.argmin(layer_LR.min(axis=1)))
    hidden = f" The {MAX_ROWS} least covered of {len(order)} ranks are shown." * (len(order) > MAX_ROWS)
    return section(
        "cover",
        "If one rank fails",
        paragraph(
            f"Mean over ranks {percent(float(before_R.mean()))} → {percent(float(after_R.mean()))}, least covered rank "
            f"{worst}: {percent(float(after_R[worst]))}, least covered layer {plan.layer_ids[least]}: "
            f"{percent(float(layer_LR[least].min()))}; {copies:.1f} replicas per micro-batch and layer."
        ),
        paragraph(
            "Share of token-slots whose expert is also on another rank than the failed one, over all micro-batches "
            "and layers, counted. Weights are covered this way, optimizer states are not: they are at homes only "
            f"(arXiv 2508.21613).{hidden}",
            "how",
        ),
        bar_table(
            f"Covered load if a rank fails; bars from 0 to 100 %, a line marks the {before.name}",
            ("failed", before.name, after.name),
            bars,
            start=0.0,
            end=1.0,
        ),
    )
