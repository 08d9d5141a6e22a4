"""Registry of balancers, each modelled on one system, with one interface; `relibra.planning.plan_step` calls one.

`relibra.eplb` offers `even_placement` under the names that DeepSeek's EPLB, vLLM and SGLang call. `sees` names the
loads from which a balancer plans; its plan is priced and executed on the true micro-batches.
"""

from __future__ import annotations

from relibra.errors import PlanError
from relibra.planning.balancer import Balancer
from relibra.planning.balancers import foremoe, relibra, static
from relibra.planning.baselines import (
    balanced,
    eplb,
    feplb,
    flashlb,
    flexmoe,
    laer,
    live,
    llep,
    lplb,
    moonep,
    popfetcher,
    ultraep,
)
from relibra.planning.relibra_paper import decision as relibra_paper
from relibra.user_function import import_function

BALANCERS: dict[str, Balancer] = {
    "static": Balancer(decide=static.decide, sees="nothing", based_on="plain expert parallelism"),
    "balanced": Balancer(decide=balanced.decide, sees="micro-batches", based_on="reference: copies on any rank"),
    "relibra": Balancer(decide=relibra.decide, sees="micro-batches", based_on="own: the cheapest plan of all levers"),
    "relibra_paper": Balancer(
        decide=relibra_paper.decide, sees="micro-batches", based_on="after ReLibra, arXiv 2605.08639, for seconds"
    ),
    "relibra_paper_tokens": Balancer(
        decide=relibra_paper.decide_tokens,
        sees="micro-batches",
        for_tokens=True,
        based_on="relibra_paper for even token-slots, the paper's objective",
    ),
    "relibra_paper_anywhere": Balancer(
        decide=relibra_paper.decide_tokens_across_nodes,
        sees="micro-batches",
        for_tokens=True,
        based_on="relibra_paper_tokens with replicas on any node",
    ),
    "foremoe": Balancer(decide=foremoe.decide, sees="micro-batches", based_on="after ForeMoE, arXiv 2606.11867"),
    "flashlb": Balancer(decide=flashlb.decide, sees="micro-batches", based_on="FlashLB, vllm-project/vllm-ascend"),
    "ultraep": Balancer(decide=ultraep.decide, sees="live", based_on="UltraEP, arXiv 2606.04101"),
    "ultraep_shipped": Balancer(
        decide=ultraep.decide_as_shipped, sees="live", based_on="UltraEP with copies of at least 1,024 token-slots"
    ),
    "moonep": Balancer(
        decide=moonep.decide, sees="live", own_slots=True, based_on="MoonEP, MoonshotAI/MoonEP, one domain: the group"
    ),
    "moonep_node": Balancer(
        decide=moonep.decide_in_nodes, sees="live", own_slots=True, based_on="MoonEP, each node a domain"
    ),
    "live": Balancer(
        decide=live.decide, sees="live", based_on="after UltraEP and MoonEP, with relibra's solver (balance_live)"
    ),
    "feplb": Balancer(decide=feplb.decide, sees="live", based_on="after FEPLB, arXiv 2604.19654"),
    "llep": Balancer(decide=llep.decide, sees="live", based_on="LLEP, arXiv 2601.17111, with bounded slots"),
    "eplb": Balancer(decide=eplb.decide, sees="step totals", based_on="EPLB, deepseek-ai/EPLB"),
    "eplb_lp": Balancer(decide=eplb.decide_optimal, sees="step totals", based_on="EPLB with an optimal split"),
    "lplb": Balancer(decide=lplb.decide, sees="step totals", based_on="LPLB, deepseek-ai/LPLB"),
    "eplb_history": Balancer(decide=eplb.decide, sees="history", based_on="EPLB, deepseek-ai/EPLB"),
    "laer": Balancer(decide=laer.decide, sees="history", based_on="LAER-MoE, arXiv 2602.11686"),
    "flexmoe": Balancer(decide=flexmoe.decide, sees="history", based_on="after FlexMoE, arXiv 2304.03946"),
    "popfetcher": Balancer(decide=popfetcher.decide, sees="history", based_on="after PopFetcher, ATC'25"),
}
"""Every balancer by name; "after" in `based_on`: our design from a description."""


def find_balancer(name: str) -> Balancer:
    """Return the balancer of a name or of the user's `module:function`; PlanError or ConfigError if there is none."""
    if ":" in name:
        decide = import_function("plan.balancer", name, arguments=("request",))
        return Balancer(decide=decide, sees="micro-batches", based_on="a function of the user")
    if name not in BALANCERS:
        raise PlanError(f"balancer {name!r} is unknown: allowed are {', '.join(BALANCERS)}, or your 'module:function'")
    return BALANCERS[name]
