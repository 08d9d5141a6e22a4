"""Settings of the plan that do nothing in a run: what it says before its first step."""

from __future__ import annotations

from collections.abc import Sequence

from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import PlanSettings

_OF_WHOLE_STEPS = ("memory_gib", "move_homes", "pack", "steps_served", "lasting")
"""Settings of plans of whole steps, which live balancing does not make."""


def plan_settings_without_effect(config: RunConfig, *, num_experts: int, num_nodes: int) -> list[str]:
    """Return a sentence for each reason why settings of the plan do nothing, or why nothing balances the run.

    num_experts   of each MoE layer of the model; 0: a dense model
    num_nodes     of the run's ranks
    """
    default, plan, ranks = PlanSettings(), config.plan, config.parallel.ranks
    given = [name for name in PlanSettings.model_fields if getattr(plan, name) != getattr(default, name)]
    if not num_experts:
        return _have_no_effect(given, "the model has no experts to balance")
    if ranks == 1:
        return _have_no_effect(given, "one rank has all experts")
    others = [name for name in given if name != "balancer"]
    if not config.follows_plans and plan.balancer == "static":
        return _have_no_effect(others, "plan.balancer='static' balances nothing")
    if not config.follows_plans:
        nothing = (
            f"nothing balances this run: plan.balancer={plan.balancer!r} plans from recorded routes, and "
            "algorithm.replay='off' records none; set plan.balancer=live"
        )
        return [nothing, *_have_no_effect(others, "no step is planned")]
    found = []
    if plan.live:
        unused = [name for name in given if name in _OF_WHOLE_STEPS]
        found += _have_no_effect(unused, "plan.balancer='live' plans no step: it places replicas layer by layer")
    if plan.live and plan.slots == 0:
        found.append(
            "nothing balances this run: plan.balancer='live' makes replicas in spare slots, and plan.slots is 0; set "
            "plan.slots to 1 or more"
        )
    if plan.dispatch == "hierarchical" and num_nodes == 1:
        found += _have_no_effect(["dispatch"], f"all {ranks} ranks are on one node")
    elif plan.dispatch == "hierarchical" and plan.sums == "canonical":
        found += _have_no_effect(["dispatch"], "with plan.sums='canonical' dispatch is flat")
    return found


def _have_no_effect(names: Sequence[str], why: str) -> list[str]:
    """Return that settings of the plan have no effect, and why; nothing where there are none."""
    if not names:
        return []
    listed = ", ".join(f"plan.{name}" for name in names)
    return [f"{listed} {'has' if len(names) == 1 else 'have'} no effect: {why}"]
