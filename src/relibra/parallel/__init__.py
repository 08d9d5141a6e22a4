"""Execute step plans inside the expert-parallel layers of a transformers model; importing this loads torch.

In: a model, a `StepPlan` and the routes it was made for. Out: outputs and gradients of the same model without a plan.
Open `execution.py` first, then `layer.py` (one layer, from dispatch to combine), `replicas/replica_gradients.py`
(gradients of replicas return to the homes), `fallback.py` (routes and plan disagree: experts run at home).

register()                          make `ep_implementation="relibra"` known to transformers
execute_plan(model, plan, demand)   run forward and backward passes of each micro-batch as the plan says
balance_live(model, slots=1)        balance each forward pass by its own routes: nothing is recorded or planned
relocate(model, map, optimizer)     move experts to the homes of the next plan, with all their state
logical_order(model, optimizer)     experts in logical order inside: to save, to resume
logical_parameters(model)           whole parameters in logical order: to send weights elsewhere
"""

from relibra.errors import missing_packages

with missing_packages(__name__):
    from relibra.parallel.balanced import BalancedEP, register
    from relibra.parallel.execution import PlanExecution, execute_plan
    from relibra.parallel.homes.logical_order import logical_order, logical_parameters
    from relibra.parallel.homes.relocation import Relocation, relocate
    from relibra.parallel.live import LiveBalancing, LiveSkew, balance_live

__all__ = [
    "BalancedEP", "LiveBalancing", "LiveSkew", "PlanExecution", "Relocation", "balance_live", "execute_plan",
    "logical_order", "logical_parameters", "register", "relocate",
]  # fmt: skip
