"""A deployment as text: its nodes, and when each micro-batch is where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relibra.printable import plural

if TYPE_CHECKING:
    from relibra.planning.deployment.deployment_plan import DeploymentPlan, Pool

WIDTH = 60
"""Columns of the picture of time."""
MOST_LAYERS = 3
"""Layers of the picture of time, of a model that has as many."""
MOST_NODES = 4
"""Nodes that are drawn; of more the first and the last."""


def draw_deployment(plan: DeploymentPlan) -> str:
    """Return the nodes of a plan beside each other, and below when its micro-batches are at each of them."""
    per_node = plan.experts_per_node
    left = _nodes(plan.attention, "attention")
    right = _nodes(plan.experts, "1 expert" if per_node == 1 else f"{per_node} experts")
    height = max(len(left), len(right))
    wide = max(map(len, left))
    left, right = (column + [""] * (height - len(column)) for column in (left, right))
    middle = [
        f"  {plan.micro_batches} micro-batches  " if row == 0 else "  <==============>  " for row in range(height)
    ]
    size = max(map(len, middle))
    lines = [
        f"{a:<{wide}}{b if row < 2 else '':^{size}}{c}"
        for row, (a, b, c) in enumerate(zip(left, middle, right, strict=True))
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", *draw_time(plan)])


def draw_time(plan: DeploymentPlan) -> list[str]:
    """Return a line each for attention, link to the experts, experts, and link back: which micro-batch is there."""
    runs = events(plan)
    end = max(finish for _, _, _, finish in runs)
    rows = {name: [" "] * WIDTH for name in ("attention", "->", "experts", "<-")}
    for name, micro_batch, start, finish in runs:
        first, last = int(start / end * WIDTH), max(int(start / end * WIDTH) + 1, int(finish / end * WIDTH))
        for column in range(first, min(last, WIDTH)):
            rows[name][column] = f"{micro_batch % 10}"
    layers = _drawn_layers(plan)
    which = "first " if layers < plan.model.layers else ""
    scale = f"{which}{plural(layers, 'layer')}, {1e3 * end:.2f} ms; digits are micro-batches"
    return [*(f"{name:>9} |{''.join(cells)}|" for name, cells in rows.items()), f"{'':9}  {scale}"]


def events(plan: DeploymentPlan) -> list[tuple[str, int, float, float]]:
    """Return (place, micro-batch, start, end) over the first layers; a place serves one micro-batch at a time."""
    free: dict[str, float] = {}
    ready = [0.0] * plan.micro_batches
    stage = plan.stage
    path = (("attention", stage.attention), ("->", stage.hop), ("experts", stage.experts), ("<-", stage.hop))
    found = []
    for _ in range(_drawn_layers(plan)):
        for micro_batch in range(plan.micro_batches):
            for name, seconds in path:
                start = max(ready[micro_batch], free.get(name, 0.0))
                free[name] = ready[micro_batch] = start + seconds
                found.append((name, micro_batch, start, start + seconds))
    return found


def _drawn_layers(plan: DeploymentPlan) -> int:
    return min(MOST_LAYERS, plan.model.layers)


def _nodes(pool: Pool, what: str) -> list[str]:
    numbers = list(range(pool.nodes))
    if pool.nodes > MOST_NODES:
        numbers = [*range(MOST_NODES - 1), -1, pool.nodes - 1]
    gpus = f"{pool.ways} x {pool.accelerator.name}"
    return ["   ..." if number < 0 else f"[{number}: {what}, {gpus}]" for number in numbers]
