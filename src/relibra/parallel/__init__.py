"""Execute step plans inside the expert-parallel layers of a transformers model; importing this loads torch.

register()                          make `ep_implementation="relibra"` known to transformers
execute_plan(model, plan, demand)   run forward and backward passes of each micro-batch as the plan says
"""

from relibra.parallel.balanced import BalancedEP, register
from relibra.parallel.execution import PlanExecution, execute_plan

__all__ = ["BalancedEP", "PlanExecution", "execute_plan", "register"]
